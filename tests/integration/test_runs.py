"""The runs of a service, on real kernels and a real store: in order, recorded, followed."""

import asyncio
import contextlib
import gc
import itertools
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.event_log import EndedRuns
from sbx.protocol.runs import Cause, Event, InputRequest, Run, RunEnd, RunStart, Status, Stdout
from sbx.runtime.run.context import Context
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.run import RunHandle, RunRequest
from sbx.service.runs import Runs
from sbx.service.service import Service
from tests.fake_clock import FakeClock
from tests.made_tasks import made_tasks

ANN = Caller("ann", "key")
BOB = Caller("bob", "key")
QUEUE_MAX = 3
FOREVER = "print('begun', flush=True)\nwhile True: pass"
_names = itertools.count(1)


@pytest_asyncio.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"), queue_max=QUEUE_MAX)
    async with Service(settings, clock=FakeClock()) as service:
        yield service


@pytest_asyncio.fixture(scope="module")
async def box(service: Service) -> str:
    return (await service.sandboxes.create(ANN)).id


class Talk:
    """A conversation of its own for each test."""

    def __init__(self, service: Service, sandbox_id: str, name: str) -> None:
        self.runs: Runs = service.runs
        self.service, self.box, self.name = service, sandbox_id, name

    async def start(self, code: str, **ask: Any) -> RunHandle:
        return await self.runs.start(ANN, self.box, self.name, RunRequest("python", code, **ask))

    async def shell(self, command: str, **ask: Any) -> RunHandle:
        return await self.runs.start(ANN, self.box, self.name, RunRequest("shell", command, **ask))

    async def run(self, code: str, **ask: Any) -> Run:
        return await (await self.start(code, **ask)).result()

    async def begun(self, code: str = FOREVER, **ask: Any) -> RunHandle:
        """A cell that has begun, and does not end by itself."""
        handle = await self.start(code, **ask)
        async for _, event in handle.events():
            if isinstance(event, Stdout):
                break
        return handle

    async def history(self, *, running: bool = False) -> list[str]:
        found, _ = await self.runs.history.entries(
            ANN, self.box, conversation=self.name, running=running
        )
        return [row.id for row in found]


@pytest.fixture
def talk(service: Service, box: str) -> Talk:
    return Talk(service, box, f"talk-{next(_names)}")


async def events_of(handle: RunHandle, after: int = 0) -> list[tuple[int, Event]]:
    return [numbered async for numbered in handle.events(after)]


def printed(events: list[tuple[int, Event]]) -> str:
    return "".join(event.text for _, event in events if isinstance(event, Stdout))


# -- a run and its record --------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_a_result_is_told_once_the_store_has_it(talk: Talk) -> None:
    handle = await talk.start("print('a'); 6 * 7", description="d", tags="t,u")
    run = await handle.result()
    row = await talk.runs.history.entry(ANN, talk.box, run.run_id)
    assert row.run == run
    assert (run.result, run.stdout, row.success, row.code) == (
        "42",
        "a\n",
        True,
        "print('a'); 6 * 7",
    )
    assert (row.kind, row.conversation, row.description, row.tags) == (
        "python",
        talk.name,
        "d",
        "t,u",
    )
    assert row.ended_at is not None
    assert row.ended_at >= row.started_at


async def test_the_last_event_is_told_once_the_store_has_it(talk: Talk) -> None:
    async for _, event in (await talk.start("1")).events():
        if isinstance(event, RunEnd):
            assert (await talk.runs.history.entry(ANN, talk.box, event.run.run_id)).run == event.run


@pytest.mark.full_tier
async def test_a_run_that_goes_on_is_recorded_as_running(talk: Talk) -> None:
    handle = await talk.begun()
    row = await talk.runs.history.entry(ANN, talk.box, handle.run_id)
    assert (row.status, row.run, await talk.history()) == ("running", None, [])
    await handle.interrupt()
    run = await handle.result()
    assert (run.status, await talk.history()) == ("interrupted", [handle.run_id])


async def test_a_run_that_its_waiter_drives_is_recorded_while_it_goes_on(talk: Talk) -> None:
    await talk.run("1")
    waiter = asyncio.create_task(talk.run(FOREVER))
    async with asyncio.timeout(60):
        while len(found := await talk.history(running=True)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    handle = await talk.runs.attach(ANN, talk.box, found[0])
    await handle.interrupt()
    assert (await waiter).status == "interrupted"


async def test_a_command_is_a_run_too(talk: Talk) -> None:
    handle = await talk.shell("echo $A; cat; exit 3", env={"A": "b"}, stdin="c", cwd="/tmp")
    run = await handle.result()
    row = await talk.runs.history.entry(ANN, talk.box, run.run_id)
    assert (run.status, run.exit_code, run.stdout) == ("error", 3, "b\nc")
    assert (row.kind, row.success, row.run) == ("shell", False, run)


async def test_what_is_refused_at_once_leaves_nothing(talk: Talk) -> None:
    for ask in (
        RunRequest("python", "\ud800"),
        RunRequest("python", "1", timeout_s=-1),
        RunRequest("shell", "\0"),
    ):
        with pytest.raises(BadRequest):
            await talk.runs.start(ANN, talk.box, talk.name, ask)
    with pytest.raises(BadRequest):
        await talk.start("1", description="\ud800")
    with pytest.raises(BadRequest):
        await talk.runs.start(ANN, talk.box, "a/b", RunRequest("python", "1"))
    assert await talk.history() == []
    assert not talk.runs._running
    assert not talk.runs._queues


@pytest.mark.parametrize("follow", [True, False])
async def test_what_cannot_be_begun_is_raised_and_recorded(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    async def fail(*_: Any) -> None:
        raise Unavailable("no kernel for you", code="too_many_kernels")

    monkeypatch.setattr(Context, "ready", fail)
    handle = await talk.start("1")
    with pytest.raises(Unavailable, match="no kernel for you"):
        await (events_of(handle) if follow else handle.result())
    row = await talk.runs.history.entry(ANN, talk.box, handle.run_id)
    assert row.run is not None
    assert row.run.error is not None
    assert (row.status, row.run.error.name) == ("error", "too_many_kernels")


async def test_a_run_whose_end_cannot_be_recorded_is_told_all_the_same(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: Any) -> None:
        raise Unavailable("the disk is full", code="no_space")

    await talk.run("0")
    with monkeypatch.context() as patch:
        patch.setattr(talk.service.store, "write", full)
        handle = await talk.start("1")
        assert (await handle.result()).ok
        assert not handle.recorded
        with pytest.raises(Unavailable) as refused:
            await talk.run("2")
        assert refused.value.code == "not_recording"
    async with asyncio.timeout(60):
        while not handle.recorded:  # noqa: ASYNC110  # the store is asked again and again
            await asyncio.sleep(0.01)
    assert (await talk.runs.history.entry(ANN, talk.box, handle.run_id)).success
    assert (await talk.run("2")).ok


# -- how a run may end -----------------------------------------------------------------------------


async def test_a_killed_kernel_is_a_result_and_the_next_run_says_so(talk: Talk) -> None:
    await talk.run("a = 1")
    handle = await talk.start("import os; os._exit(1)")
    run = await handle.result()
    assert (run.status, run.cause, run.state_lost) == ("killed", Cause.CRASHED, True)
    row = await talk.runs.history.entry(ANN, talk.box, handle.run_id)
    assert (row.status, row.cause) == ("killed", "crashed")
    assert (await talk.run("1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_its_time_out_ends_it(talk: Talk) -> None:
    handle = await talk.begun(timeout_s=0.5)
    assert (await handle.result()).status == "timeout"
    assert (await talk.runs.history.entry(ANN, talk.box, handle.run_id)).status == "timeout"
    assert (await (await talk.shell("sleep 60", timeout_s=0.3)).result()).status == "timeout"


@pytest.mark.full_tier
async def test_huge_output_is_bounded_for_followers_and_in_the_store(talk: Talk) -> None:
    handle = await talk.start("print('x' * 64_000_000)")
    events = await events_of(handle)
    run = await handle.result()
    assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)
    assert len(printed(events)) <= 17 << 20
    row = await talk.runs.history.entry(ANN, talk.box, handle.run_id)
    assert row.run is not None
    assert len(row.run.stdout) < 10_000


async def test_runs_share_the_room_for_output_and_the_greedy_one_is_ended(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk.runs._room, "limit", 6_000_000)
    greedy = await talk.begun("print('begun')\nfor _ in range(9): print('x' * 1_000_000)\ninput()")
    other = Talk(talk.service, talk.box, f"{talk.name}-b")
    modest = await other.start("print('y' * 1_000_000); 1")
    run = await greedy.result()
    assert (run.status, run.cause) == ("killed", Cause.OUTPUT)
    assert run.error is not None
    assert "together" in run.error.value
    assert (await modest.result()).result == "1"
    assert talk.runs._room.used == 0


async def test_code_that_waits_is_bounded_in_all(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbx.service.runs._ASKED_MAX", 2000)
    first = await talk.begun()
    waiting = await talk.start("#" * 1500)
    with pytest.raises(Unavailable) as refused:
        await talk.start("#" * 1000)
    assert refused.value.code == "queue_full"
    await first.interrupt()
    await waiting.result()
    assert (await talk.run("#" * 1000)).ok


async def test_a_waiter_that_goes_away_does_not_end_it(talk: Talk) -> None:
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n'done'"
    handle = await talk.start(code)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await handle.result()
    assert not handle.ended
    assert (await (await talk.shell("touch go")).result()).ok
    run = await handle.result()
    assert (run.status, run.result) == ("ok", "'done'")
    assert (await talk.runs.history.entry(ANN, talk.box, handle.run_id)).run == run


async def test_a_waiter_on_a_free_kernel_drives_the_cell_without_a_task(talk: Talk) -> None:
    """To switch to another task and back takes as long as a short cell does on this side."""
    for _ in range(2):
        await talk.run("1")
    with made_tasks() as made:
        assert (await talk.run("2")).result == "2"
    assert made == []
    with made_tasks() as made:
        await asyncio.create_task(talk.run("2"))
    assert len(made) == 1


async def test_waiters_that_go_away_at_any_moment_leave_every_run_recorded(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk.runs, "_queue_max", 100)
    await talk.run("1")
    handles = []
    for turn in range(40):
        handles.append(await talk.start(str(turn)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(turn * 0.0001):
                await handles[-1].result()
    runs = [await handle.result() for handle in handles]
    assert [run.result for run in runs] == [str(turn) for turn in range(40)]
    assert len(await talk.history()) == 41


async def test_a_run_that_nobody_waits_for_runs(talk: Talk) -> None:
    handle = await talk.start("1")
    async with asyncio.timeout(60):
        while not await talk.history():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert handle.ended


# -- the queue -------------------------------------------------------------------------------------


async def test_cells_are_served_in_order(talk: Talk) -> None:
    handles = [await talk.start(f"order = {n}; order") for n in range(QUEUE_MAX + 1)]
    runs = await asyncio.gather(*(handle.result() for handle in reversed(handles)))
    assert [run.result for run in reversed(runs)] == ["0", "1", "2", "3"]
    assert [run.execution_count for run in reversed(runs)] == [1, 2, 3, 4]
    assert await talk.history() == [handle.run_id for handle in reversed(handles)]


@pytest.mark.full_tier
async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(talk: Talk) -> None:
    first = await talk.begun()
    waiting = [await talk.start("1") for _ in range(QUEUE_MAX)]
    with pytest.raises(Unavailable) as refused:
        await talk.start("1")
    assert refused.value.code == "queue_full"
    assert refused.value.details == {"limit": QUEUE_MAX, "retry_after_s": 1.0}
    assert (await (await talk.shell("echo beside")).result()).stdout == "beside\n"
    other = Talk(talk.service, talk.box, f"{talk.name}-b")
    assert (await other.run("1")).ok
    await first.interrupt()
    assert all([(await handle.result()).ok for handle in waiting])
    assert (await talk.run("2")).result == "2"


async def test_so_many_commands_run_at_once_and_no_more(talk: Talk) -> None:
    handles = [await talk.shell("sleep 60") for _ in range(QUEUE_MAX)]
    with pytest.raises(Unavailable) as refused:
        await talk.shell("echo")
    assert refused.value.code == "queue_full"
    assert await talk.runs.interrupt(ANN, talk.box, talk.name)
    assert {(await handle.result()).status for handle in handles} == {Status.INTERRUPTED}


# -- interrupts ------------------------------------------------------------------------------------


async def test_interrupt_ends_the_cell_whose_turn_it_is(talk: Talk) -> None:
    first = await talk.begun()
    second = await talk.start("'next'")
    assert await talk.runs.interrupt(ANN, talk.box, talk.name)
    assert (await first.result()).status == "interrupted"
    assert (await second.result()).result == "'next'"
    assert not await talk.runs.interrupt(ANN, talk.box, talk.name)
    assert not await first.interrupt()


async def test_a_run_that_waits_can_be_taken_out_of_the_queue(talk: Talk) -> None:
    first = await talk.begun()
    second, third = await talk.start("never = 1"), await talk.start("'never' in dir()")
    assert await second.interrupt()
    assert (await second.result()).status == "interrupted"
    assert [type(event) for _, event in await events_of(second)] == [RunStart, RunEnd]
    await first.interrupt()
    assert (await third.result()).result == "False"


async def test_a_run_can_be_interrupted_before_it_begins(talk: Talk) -> None:
    handle = await talk.start(FOREVER)
    assert await handle.interrupt()
    assert (await handle.result()).status == "interrupted"
    assert (await talk.run("1")).ok


# -- followers -------------------------------------------------------------------------------------


async def test_who_comes_back_gets_what_was_missed(talk: Talk) -> None:
    handle = await talk.begun(
        "for n in range(3): print(n, flush=True)\ninput('go on? ')\n3", interactive=True
    )
    again = await talk.runs.attach(ANN, talk.box, handle.run_id)
    first: list[tuple[int, Event]] = []
    async for numbered in again.events():
        first.append(numbered)
        if isinstance(numbered[1], InputRequest):
            break
    await again.answer("yes")
    rest = await events_of(again, after=len(first))
    whole = await events_of(handle)
    assert first + rest == whole
    assert [number for number, _ in whole] == list(range(1, len(whole) + 1))
    assert printed(whole) == "0\n1\n2\n"
    assert isinstance(whole[-1][1], RunEnd)
    assert await events_of(handle, after=len(whole)) == []
    assert await events_of(handle, after=10**9) == []
    assert await events_of(handle, after=-5) == whole


async def test_a_run_is_replayed_for_60_s_after_its_end(talk: Talk) -> None:
    handle = await talk.start("print('a'); 1")
    whole = await events_of(handle)
    clock = talk.service.clock
    assert isinstance(clock, FakeClock)
    clock.advance(59.5)
    again = await talk.runs.attach(ANN, talk.box, handle.run_id)
    assert await events_of(again, after=1) == whole[1:]
    assert await again.result() == await handle.result()
    clock.advance(0.5)
    with pytest.raises(NotFound):
        await talk.runs.attach(ANN, talk.box, handle.run_id)
    assert len(talk.runs._ended) == 0
    assert (
        await talk.runs.history.entry(ANN, talk.box, handle.run_id)
    ).run == await handle.result()


async def test_what_is_kept_for_replay_is_bounded_in_all(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk.runs, "_ended", EndedRuns(talk.service.clock, 5_000_000))
    handles = []
    for _ in range(4):
        handles.append(await talk.start("print('x' * 1_000_000)"))
        await handles[-1].result()
        assert 1_000_000 < talk.runs._ended.size <= 5_000_000
    assert await talk.runs.attach(ANN, talk.box, handles[-1].run_id) is handles[-1]
    with pytest.raises(NotFound):
        await talk.runs.attach(ANN, talk.box, handles[0].run_id)


async def test_output_of_ended_runs_is_freed_without_a_collection(talk: Talk) -> None:
    """A run that had waited in the queue referred to itself. So megabytes of output stayed in
    memory until a full garbage collection, outside of the limit of the replay."""
    gc.collect()
    gc.disable()
    try:
        handles = [await talk.start(f"print({number})") for number in range(4)]
        for handle in handles:
            await handle.result()
        lives = [weakref.ref(handle.live) for handle in handles]
        talk.runs._ended.clear()
        del handle, handles
        async with asyncio.timeout(10):
            while any(live() is not None for live in lives):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)
    finally:
        gc.enable()


# -- who may ---------------------------------------------------------------------------------------


async def test_what_others_run_is_not_found(talk: Talk, service: Service) -> None:
    handle = await talk.begun()
    mine = await service.sandboxes.create(BOB)
    for sandbox_id in (talk.box, mine.id, None, "sandbox-none"):
        with pytest.raises(NotFound):
            await talk.runs.attach(BOB, sandbox_id, handle.run_id)
    for call in (
        talk.runs.start(BOB, talk.box, talk.name, RunRequest("python", "1")),
        talk.runs.interrupt(BOB, talk.box, talk.name),
        talk.runs.history.entries(BOB, talk.box),
        talk.runs.history.last(BOB, talk.box),
        talk.runs.history.entry(BOB, talk.box, handle.run_id),
        talk.runs.history.entry(BOB, mine.id, handle.run_id),
        talk.runs.history.annotate(BOB, talk.box, handle.run_id, notes="n"),
        talk.runs.attach(ANN, mine.id, handle.run_id),
        talk.runs.attach(ANN, talk.box, "run-none"),
    ):
        with pytest.raises(NotFound):
            await call
    assert await talk.runs.attach(ANN, None, handle.run_id) is handle
    await handle.interrupt()
    await handle.result()


async def test_a_token_reaches_its_own_conversation_only(talk: Talk) -> None:
    handle = await talk.start("1")
    await handle.result()
    inside = Caller("ann", "token", conversation_id=talk.name)
    outside = replace(inside, conversation_id="other")
    found, total = await talk.runs.history.entries(inside, talk.box)
    assert ([row.id for row in found], total) == ([handle.run_id], 1)
    assert await talk.runs.attach(inside, talk.box, handle.run_id) is handle
    assert (await talk.runs.history.entries(outside, talk.box)) == ([], 0)
    for call in (
        talk.runs.start(outside, talk.box, talk.name, RunRequest("python", "1")),
        talk.runs.attach(outside, talk.box, handle.run_id),
        talk.runs.interrupt(outside, talk.box, talk.name),
        talk.runs.history.entry(outside, talk.box, handle.run_id),
        talk.runs.history.annotate(outside, talk.box, handle.run_id, notes="n"),
        talk.runs.history.entries(outside, talk.box, conversation=talk.name),
    ):
        with pytest.raises(NotFound):
            await call


async def test_without_the_scope_execute_nothing_is_run_or_followed(talk: Talk) -> None:
    handle = await talk.start("1")
    await handle.result()
    reader = Caller("ann", "token", scopes=frozenset({"files:read"}))
    for call in (
        talk.runs.start(reader, talk.box, talk.name, RunRequest("python", "1")),
        talk.runs.attach(reader, talk.box, handle.run_id),
        talk.runs.interrupt(reader, talk.box, talk.name),
        talk.runs.history.entries(reader, talk.box),
    ):
        with pytest.raises(NotFound):
            await call


# -- input() ---------------------------------------------------------------------------------------


async def test_input_is_answered_from_afar(talk: Talk) -> None:
    handle = await talk.start("a = input('a? '); b = input('b? '); a + b", interactive=True)
    asked = []
    async for _, event in handle.events():
        if isinstance(event, InputRequest):
            asked.append(event.prompt)
            await handle.answer(f"é{len(asked)}")
            with pytest.raises(Conflict) as refused:
                await handle.answer("again")
            assert refused.value.code == "no_question"
    assert (asked, (await handle.result()).result) == (["a? ", "b? "], "'é1é2'")
    with pytest.raises(Conflict):
        await handle.answer("late")


@pytest.mark.parametrize("bad", ["\ud800", "x" * (2 << 20)])
async def test_an_answer_that_cannot_be_one_leaves_the_question(talk: Talk, bad: str) -> None:
    handle = await talk.start("input()", interactive=True)
    async for _, event in handle.events():
        if isinstance(event, InputRequest):
            with pytest.raises(BadRequest):
                await handle.answer(bad)
            await handle.answer("good")
    assert (await handle.result()).result == "'good'"


async def test_no_answer_interrupts_the_run(talk: Talk) -> None:
    handle = await talk.start("input()", interactive=True)
    async for _, event in handle.events():
        if isinstance(event, InputRequest):
            await handle.answer(None)
    assert (await handle.result()).status == "interrupted"


# -- history ---------------------------------------------------------------------------------------


async def test_history_has_its_last_entry_and_takes_notes(service: Service, talk: Talk) -> None:
    mine = (await service.sandboxes.create(ANN)).id
    with pytest.raises(NotFound):
        await talk.runs.history.last(ANN, mine)
    own = Talk(service, mine, "default")
    first, second = await own.run("1/0", tags="math"), await own.run("2")
    await (await own.shell("true")).result()
    assert (await own.runs.history.last(ANN, mine)).kind == "shell"
    assert (await own.runs.history.last(ANN, mine, exec_type="python")).id == second.run_id
    row = await own.runs.history.annotate(ANN, mine, first.run_id, notes="n", description="")
    assert (row.notes, row.description, row.tags) == ("n", "", "math")
    for asked in ({"tags": "MAT, other"}, {"has_notes": True}):
        found, total = await own.runs.history.entries(ANN, mine, **asked)
        assert ([one.id for one in found], total) == ([first.run_id], 1)
    found, _ = await own.runs.history.entries(ANN, mine, success_only=True, exec_type="python")
    assert [one.id for one in found] == [second.run_id]
    with pytest.raises(BadRequest):
        await own.runs.history.annotate(ANN, mine, first.run_id, notes="x" * 20_000)
    with pytest.raises(BadRequest):
        await own.runs.history.entries(ANN, mine, tags="a," * 100)


# -- the end of a sandbox, and of the service ------------------------------------------------------


async def test_deleting_a_sandbox_ends_its_runs_and_deletes_their_records(service: Service) -> None:
    own = Talk(service, (await service.sandboxes.create(ANN)).id, "default")
    first, second = await own.begun(), await own.start("1")
    await service.sandboxes.delete(ANN, own.box)
    for handle in (first, second):
        with contextlib.suppress(Conflict):
            assert (await handle.result()).status == "interrupted"
        assert await service.store.row("SELECT 1 FROM runs WHERE id = ?", handle.run_id) is None
        with pytest.raises(NotFound):
            await own.runs.attach(ANN, own.box, handle.run_id)


async def test_a_service_that_ends_takes_no_more_and_records_what_ran(tmp_path: Path) -> None:
    settings, clock = Settings(data_dir=tmp_path), FakeClock()
    async with Service(settings, clock=clock) as service:
        own = Talk(service, (await service.sandboxes.create(ANN)).id, "default")
        handle = await own.begun()
        assert not await service.runs.drain(0.05)
        with pytest.raises(Unavailable) as refused:
            await own.start("1")
        assert refused.value.code == "shutting_down"
    assert handle.ended
    async with Service(settings, clock=clock) as service:
        row = await service.store.row("SELECT status FROM runs WHERE id = ?", handle.run_id)
        assert row is not None
        assert row["status"] == "interrupted"
        assert await service.runs.drain(1)
