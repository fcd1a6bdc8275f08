"""Projects of a service that root started: another process has the directories, not the service."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from agent_calls import body, calls
from chain import broker, descendants, gone
from model_server import ModelServer, model_server
from persistent_sandboxes import eventually
from places import OWNER, STRANGER, project_directories
from serving import Service, open_directory, service
from test_agent_http_service import environment, read

from sbx.agent.messages import Response
from sbx.agent.tools.access import grants_of
from sbx.api.server import privileges, project_process
from sbx.api.server.settings import ServiceSettings
from sbx.errors import BadRequest, Closed, Denied, InvalidPath, NotFound, TooLarge, Unavailable
from sbx.isolation.broker import pulse
from sbx.protocol.changes import ChangesSetting
from sbx.protocol.grants import Access
from sbx.protocol.runs import Cause, Run
from sbx.runtime.runtime import Runtime
from sbx.service import service as services
from sbx.service.projects import calls as project_calls
from sbx.service.projects.client import RemoteSession
from sbx.service.projects.link import ProjectServerLink
from tests.tiers import rows

GRANTING = """
schema = 1
extends = "default"
[limits]
memory_max = "160MiB"
[[grant]]
memory = "300MiB"
[[grant]]
run_time = "2h"
"""
pytestmark = pytest.mark.needs("root", "landlock", "seccomp")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with project_directories() as top:
        (top / "policies").mkdir()
        (top / "policies" / "granting.toml").write_text(GRANTING)
        yield top


def settings_of(top: Path) -> ServiceSettings:
    return ServiceSettings(
        data_dir=top / "data",
        socket=top / "run" / "s",
        project_dirs=(top / "work",),
        project_owners=(0, OWNER),
        policy_dirs=(top / "policies",),
    )


@pytest.fixture
async def link(top: Path) -> AsyncIterator[ProjectServerLink]:
    started = project_process.start(settings_of(top))
    async with ProjectServerLink(started) as link:
        yield link
    assert started.process.returncode == 0


@pytest.fixture
async def box(link: ProjectServerLink, top: Path) -> AsyncIterator[RemoteSession]:
    box = await opened(link, top / "work/root")
    yield box
    await box.close()


async def opened(
    link: ProjectServerLink, directory: Path, policy: str = "default", **words: Any
) -> RemoteSession:
    words = {"commands_allowed": False, "lost": False, "narrower": {}, "env": {}, **words}
    return await RemoteSession.open(link, policy, directory, **words)


@pytest.mark.needs("memory")
@pytest.mark.parametrize("allowed", [False, True], ids=["on the copy", "in the project"])
async def test_grants_begin_and_end_in_the_server(
    link: ProjectServerLink, top: Path, allowed: bool
) -> None:
    box = await opened(link, top / "work/root", "granting", commands_allowed=allowed)
    grants, changes = box.grants, list[str]()
    assert grants is not None
    grants.listeners.append(lambda change, grant: changes.append(f"{change} {grant.target}"))
    ended = await ran(box)
    assert ended.cause is Cause.MEMORY
    assert grants.take_refused() == (Access("memory", "300"),)
    await grants.grant(Access("memory", "300"), "once", "ann")
    ended = await ran(box)
    assert ended.ok, ended.error
    await eventually_async(box, lambda: not grants.active)
    assert changes == ["granted 300", "grant_ended 300"]
    assert (await ran(box)).cause is Cause.MEMORY
    assert grants.take_refused() == (Access("memory", "300"),)
    with pytest.raises(BadRequest, match="wall_time"):
        await ran(box, timeout=5000)
    assert grants.take_refused() == (Access("run_time", "5000"),)
    await grants.grant(Access("run_time", "5000"), "conversation", "ann")
    assert (await box.start_run("1", timeout=5000).result()).ok
    with pytest.raises(Denied):
        await grants.grant(Access("run_time", "9000"), "once", "ann")
    assert [grant.target for grant in grants.active] == ["5000"]
    await box.close()


async def test_a_policy_without_grants_has_none_there(box: RemoteSession) -> None:
    assert box.grants is not None
    assert not box.grants.permitted
    assert grants_of(box) is None


async def ran(box: RemoteSession, timeout: float | None = None) -> Run:
    return await box.start_run("len(bytearray(b'x') * (240 << 20))", timeout=timeout).result()


async def eventually_async(box: RemoteSession, condition: Callable[[], bool]) -> None:
    """Each call brings the state of the sandbox."""
    while not condition():
        await box.files.list()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_its_rights_are_those_of_a_service_but_for_the_directories(
    link: ProjectServerLink, top: Path
) -> None:
    pid = link._process.process.pid
    fields = status_of(pid)
    assert set(fields["Uid"].split()) == {"1899999998"}
    assert (fields["Groups"].strip(), fields["NoNewPrivs"], fields["Seccomp"]) == ("", "1", "2")
    assert int(fields["CapPrm"], 16) == privileges.KEPT
    assert int(fields["CapBnd"], 16) == 0
    seen = Path(f"/proc/{pid}/root")
    assert (seen / top.relative_to("/") / "work/root").is_dir()
    assert not (seen / top.relative_to("/") / "elsewhere").exists()
    assert stat.S_IMODE((top / "data-projects").stat().st_mode) == 0o711
    assert (top / "data-projects").stat().st_uid == 1_899_999_998


async def test_directories_for_projects_are_suggested(link: ProjectServerLink, top: Path) -> None:
    assert await link.names_in(str(top / "work"), 9) == ["other", "root", "strange"]
    assert len(await link.names_in(str(top / "work"), 1)) == 1
    with pytest.raises(Denied):
        await link.names_in(str(top / "elsewhere"), 9)


@pytest.mark.parametrize(
    ("name", "uid"), rows([("root", 0), ("other", OWNER)], ci_tier=[("root", 0)])
)
async def test_a_call_of_a_tool_changes_the_project_with_its_commit(
    link: ProjectServerLink, top: Path, name: str, uid: int
) -> None:
    place = top / "work" / name
    box = await opened(link, place)
    changes = await box.begin("command")
    ran = await changes.start_shell("id -u; echo x > made; ln -s made to; mkdir sub").result()
    assert ran.stdout == "1000\n"
    assert await changes.files.read_bytes("made") == b"x\n"
    state_events = await changes.compare()
    assert {(one.path, one.kind) for one in state_events.changes} == {
        ("/workspace/made", "added"),
        ("/workspace/sub/", "added"),
        ("/workspace/to", "added"),
    }
    assert not state_events.is_empty
    assert not state_events.within(ChangesSetting(ask_outside=("sub",)).allowances)
    assert state_events.within(ChangesSetting(ask_outside=("made", "to", "sub")).allowances)
    assert not (place / "made").exists()
    await changes.commit()
    await changes.rollback()
    assert {(place / one).lstat().st_uid for one in ("made", "to", "sub")} == {uid}
    assert os.readlink(place / "to") == "made"
    await box.close()


@pytest.mark.full_tier
async def test_what_was_not_committed_is_dropped_and_variables_stay(
    box: RemoteSession, top: Path
) -> None:
    changes = await box.begin("code")
    await changes.start_run("x = 7; open('dropped', 'w').write('x')").result()
    await changes.compare()
    await changes.rollback()
    assert not (top / "work/root/dropped").exists()
    assert (await box.start_run("print(x)").result()).text == "7\n"
    assert box.stateful


@pytest.mark.full_tier
async def test_files_uploads_and_results(box: RemoteSession, top: Path) -> None:
    content = os.urandom(3 << 20)
    assert await box.files.write("big", content) == len(content)
    assert (top / "work/root/big").read_bytes() == content
    assert (await box.files.stat("big")).size == len(content)
    assert "big" in [one.name for one in await box.files.list()]
    assert [one.name for one in await box.files.find("b*")] == ["big"]
    await box.files.make_directory("by/call")
    upload = await box.uploads.put_bytes("u.bin", content)
    assert (upload.size, [one.name for one in await box.uploads.list()]) == (3 << 20, ["u.bin"])
    path = await box.save_result("r.txt", b"kept")
    assert await box.files.read_bytes(path) == b"kept"
    for wrong, error in (("../out", InvalidPath), ("missing", NotFound)):
        with pytest.raises(error):
            await box.files.read_bytes(wrong)


async def test_a_new_host_executable_is_quarantined(box: RemoteSession, top: Path) -> None:
    await box.allow_commands()
    assert box.commands_allowed
    ran = await box.start_shell("echo evil > .envrc; echo x > .git/config").result()
    assert "Read-only file system" in ran.stderr
    (item,) = ran.quarantined
    assert (item.path, (top / "work/root/.envrc").is_symlink()) == (".envrc", True)
    assert not (top / "work/root/.envrc").exists()
    with pytest.raises(Denied):
        await box.files.write(".envrc", "evil")


async def test_the_service_refuses_to_list_the_quarantine_that_it_cannot_read(top: Path) -> None:
    settings = settings_of(top)
    started = project_process.start(settings)
    async with services.Service(settings, project_server=started) as service:
        with pytest.raises(Unavailable) as refused:
            await service.projects.quarantined("operator")
        assert refused.value.code == "quarantine_elsewhere"
        assert refused.value.hint == "as root: sbx quarantine list"


async def test_what_the_settings_do_not_name_is_refused(link: ProjectServerLink, top: Path) -> None:
    for asked in ("/", "/root", "/etc", top, top / "elsewhere", top / "data", top / "work/link"):
        for ask in (link.resolve(str(asked)), link.look_at(Path(asked)), opened(link, Path(asked))):
            with pytest.raises((Denied, BadRequest)):
                await ask
    with pytest.raises(Denied, match="does not name") as raised:
        await opened(link, top / "work/strange")
    assert raised.value.code == "not_granted"
    with pytest.raises(NotFound):
        await RemoteSession.open(
            link, "nope", top / "work/root", narrower={}, env={}, commands_allowed=False, lost=False
        )


@pytest.mark.full_tier
async def test_a_run_that_is_given_up_ends(box: RemoteSession) -> None:
    run = box.start_run("import time\nprint('on')\ntime.sleep(600)")
    events = run.events()
    async for event in events:
        if event.type == "stdout":
            break
    await events.aclose()
    await box.give_up(run)
    assert (await box.start_run("print(1)").result()).text == "1\n"


async def test_a_caller_who_leaves_leaves_nothing_behind(
    link: ProjectServerLink, top: Path
) -> None:
    opening = asyncio.create_task(opened(link, top / "work/other"))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    box = await opened(link, top / "work/other")
    beginning = asyncio.create_task(box.begin("command"))
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    changes = await box.begin("command")  # it would wait for the other one for ever
    await changes.rollback()
    await box.close()
    with pytest.raises(Closed):
        await box.files.list()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        pytest.param(b"\x00\x00\x00\x01\xc1", marks=pytest.mark.full_tier),
        b"\x00\x00\x00\x02{}",
        pytest.param(
            project_calls.framed({"type": "Call", "id": 1, "request": {"type": "Shutdown"}}),
            marks=pytest.mark.full_tier,
        ),
        project_calls.framed(
            {"type": "Call", "id": 1, "request": {"type": "Stat", "of": 1, "path": 7}}
        ),
    ],
    ids=["too long", "no message", "no call", "unknown", "no path"],
)
async def test_what_is_no_call_ends_the_server(top: Path, frame: bytes) -> None:
    started = project_process.start(settings_of(top))
    async with ProjectServerLink(started) as link:
        waiting = asyncio.create_task(link.call(project_calls.Stat(99, "x"), type(None)))
        with pytest.raises(Closed):
            await waiting
        assert link._writer is not None
        link._writer.write(frame)
        await eventually(lambda: link.failure is not None)
        with pytest.raises(Unavailable) as raised:
            await link.look_at(top / "work/root")
        assert raised.value.code == "project_server_died"


async def test_a_server_that_cannot_start_says_why(top: Path) -> None:
    """Its data directory belongs to a stranger."""
    settings = settings_of(top).model_copy(update={"data_dir": top / "theirs"})
    settings.projects_data.mkdir()
    os.chown(settings.projects_data, STRANGER, STRANGER)
    with pytest.raises(BadRequest) as raised:
        async with ProjectServerLink(project_process.start(settings)):
            pass
    assert raised.value.code == "invalid_settings"


def test_a_message_beyond_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_calls, "FRAME_MAX", 10)
    with pytest.raises(TooLarge):
        project_calls.framed(project_calls.CallReply(1, error={"message": "x" * 20}))


# -- with the service --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with model_server() as model:
        yield model


@pytest.fixture
def served(model: ModelServer) -> Iterator[Service]:
    with open_directory() as top:
        (top / "work/mine").mkdir(parents=True)
        words = ("--project-dirs", top / "work", "--project-owners", "root")
        with service(*words, top=top, env=environment(model)) as served:
            yield served


def asks(client: httpx.Client, conversation: str, project: str) -> list[dict[str, Any]]:
    asked = body(conversation, project_id=project)
    with client.stream("POST", "/api/v1/chat", json=asked) as reply:
        assert reply.status_code == 200, reply.read()
        return [event for line in reply.iter_lines() if (event := read(line)) is not None]


def a_project(client: httpx.Client, directory: Path, **more: Any) -> httpx.Response:
    asked = {"name": "mine", "working_directory": str(directory), **more}
    return client.post("/api/v1/projects", json=asked)


@pytest.mark.full_tier
def test_an_agent_works_in_a_directory_of_root(served: Service, model: ModelServer) -> None:
    mine = served.data.parent / "work/mine"
    with served.http() as client:
        reply = a_project(client, mine)
        assert reply.status_code == 201, reply.text
        project = reply.json()["id"]
        model.add(calls(("list_files", {})), Response("began"))
        assert asks(client, "c1", project)[-1]["content"] == "began"
        allowed = client.put("/api/v1/conversations/c1/commands", json={"changes": "allow"})
        assert allowed.status_code == 200, allowed.text
        model.add(
            calls(("run_code", {"code": "open('made', 'w').write('x'); print('from inside')"})),
            calls(("execute_command", {"command": "cat made; cp made copy"})),
            Response("done"),
        )
        events = asks(client, "c1", project)
    assert events[-1]["content"] == "done", events
    results = [event["result"] for event in events if event["type"] == "tool_end"]
    assert "from inside" in results[0]
    assert [(mine / name).stat().st_uid for name in ("made", "copy")] == [0, 0]
    seen = Path(f"/proc/{served.process.pid}/root") / mine.relative_to("/")
    assert not seen.exists()  # for the process that parses HTTP


def test_no_host_mode_and_no_stranger(served: Service) -> None:
    strange = served.data.parent / "work/strange"
    strange.mkdir()
    os.chown(strange, STRANGER, STRANGER)
    with served.http() as client:
        refused = a_project(client, strange)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_granted")
        refused = a_project(client, strange.parent / "mine", sandbox_enabled=False)
        assert refused.json()["error"]["code"] == "host_mode_not_allowed"


def test_a_service_whose_project_server_died_ends(served: Service) -> None:
    """Whoever runs it starts it again: it has no right to start another one."""
    processes = psutil.Process(served.process.pid).children()
    (server,) = (one for one in processes if one.uids().real == 1_899_999_998)
    os.kill(server.pid, signal.SIGKILL)
    served.process.wait(60)
    assert served.process.returncode != 0
    assert "project server" in served.log.read_text()


@pytest.fixture
async def failing(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ProjectServerLink, psutil.Process]]:
    """A link that notices soon that its server has failed, and the process of the server."""
    monkeypatch.setattr(pulse, "EVERY_S", 0.2)
    monkeypatch.setattr(pulse, "ANSWER_S", 1.0)
    started = project_process.start(settings_of(top))
    process = psutil.Process(started.process.pid)
    async with ProjectServerLink(started) as link:
        yield link, process
    async with Runtime():
        pass  # which sweeps the cgroups that were left


async def test_a_server_that_answers_nothing_is_killed(
    failing: tuple[ProjectServerLink, psutil.Process], top: Path
) -> None:
    link, process = failing
    family = descendants(process)
    process.suspend()
    with pytest.raises(Unavailable) as raised:
        await opened(link, top / "work/root")
    assert raised.value.code == "project_server_silent"
    await gone(process, *family)


@pytest.mark.full_tier
async def test_a_server_whose_broker_died_is_given_up(
    failing: tuple[ProjectServerLink, psutil.Process],
) -> None:
    link, process = failing
    broker(process).kill()
    await eventually(lambda: link.failure is not None)
    assert link.failure is not None
    assert link.failure.code == "project_server_died"
