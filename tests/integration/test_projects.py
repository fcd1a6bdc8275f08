"""The projects of a service: who may use which, and the sandboxes of their conversations."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from persistent_sandboxes import ME, eventually, open_service, run

from sbx.errors import BadRequest, Closed, Conflict, Denied, NotFound, Unavailable
from sbx.protocol.runs import Run
from sbx.runtime.settings import Settings
from sbx.service.projects.projects import Project, refusal
from sbx.service.projects.sessions import OpenSession
from sbx.service.service import Service
from sbx.store import projects as rows
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.core
OWNER = 4242


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Two directories of an ordinary user."""
    for name in ("work/one", "work/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "name.txt").write_text(name[-3:])
    if os.geteuid() == 0:
        for path in (tmp_path / "work").rglob("*"):
            os.chown(path, OWNER, OWNER)
    return tmp_path / "work"


@asynccontextmanager
async def service_over(
    work: Path, clock: FakeClock | None = None, **chosen: Any
) -> AsyncIterator[Service]:
    async with open_service(work.parent / "data", clock, project_dirs=(work,), **chosen) as service:
        yield service


@pytest.fixture
async def service(work: Path) -> AsyncIterator[Service]:
    async with service_over(work) as service:
        yield service


async def project_at(service: Service, directory: Path, **more: Any) -> Project:
    return await service.projects.create(
        "me", name="mine", working_directory=str(directory), **more
    )


async def cell(box: OpenSession, code: str) -> Run:
    return await box.start_run(code).result()


@pytest.mark.full_tier
async def test_a_project_is_made_found_changed_and_deleted(service: Service, work: Path) -> None:
    projects = service.projects
    made = await project_at(service, work / "one")
    assert (made.working_directory, made.sandbox_enabled) == (str(work / "one"), True)
    other = await project_at(service, work / "two")
    first = await projects.list("me", limit=1)
    rest = await projects.list("me", cursor=first.next_cursor)
    assert {one.id for one in (*first.items, *rest.items)} == {made.id, other.id}
    assert rest.next_cursor is None
    changed = await projects.change("me", made.id, name="ours", working_directory=str(work / "two"))
    assert await projects.get("me", made.id) == changed
    assert (changed.name, changed.working_directory) == ("ours", str(work / "two"))
    await service.deletions.project("me", made.id)
    with pytest.raises(NotFound):
        await projects.get("me", made.id)
    assert sorted(os.listdir(work)) == ["one", "two"]


async def test_what_another_owner_has_is_not_there(service: Service, work: Path) -> None:
    made, projects = await project_at(service, work / "one"), service.projects
    assert not (await projects.list("other")).items
    for act in (
        projects.get("other", made.id),
        projects.change("other", made.id, name="theirs"),
        service.deletions.project("other", made.id),
        projects.using("other", made.id, "talk").__aenter__(),
    ):
        with pytest.raises(NotFound):
            await act
    assert (await projects.get("me", made.id)).name == "mine"


async def test_a_directory_has_projects_of_one_owner(service: Service, work: Path) -> None:
    """The key of one owner could make a project in another owner's project directory."""
    projects = service.projects
    for name in ("one/sub", "one/sub/deep", "one-more"):
        (work / name).mkdir()
        if os.geteuid() == 0:
            os.chown(work / name, OWNER, OWNER)
    made = await project_at(service, work / "one/sub")
    await service.deletions.project(
        "me", (await project_at(service, work / "one")).id
    )  # one owner may
    free = await projects.create("you", name="x", working_directory=str(work / "one-more"))
    for directory in (work / "one", work / "one/sub", work / "one/sub/deep"):
        for act in (
            projects.create("you", name="x", working_directory=str(directory)),
            projects.change("you", free.id, working_directory=str(directory)),
        ):
            with pytest.raises(Conflict) as raised:
                await act
            assert raised.value.code == "directory_in_use"
            assert raised.value.hint
    assert await projects.get("you", free.id) == free
    for one in (await projects.list("me")).items:
        await service.deletions.project("me", one.id)
    await projects.change("you", free.id, working_directory=made.working_directory)


async def test_what_may_be_no_project_is_refused(service: Service, work: Path) -> None:
    for directory, error in (
        (work.parent, Denied),
        (work.parent / "data", Denied),
        (Path("/etc"), Denied),
        (work / "missing", BadRequest),
        (work / "one/name.txt", BadRequest),
    ):
        with pytest.raises(error):
            await project_at(service, directory)
    for name in ("", " ", "a\nb", "x" * 201):
        with pytest.raises(BadRequest) as raised:
            await service.projects.create("me", name=name, working_directory=str(work / "one"))
        assert raised.value.code == "invalid_name"
    made = await project_at(service, work / "one")
    with pytest.raises(Denied):
        await service.projects.change("me", made.id, working_directory="/etc")
    assert (await service.projects.list("me")).items == [made]


async def test_without_the_setting_there_are_none(work: Path) -> None:
    async with open_service(work.parent / "data") as service:
        with pytest.raises(Denied) as raised:
            await project_at(service, work / "one")
    assert "SBX_PROJECT_DIRS" in (raised.value.hint or "")


async def test_a_conversation_has_one_box_and_no_other(service: Service, work: Path) -> None:
    one, two = await project_at(service, work / "one"), await project_at(service, work / "two")
    using = service.projects.using
    async with using("me", one.id, "a") as box, using("me", one.id, "b") as other:
        assert (await cell(box, "x = 1; open('name.txt').read()")).result == "'one'"
        assert (await cell(other, "'x' in globals()")).result == "False"
        async with using("me", one.id, "a") as again:
            assert again is box
        with pytest.raises(Conflict) as raised:
            await using("me", two.id, "a").__aenter__()
        assert raised.value.code == "project_in_use"
    async with using("me", one.id, "a") as box:
        assert (await cell(box, "x")).result == "1"
        await box.allow_commands()
    async with using("me", two.id, "a") as box:
        assert not box.commands_allowed
        assert (await cell(box, "open('name.txt').read()")).result == "'two'"


async def test_a_box_is_closed_when_idle_and_remembers_what_matters(work: Path) -> None:
    clock = FakeClock()
    async with service_over(work, clock, idle_timeout=60) as service:
        made = await project_at(service, work / "one")
        async with service.projects.using("me", made.id, "talk") as box:
            await box.allow_commands()
            await cell(box, "x = 1")
            clock.advance(3600)
            await service.reaper.round()
            assert (await cell(box, "x")).result == "1"
        await service.reaper.round()
        assert (await cell(box, "x")).result == "1"
        clock.advance(61)
        await service.reaper.round()
        with pytest.raises(Closed):
            await cell(box, "x")
        async with service.projects.using("me", made.id, "talk") as box:
            assert box.commands_allowed
            first = await cell(box, "'x' in globals()")
            assert (first.result, first.state_lost) == ("False", True)
        await service.projects.close_conversation("me", "talk")
        async with service.projects.using("me", made.id, "talk") as box:
            assert not box.commands_allowed
            assert not (await cell(box, "1")).state_lost


@pytest.mark.full_tier
async def test_a_request_that_narrows_the_policy_counts_in_the_box(
    service: Service, work: Path
) -> None:
    made = await project_at(service, work / "one")
    asked: dict[str, Any] = {"narrower": {"limits": {"wall_time": "5s"}}, "env": {"MINE": "1"}}
    async with service.projects.using("me", made.id, "talk", **asked) as box:
        assert (await cell(box, "import os; os.environ['MINE']")).result == "'1'"
        assert (await box.start_shell("echo $MINE").result()).stdout == "1\n"
        with pytest.raises(BadRequest) as raised:
            box.start_shell("true", timeout=6)
        assert raised.value.code == "limit_widened"


async def test_one_that_is_used_is_deleted_at_once(service: Service, work: Path) -> None:
    made = await project_at(service, work / "one")
    async with service.projects.using("me", made.id, "talk") as box:
        live = box.start_shell("sleep 600")
        await service.deletions.project("me", made.id)
        with pytest.raises(Closed):
            await live.result()
    with pytest.raises(NotFound):
        await service.deletions.project("me", made.id)
    with pytest.raises(Closed):
        box.start_shell("true")
    with pytest.raises(NotFound):
        await service.projects.using("me", made.id, "talk").__aenter__()


@pytest.mark.full_tier
async def test_closing_a_conversation_ends_what_goes_on_in_it(service: Service, work: Path) -> None:
    made = await project_at(service, work / "one")
    async with service.projects.using("me", made.id, "talk") as box:
        live = box.start_shell("touch on; sleep 600")
        await eventually((work / "one/on").exists)
        await service.projects.close_conversation("me", "talk")
        with pytest.raises(Closed):
            await live.result()
    assert not service.runtime.unowned_directories


async def test_a_directory_that_was_swapped_is_not_used(service: Service, work: Path) -> None:
    made = await project_at(service, work / "one")
    (work / "one").rename(work / "moved")
    (work / "one").symlink_to("/etc")
    with pytest.raises(BadRequest) as raised:
        await service.projects.using("me", made.id, "talk").__aenter__()
    assert raised.value.code == "invalid_directory"


async def test_uploads_of_the_session_are_seen_and_nothing_is_written_beside(
    service: Service, work: Path
) -> None:
    made = await project_at(service, work / "one")
    sandbox = (await service.sandboxes.create(ME)).id
    async with service.sandboxes.using(ME, sandbox, scope="execute") as use:
        talk = use.conversation("talk")
        await talk.uploads.put_bytes("a.csv", b"1,2\n")
        async with service.projects.using("me", made.id, "talk", uploads=talk) as box:
            assert [one.path for one in await box.uploads.list()] == ["/uploads/a.csv"]
            assert (await cell(box, "open('/uploads/a.csv').read()")).result == "'1,2\\n'"
            assert (await cell(box, "open('/uploads/a.csv', 'w')")).status == "error"
            assert await box.files.read_bytes("/uploads/a.csv") == b"1,2\n"
            put = await box.uploads.put_bytes("b.csv", b"3")
            assert put.path == "/uploads/b.csv"
            assert (await box.start_shell("cat /uploads/b.csv").result()).stdout == "3"
        await talk.uploads.delete("a.csv")
        async with service.projects.using("me", made.id, "talk", uploads=talk) as again:
            assert again is box
            assert (await cell(box, "import os; os.listdir('/uploads')")).result == "['b.csv']"
        assert [one.name for one in await talk.uploads.list()] == ["b.csv"]
    assert (await run(service, sandbox, "2 + 3")).result == "5"
    assert os.listdir(work / "one") == ["name.txt"]


@pytest.mark.full_tier
async def test_its_files_are_not_taken_for_left_over(service: Service, work: Path) -> None:
    made = await project_at(service, work / "one")
    async with service.projects.using("me", made.id, "talk") as box:
        await box.uploads.put_bytes("a.csv", b"1,2\n")
        await service.garbage.collect()
        assert (await cell(box, "open('/uploads/a.csv').read()")).result == "'1,2\\n'"


async def test_the_least_recently_used_makes_room(work: Path) -> None:
    clock = FakeClock()
    async with service_over(work, clock, kernels_per_owner=4) as service:
        made = await project_at(service, work / "one")
        boxes = []
        for name in ("a", "b", "c"):
            async with service.projects.using("me", made.id, name) as box:
                boxes.append(box)
            clock.advance(1)
        with pytest.raises(Closed):
            boxes[0].start_run("1")
        async with (
            service.projects.using("me", made.id, "b"),
            service.projects.using("me", made.id, "c"),
        ):
            with pytest.raises(Unavailable) as raised:
                await service.projects.using("me", made.id, "d").__aenter__()
            assert raised.value.code == "too_many_kernels"


async def test_a_use_that_is_cancelled_leaves_nothing(service: Service, work: Path) -> None:
    made = await project_at(service, work / "one")
    for turns in range(6):
        using = asyncio.create_task(service.projects.using("me", made.id, "t").__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait([using])
    await service.projects.close_conversation("me", "t")
    assert not service.runtime.unowned_directories


# -- without a sandbox ----------------------------------------------------------------------------


async def test_the_sandbox_stays_on_unless_the_operator_allows_otherwise(
    service: Service, work: Path
) -> None:
    made = await project_at(service, work / "one")
    for act in (
        project_at(service, work / "one", sandbox_enabled=False),
        service.projects.change("me", made.id, sandbox_enabled=False),
    ):
        with pytest.raises(Denied) as raised:
            await act
        assert raised.value.code == "host_mode_not_allowed"
        assert "SBX_ALLOW_HOST_MODE" in (raised.value.hint or "")


async def test_a_setting_that_was_taken_back_counts_at_once(work: Path) -> None:
    async with service_over(work) as service:
        made = await project_at(service, work / "one")
        off = replace(made, sandbox_enabled=False)
        await service.store.write(lambda on: rows.change(on, off))
        with pytest.raises(Denied):
            await service.projects.using("me", made.id, "talk").__aenter__()


async def test_the_host_itself_where_it_is_allowed(work: Path) -> None:
    async with service_over(work, allow_host_mode=True) as service:
        if os.geteuid() == 0:
            with pytest.raises(Denied) as raised:
                await project_at(service, work / "one", sandbox_enabled=False)
            assert raised.value.code == "host_mode_refused"
            return
        made = await project_at(service, work / "one", sandbox_enabled=False)
        sandbox = (await service.sandboxes.create(ME)).id
        async with service.sandboxes.using(ME, sandbox, scope="execute") as use:
            talk = use.conversation("talk")
            await talk.uploads.put_bytes("a.csv", b"1,2\n")
            async with service.projects.using("me", made.id, "talk", uploads=talk) as box:
                assert not box.sandboxed
                (upload,) = await box.uploads.list()
                state_events = await box.start_shell(f"pwd; cat {upload.path}").result()
                assert state_events.stdout == f"{work / 'one'}\n1,2\n"
        await service.projects.change("me", made.id, sandbox_enabled=True)
        async with service.projects.using("me", made.id, "talk") as box:
            assert box.sandboxed
            assert not box.commands_allowed  # on the host nobody was asked
            assert (await cell(box, "import os; os.getcwd()")).result == "'/workspace'"


@pytest.mark.parametrize(
    ("confined", "as_root", "allowed", "sandboxed", "code"),
    [
        (True, False, True, True, "projects_need_rights"),
        (True, False, True, False, "projects_need_rights"),
        (False, True, True, True, None),
        (False, True, True, False, "host_mode_refused"),
        (False, False, False, False, "host_mode_not_allowed"),
        (False, False, True, False, None),
    ],
)
def test_who_may_have_which(
    confined: bool, as_root: bool, allowed: bool, sandboxed: bool, code: str | None
) -> None:
    settings = Settings(allow_host_mode=allowed)
    runtime: Any = SimpleNamespace(confined=confined, as_root=as_root)
    found = refusal(settings, runtime, sandboxed)
    assert (found.code if found is not None else None) == code
    assert found is None or found.hint
