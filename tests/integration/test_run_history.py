"""The runs that a store remembers: written in two steps or one, found again, bounded in size."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sbx.protocol.runs import Cause, Run, RunError, Status
from sbx.store import Store
from sbx.store import runs as rows
from sbx.store.runs import Begun, RunFilter, RunRow

BOX = "sandbox-1"
OTHER = "sandbox-2"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "sbx.db")
    for name in (BOX, OTHER):
        await store.write(partial(_add_sandbox, name=name))
    yield store
    await store.close()


def _add_sandbox(on: Any, name: str) -> None:
    on.execute(
        "INSERT INTO workspaces (id, owner, directory, created_at, last_accessed_at)"
        " VALUES (?1, 'ann', ?1, 0, 0)",
        (name,),
    )
    on.execute(
        "INSERT INTO sandboxes (id, owner, policy_name, workspace_id, created_at)"
        " VALUES (?1, 'ann', 'default', ?1, 0)",
        (name,),
    )


def begun(name: str, **fields: Any) -> Begun:
    kept = {"sandbox_id": BOX, "conversation": "default", "kind": "python", "code": "1"}
    return Begun(id=name, started_at=10.0, **{**kept, **fields})


async def ran(store: Store, name: str, run: Run | None = None, **fields: Any) -> None:
    run = run or Run(name, Status.OK)
    act = partial(rows.end, begun=begun(name, **fields), run=run, at=12.0)
    await store.write(act)


async def ids(store: Store, **wanted: Any) -> list[str]:
    found, total = await rows.list_for_sandbox(store, BOX, RunFilter(**wanted))
    assert total == len(found)
    return [row.id for row in found]


async def only(store: Store, name: str) -> RunRow:
    found = await rows.get(store, BOX, name)
    assert found is not None
    return found


RESULT = Run(
    "a",
    Status.KILLED,
    Cause.MEMORY,
    stdout="out\ud800",
    stderr="err",
    text="text",
    result="7",
    outputs=({"text/plain": "7", "application/json": {"a": [1, float("inf")]}},),
    error=RunError("MemoryError", "no more", "…"),
    exit_code=137,
    execution_count=3,
    duration_s=1.5,
    state_lost=True,
)


async def test_a_run_is_running_and_then_what_became_of_it(store: Store) -> None:
    first = begun("a", description="d", tags="x,y", conversation="c", kind="shell")
    await store.write(partial(rows.begin, begun=first))
    row = await only(store, "a")
    assert (row.status, row.run, row.ended_at, row.success) == ("running", None, None, False)
    await store.write(partial(rows.end, begun=first, run=RESULT, at=11.5))
    row = await only(store, "a")
    assert row.run == RESULT
    assert (row.status, row.cause, row.ended_at, row.duration_ms) == (
        "killed",
        "memory",
        11.5,
        1500,
    )
    assert (row.description, row.tags, row.conversation, row.kind) == ("d", "x,y", "c", "shell")


async def test_an_end_needs_no_beginning_and_a_late_beginning_changes_nothing(store: Store) -> None:
    await ran(store, "a", RESULT)
    await store.write(partial(rows.begin, begun=begun("a")))
    assert (await only(store, "a")).run == RESULT


async def test_runs_that_a_crash_interrupted_say_that_the_service_ended(store: Store) -> None:
    await store.write(partial(rows.begin, begun=begun("a")))
    await ran(store, "b")
    assert await rows.mark_interrupted(store, 20.0) == 1
    row = await only(store, "a")
    assert row.run is not None
    assert (row.status, row.ended_at, row.run.state_lost) == ("interrupted", 20.0, True)
    assert row.run.error == RunError("ServiceEnded", "the service ended while this ran", "")
    assert (await only(store, "b")).status == "ok"
    assert await rows.mark_interrupted(store, 30.0) == 0


async def test_the_newest_come_first_a_page_at_a_time(store: Store) -> None:
    for name in "abcde":
        await ran(store, name)
    page, total = await rows.list_for_sandbox(store, BOX, RunFilter(), limit=2, offset=1)
    assert ([row.id for row in page], total) == (["d", "c"], 5)
    assert await rows.list_for_sandbox(store, BOX, RunFilter(), limit=2, offset=1 << 70) == ([], 5)
    assert await rows.list_for_sandbox(store, OTHER, RunFilter()) == ([], 0)


async def test_what_runs_is_left_out_unless_it_is_asked_for(store: Store) -> None:
    await ran(store, "a")
    await store.write(partial(rows.begin, begun=begun("b")))
    assert await ids(store) == ["a"]
    assert await ids(store, running=True) == ["b", "a"]


async def test_history_is_filtered(store: Store) -> None:
    await ran(store, "a", conversation="c")
    await ran(store, "b", kind="shell", description="")
    await ran(store, "c", Run("c", Status.ERROR), description="d")
    await rows.annotate(store, BOX, "a", description=None, tags=None, notes="n")
    assert await ids(store, kind="shell") == ["b"]
    assert await ids(store, kind="browser") == []
    assert await ids(store, conversation="c") == ["a"]
    assert await ids(store, success_only=True) == ["b", "a"]
    assert await ids(store, has_notes=True) == ["a"]
    assert await ids(store, has_notes=False) == ["c", "b"]
    assert await ids(store, has_description=True) == ["c"]
    assert await ids(store, has_description=False) == ["b", "a"]


async def test_tags_are_found_by_any_part_in_either_case_and_are_no_patterns(store: Store) -> None:
    await ran(store, "a", tags="Alpha,beta")
    await ran(store, "b", tags="50%_x\\y")
    await ran(store, "c")
    assert await ids(store, tags=["LPH"]) == ["a"]
    assert await ids(store, tags=["gamma", "beta", "50"]) == ["b", "a"]
    assert await ids(store, tags=["%"]) == ["b"]
    assert await ids(store, tags=["_"]) == ["b"]
    assert await ids(store, tags=["\\"]) == ["b"]
    assert await ids(store, tags=["'; DROP TABLE runs; --"]) == []


async def test_notes_change_what_is_given_and_nothing_of_other_sandboxes(store: Store) -> None:
    await ran(store, "a", description="d", tags="t")
    assert await rows.annotate(store, BOX, "a", description=None, tags="u", notes="n")
    row = await only(store, "a")
    assert (row.description, row.tags, row.notes) == ("d", "u", "n")
    assert not await rows.annotate(store, OTHER, "a", description="x", tags=None, notes=None)
    assert (await only(store, "a")).description == "d"


async def test_what_is_kept_of_a_huge_run_is_small(store: Store) -> None:
    figure = {"image/png": "A" * 1_000_000, "text/plain": "<Figure>"}
    run = Run(
        "a",
        Status.ERROR,
        stdout="o" * 1_000_000,
        stderr="e" * 1_000_000,
        text="t" * 1_000_000,
        result="r" * 1_000_000,
        outputs=(figure,) * 1000,
        error=RunError("n" * 1_000_000, "v" * 1_000_000, "t" * 1_000_000),
    )
    await ran(store, "a", run, code="c" * 1_000_000)
    row = await only(store, "a")
    assert row.run is not None
    assert row.run.truncated
    assert row.run.stdout.startswith("oooo")
    assert row.run.stdout.endswith("oooo")
    assert "991808 characters left out" in row.run.stdout
    assert row.run.outputs[0] == {"text/plain": "<Figure>"}
    size = await store.row("SELECT length(code) + length(result) AS size FROM runs")
    assert size is not None
    assert size["size"] < 150_000


async def test_a_run_of_ordinary_size_is_kept_whole(store: Store) -> None:
    run = Run("a", Status.OK, stdout="x" * 8000, outputs=({"image/png": "A" * 8000},))
    await ran(store, "a", run)
    assert (await only(store, "a")).run == run


async def test_a_page_of_huge_runs_ends_early_and_the_next_goes_on(store: Store) -> None:
    run = Run("a", Status.OK, stdout="\0" * 8000, stderr="\0" * 8000, text="\0" * 8000)
    names = [f"run-{number}" for number in range(70)]
    for name in names:
        await ran(store, name, run)
    seen: list[str] = []
    while len(seen) < 70:
        page, total = await rows.list_for_sandbox(
            store, BOX, RunFilter(), limit=500, offset=len(seen)
        )
        assert total == 70
        assert 0 < len(page) < 70
        seen += [row.id for row in page]
    assert seen == names[::-1]


async def test_the_oldest_are_forgotten_beyond_so_many_save_what_runs(store: Store) -> None:
    await store.write(partial(rows.begin, begun=begun("still")))
    for name in "abcde":
        await ran(store, name)
    await ran(store, "z", sandbox_id=OTHER)
    await store.write(partial(rows.prune, sandbox_id=BOX, history_max=3))
    assert await ids(store, running=True) == ["e", "d", "c", "still"]
    assert await rows.get(store, OTHER, "z") is not None
