"""/opensandbox: the published packages of OpenSandbox against the service, both kinds of client."""

# The models of the SDK take names and aliases; mypy sees the aliases only.
# mypy: disable-error-code="call-arg"

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio
from both_sdks import Both
from code_interpreter import CodeInterpreter, CodeInterpreterSync
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.manager import SandboxManager
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.sandboxes import SandboxFilter
from opensandbox.sandbox import Sandbox
from opensandbox.sync.manager import SandboxManagerSync
from sdk_service import SdkService

INTERPRETER: dict[str, Any] = {
    "image": "opensandbox/code-interpreter:v1.1.0",
    "entrypoint": ["/opt/opensandbox/code-interpreter.sh"],
}


class Face:
    """The classes of one kind of client, with the address and the key of an owner."""

    def __init__(self, kind: str, host: str, key: str) -> None:
        self.kind = kind
        self.is_async = kind == "async"
        config: Any = ConnectionConfig if self.is_async else ConnectionConfigSync
        where: dict[str, Any] = {"domain": f"{host}/opensandbox", "api_key": key}
        self.transport: Any = config(**where).new_owned_transport()
        self.config: Any = config(**where, transport=self.transport)
        self.sandboxes = Both(Sandbox if self.is_async else SandboxSync)
        self.interpreters = Both(CodeInterpreter if self.is_async else CodeInterpreterSync)

    async def close(self) -> None:
        """Close all connections: the clients of a given transport do not."""
        await (
            self.transport.aclose() if self.is_async else asyncio.to_thread(self.transport.close)
        )

    async def create(self, image: str = "ubuntu", **options: Any) -> Both:
        return Both(await self.sandboxes.create(image, connection_config=self.config, **options))

    async def connect(self, sandbox_id: str) -> Both:
        return Both(await self.sandboxes.connect(sandbox_id, connection_config=self.config))

    async def resume(self, sandbox_id: str) -> Both:
        return Both(await self.sandboxes.resume(sandbox_id, connection_config=self.config))

    async def manager(self) -> Both:
        manager = SandboxManager if self.is_async else SandboxManagerSync
        return Both(await Both(manager).create(connection_config=self.config))

    def handlers(self, log: list[Any]) -> Any:
        """Handlers that add each event to the log."""

        def add(name: str) -> Callable[[Any], Any]:
            async def later(event: Any) -> None:
                log.append((name, event))

            return later if self.is_async else lambda event: log.append((name, event))

        names = ("init", "stdout", "stderr", "result", "execution_complete", "error")
        kind: Any = ExecutionHandlers if self.is_async else ExecutionHandlersSync
        return kind(**{f"on_{name}": add(f"on_{name}") for name in names})


@pytest_asyncio.fixture(scope="module", params=["async", "sync"])
async def face(request: pytest.FixtureRequest, sdk: SdkService) -> AsyncIterator[Face]:
    face = Face(request.param, sdk.host, await sdk.key("opener"))
    yield face
    await face.close()


@pytest_asyncio.fixture(scope="module")
async def box(face: Face) -> AsyncIterator[Both]:
    """One sandbox for all tests that leave it usable."""
    box = await face.create(metadata={"of": "module"}, env={"FROM_CREATE": "a b"})
    yield box
    await box.destroy()


@pytest_asyncio.fixture(scope="module")
async def interpreter(face: Face) -> AsyncIterator[Both]:
    box = await face.create(**INTERPRETER)
    yield Both(await face.interpreters.create(box.inner))
    await box.destroy()


async def printed(log: list[Any]) -> str:
    """Wait until a run has printed. Return its id."""
    while not any(  # noqa: ASYNC110  # the handlers of the SDK only fill a list
        name == "on_stdout" for name, _ in log
    ):
        await asyncio.sleep(0.01)
    (run_id,) = [event.id for name, event in log if name == "on_init"]
    return str(run_id)


async def failure(call: Any) -> SandboxApiException:
    with pytest.raises(SandboxApiException) as raised:
        await call
    return raised.value


# -- the life of a sandbox -------------------------------------------------------------------------


async def test_the_first_example_of_the_readme(face: Face) -> None:
    box = await face.create()
    try:
        execution = await box.commands.run("echo 'Hello Sandbox!'")
        assert execution.logs.stdout[0].text.rstrip() == "Hello Sandbox!"
    finally:
        await box.destroy()


async def test_info_has_the_fields_of_a_sandbox(box: Both) -> None:
    info = await box.get_info()
    assert info.id == box.id
    assert info.status.state == "Running"
    assert info.image.image == "ubuntu"
    assert info.entrypoint == ["tail", "-f", "/dev/null"]
    assert info.metadata == {"of": "module"}
    assert info.expires_at > info.created_at


async def test_a_sandbox_without_a_timeout_never_expires(face: Face) -> None:
    box = await face.create(timeout=None)
    assert (await box.get_info()).expires_at is None
    error = await failure(box.renew(timedelta(minutes=5)))
    assert error.status_code == 409
    await box.destroy()


async def test_renew_sets_the_end_also_to_an_earlier_time(face: Face) -> None:
    box = await face.create(timeout=timedelta(hours=2))
    await box.renew(timedelta(minutes=5))
    left = (await box.get_info()).expires_at - datetime.now(UTC)
    assert timedelta(minutes=4) < left < timedelta(minutes=6)
    await box.destroy()


async def test_kill_is_final(face: Face) -> None:
    box = await face.create()
    await box.kill()
    error = await failure(box.get_info())
    assert (error.status_code, error.error.code) == (404, "DOCKER::SANDBOX_NOT_FOUND")
    with pytest.raises(SandboxException):
        await face.connect(box.id)


async def test_connect_finds_the_same_sandbox(face: Face, box: Both) -> None:
    await box.files.write_file("/workspace/shared.txt", "1")
    again = await face.connect(box.id)
    assert await again.files.read_file("/workspace/shared.txt") == "1"
    assert await again.is_healthy()


async def test_an_interpreter_needs_neither_its_image_nor_its_entrypoint(face: Face) -> None:
    """It waited for 60 s, and failed."""
    box = await face.create()
    codes = Both(await face.interpreters.create(box.inner)).codes
    result = await codes.run("'größe'.upper()", language="python")
    assert result.result[0].text == "'GRÖSSE'"
    await box.destroy()


async def test_pause_keeps_files_and_variables(face: Face) -> None:
    box = await face.create(**INTERPRETER)
    codes = Both(await face.interpreters.create(box.inner)).codes
    await codes.run("kept = 41", language="python")
    await box.pause()
    info = await box.get_info()
    assert (info.status.state, "not frozen" in info.status.message) == ("Paused", True)
    assert not await box.is_healthy()
    assert (await failure(box.pause())).status_code == 409
    again = await face.resume(box.id)
    codes = Both(await face.interpreters.create(again.inner)).codes
    result = await codes.run("kept + 1", language="python")
    assert result.result[0].text == "42"
    manager = await face.manager()
    assert (await failure(manager.resume_sandbox(box.id))).status_code == 409
    await again.destroy()


async def test_a_pause_refuses_calls_and_processes_stay(face: Face) -> None:
    own = await face.create()
    started = await own.commands.run("sleep 600", opts=RunCommandOpts(background=True))
    await own.pause()
    error = await failure(own.commands.run("true"))
    assert error.status_code == 409
    error = await failure(own.files.read_file("/workspace/x"))
    assert error.status_code == 409
    again = await face.resume(own.id)
    assert (await again.commands.get_command_status(started.id)).running
    await again.destroy()


async def test_list_filters_and_pages(face: Face) -> None:
    manager = await face.manager()
    tag = f"list {face.kind} / é"
    boxes = [await face.create(metadata={"tag": tag, "n": str(n)}) for n in range(3)]
    page = await manager.list_sandbox_infos(SandboxFilter(metadata={"tag": tag}, page_size=2))
    assert len(page.sandbox_infos) == 2
    assert page.pagination.total_items == 3
    assert page.pagination.has_next_page
    rest = await manager.list_sandbox_infos(
        SandboxFilter(metadata={"tag": tag}, page_size=2, page=2)
    )
    assert len(rest.sandbox_infos) == 1
    assert not rest.pagination.has_next_page
    both = await manager.list_sandbox_infos(SandboxFilter(metadata={"tag": tag, "n": "1"}))
    assert [each.id for each in both.sandbox_infos] == [boxes[1].id]
    await boxes[0].pause()
    for states, count in ((["Paused"], 1), (["RUNNING"], 2), (["Running", "Paused"], 3)):
        found = await manager.list_sandbox_infos(
            SandboxFilter(metadata={"tag": tag}, states=states)
        )
        assert found.pagination.total_items == count
    for each in boxes:
        await manager.kill_sandbox(each.id)
    none = await manager.list_sandbox_infos(SandboxFilter(metadata={"tag": tag}))
    assert none.sandbox_infos == []


async def test_the_manager_has_one_sandbox(face: Face) -> None:
    manager = await face.manager()
    box = await face.create()
    assert (await manager.get_sandbox_info(box.id)).id == box.id
    await manager.renew_sandbox(box.id, timedelta(hours=1))
    await manager.pause_sandbox(box.id)
    await manager.resume_sandbox(box.id)
    await manager.kill_sandbox(box.id)
    assert (await failure(manager.kill_sandbox(box.id))).status_code == 404


async def test_metadata_are_merged(face: Face) -> None:
    box = await face.create(metadata={"a": "1", "b": "2"})
    info = await box.patch_metadata({"a": None, "c": "3"})
    assert info.metadata == {"b": "2", "c": "3"}
    assert (await box.get_info()).metadata == {"b": "2", "c": "3"}
    await box.destroy()


async def test_the_limits_are_within_the_policy(face: Face) -> None:
    box = await face.create(resource={"cpu": "500m", "memory": "256Mi"})
    metrics = await box.get_metrics()
    assert (metrics.cpu_count, metrics.memory_total_in_mib) == (0.5, 256.0)
    await box.destroy()


async def test_metrics_are_of_the_sandbox(box: Both) -> None:
    metrics = await box.get_metrics()
    assert metrics.memory_total_in_mib == 1024.0
    assert 0 <= metrics.cpu_used_percentage <= 100
    assert abs(metrics.timestamp / 1000 - datetime.now(UTC).timestamp()) < 60


async def test_an_unknown_image_is_refused(face: Face) -> None:
    error = await failure(face.create("nobody/knows:this"))
    assert (error.status_code, error.error.code) == (400, "UNKNOWN_TEMPLATE")
    assert "templates" in str(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box.create_snapshot("x"),
        lambda box: box.get_diagnostic_logs("container"),
        lambda box: box.get_diagnostic_events("container"),
    ],
    ids=["snapshot", "logs", "events"],
)
async def test_a_local_jail_says_what_it_has_not(box: Both, call: Any) -> None:
    error = await failure(call(box))
    assert error.status_code == 501
    assert "API_NOT_SUPPORTED" in str(error)


async def test_the_network_policy_is_shown_and_does_not_widen(box: Both) -> None:
    policy = await box.get_egress_policy()
    assert str(policy.default_action).endswith("deny")
    assert not policy.egress
    with pytest.raises(SandboxException):
        await box.delete_egress_rules(["example.org"])


async def test_isolated_sessions_are_not_available(box: Both) -> None:
    capabilities = await box.isolation.capabilities()
    assert capabilities.available is False


# -- commands --------------------------------------------------------------------------------------


async def test_streams_and_the_exit_code(box: Both) -> None:
    execution = await box.commands.run("printf 'a\\n\\nb\\n'; echo err >&2; exit 3")
    assert (
        execution.text == "a\n\nb\n" or "".join(m.text for m in execution.logs.stdout) == "a\n\nb\n"
    )
    assert "".join(each.text for each in execution.logs.stderr) == "err\n"
    assert execution.exit_code == 3
    assert execution.error.name == "CommandExecError"
    assert execution.id.startswith("run-")


async def test_a_success_has_a_time(box: Both) -> None:
    execution = await box.commands.run("sleep 0.2")
    assert execution.exit_code == 0
    assert execution.error is None
    assert 200 <= execution.complete.execution_time_in_millis < 30_000


async def test_output_without_a_line_end_stays_whole(box: Both) -> None:
    execution = await box.commands.run("for i in 1 2 3 4; do printf $i; sleep 0.05; done")
    assert execution.text == "1234"


async def test_characters_that_split_lines_elsewhere(box: Both) -> None:
    text = "a\u2028b\u0085c\u00fc\U0001f600"
    execution = await box.commands.run(f"printf '%s' '{text}'")
    assert execution.text == text


async def test_bytes_that_are_no_text(box: Both) -> None:
    execution = await box.commands.run("printf 'a\\xffb'")
    assert execution.text == "a\ufffdb"


async def test_directory_environment_and_limit_of_time(box: Both) -> None:
    opts = RunCommandOpts(
        working_directory="/tmp", envs={"OWN": "x y"}, timeout=timedelta(seconds=30)
    )
    execution = await box.commands.run('pwd; echo "$OWN|$FROM_CREATE"', opts=opts)
    assert execution.text == "/tmp\nx y|a b\n" or execution.text == "/tmp\nx y|a b"


async def test_a_missing_directory_is_refused_before_the_run(box: Both) -> None:
    error = await failure(
        box.commands.run("pwd", opts=RunCommandOpts(working_directory="/no/where"))
    )
    assert error.status_code == 400


async def test_a_command_that_takes_too_long_is_killed(box: Both) -> None:
    opts = RunCommandOpts(timeout=timedelta(seconds=1))
    execution = await box.commands.run("echo begin; sleep 60 & sleep 60", opts=opts)
    assert execution.text.strip() == "begin"
    assert execution.exit_code not in (0, None)
    assert "time-out" in execution.error.traceback[0]


async def test_another_user_is_not_available(box: Both) -> None:
    error = await failure(box.commands.run("id", opts=RunCommandOpts(uid=0)))
    assert (error.status_code, error.error.code) == (400, "NOT_SUPPORTED")
    own = await box.commands.run("id -u", opts=RunCommandOpts(uid=1000))
    assert own.text.strip() == "1000"


async def test_handlers_get_each_event_in_order(face: Face, box: Both) -> None:
    log: list[Any] = []
    await box.commands.run("echo a; sleep 0.1; echo b >&2", handlers=face.handlers(log))
    assert [name for name, _ in log] == [
        "on_init",
        "on_stdout",
        "on_stderr",
        "on_execution_complete",
    ]
    log.clear()
    await box.commands.run("exit 7", handlers=face.handlers(log))
    assert [name for name, _ in log] == ["on_init", "on_error"]


async def test_a_large_file_of_variables_is_refused(box: Both) -> None:
    """Code inside wrote 1 MiB there, and each later command took 3 s of the event loop
    (holes 2.1c)."""
    name = "/workspace/.opensandbox_env"
    await box.files.write_file(name, "A=1\n" * 16_385)
    with pytest.raises(SandboxApiException, match="64 KiB"):
        await box.commands.run("true")
    await box.files.write_file(name, "A=1\n" * 16_384)
    for _ in range(2):
        done = await box.commands.run("echo $A")
        assert done.logs.stdout[0].text.strip() == "1"
    await box.files.write_file(name, "")


async def test_set_env_reaches_later_commands(box: Both) -> None:
    await box.commands.set_env("PLAIN", "one two")
    await box.commands.set_env("QUOTED", 'it\'s $HOME "x"')
    execution = await box.commands.run('echo "$PLAIN"; echo "$QUOTED"; env | grep -c ^PLAIN=')
    assert execution.text.splitlines() == ["one two", 'it\'s $HOME "x"', "1"]


async def test_status_of_a_command_that_ended(box: Both) -> None:
    execution = await box.commands.run("exit 4")
    status = await box.commands.get_command_status(execution.id)
    assert (status.running, status.exit_code, status.content) == (False, 4, "exit 4")
    assert status.started_at <= status.finished_at
    error = await failure(box.commands.get_command_status("run-unknown"))
    assert error.status_code == 404


async def test_a_background_command_has_status_and_logs(box: Both) -> None:
    opts = RunCommandOpts(background=True, envs={"WORD": "x"})
    started = await box.commands.run("echo $WORD; sleep 0.3; echo two; exit 5", opts=opts)
    status = await box.commands.get_command_status(started.id)
    assert status.content == "echo $WORD; sleep 0.3; echo two; exit 5"
    while status.running:
        assert status.exit_code is None
        await asyncio.sleep(0.05)
        status = await box.commands.get_command_status(started.id)
    assert status.exit_code == 5
    logs = await box.commands.get_background_command_logs(started.id)
    assert (logs.content, logs.cursor) == ("x\ntwo\n", 6)
    rest = await box.commands.get_background_command_logs(started.id, 2)
    assert (rest.content, rest.cursor) == ("two\n", 6)
    end = await box.commands.get_background_command_logs(started.id, 6)
    assert (end.content, end.cursor) == ("", 6)


async def test_a_background_command_has_a_limit_of_time(box: Both) -> None:
    opts = RunCommandOpts(background=True, timeout=timedelta(milliseconds=300))
    started = await box.commands.run("sleep 60", opts=opts)
    status = await box.commands.get_command_status(started.id)
    async with asyncio.timeout(30):
        while status.running:
            await asyncio.sleep(0.05)
            status = await box.commands.get_command_status(started.id)
    assert status.exit_code == 124


async def test_interrupt_ends_a_background_command(box: Both) -> None:
    started = await box.commands.run("sleep 600", opts=RunCommandOpts(background=True))
    await box.commands.interrupt(started.id)
    assert not (await box.commands.get_command_status(started.id)).running
    assert (await failure(box.commands.interrupt(started.id))).status_code == 409


async def test_interrupt_ends_a_foreground_command(face: Face, box: Both) -> None:
    log: list[Any] = []
    running = asyncio.create_task(
        box.commands.run("echo on; sleep 600", handlers=face.handlers(log))
    )
    async with asyncio.timeout(30):
        run_id = await printed(log)
        await box.commands.interrupt(run_id)
        execution = await running
    assert execution.exit_code not in (0, None)


async def test_a_session_of_bash_keeps_its_state(box: Both) -> None:
    session = await box.commands.create_session(working_directory="/tmp")
    run = box.commands.run_in_session
    first = await run(session, "mkdir -p inner; cd inner; X='a b'; export Y=2; f() { echo f$1; }")
    assert first.error is None
    second = await run(session, 'pwd; echo "$X"; env | grep ^Y=; f 3')
    assert second.text.splitlines() == ["/tmp/inner", "a b", "Y=2", "f3"]
    assert (await run(session, "exit 6")).exit_code == 6
    assert (await run(session, 'echo "$X"')).text.strip() == "a b"
    elsewhere = await run(session, "pwd", working_directory="/workspace")
    assert elsewhere.text.strip() == "/workspace"
    await box.commands.delete_session(session)
    assert (await failure(run(session, "true"))).status_code == 404
    assert (await failure(box.commands.delete_session(session))).status_code == 404


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["/tmp/files", "/workspace/files"])
async def test_write_read_and_search(box: Both, root: str) -> None:
    await box.files.write_files(
        [
            WriteEntry(path=f"{root}/hello.txt", data="Hello World", mode=644),
            WriteEntry(path=f"{root}/deep/\u00fc \u4e2d.bin", data=bytes(range(256)), mode=600),
        ]
    )
    assert await box.files.read_file(f"{root}/hello.txt") == "Hello World"
    assert await box.files.read_bytes(f"{root}/deep/\u00fc \u4e2d.bin") == bytes(range(256))
    found = await box.files.search(SearchEntry(path=root, pattern="*.{txt,bin}"))
    assert sorted(each.path for each in found) == [
        f"{root}/deep/\u00fc \u4e2d.bin",
        f"{root}/hello.txt",
    ]
    info = await box.files.get_file_info([f"{root}/hello.txt", root])
    assert (info[f"{root}/hello.txt"].mode, info[f"{root}/hello.txt"].size) == (644, 11)
    assert info[f"{root}/hello.txt"].owner == "sandbox"
    assert info[root].entry_type == "directory"
    await box.files.delete_files([f"{root}/hello.txt"])
    error = await failure(box.files.read_file(f"{root}/hello.txt"))
    assert (error.status_code, error.error.code) == (404, "FILE_NOT_FOUND")
    await box.files.delete_directories([root])
    assert (await failure(box.files.get_file_info([root]))).status_code == 404


async def test_a_new_file_can_be_run(box: Both) -> None:
    await box.files.write_file("/tmp/run.sh", "#!/bin/sh\necho ran")
    assert (await box.commands.run("/tmp/run.sh")).text.strip() == "ran"


async def test_ranges_of_bytes(box: Both) -> None:
    for path in ("/tmp/range", "/workspace/range"):
        await box.files.write_file(path, "0123456789")
        assert await box.files.read_file(path, range_header="bytes=2-4") == "234"
        assert await box.files.read_file(path, range_header="bytes=7-") == "789"
        assert await box.files.read_file(path, range_header="bytes=-2") == "89"
        error = await failure(box.files.read_file(path, range_header="bytes=50-60"))
        assert error.status_code == 416


async def test_lines_of_a_file(box: Both) -> None:
    await box.files.write_file("/tmp/lines", "one\r\ntwo\nthree\nfour")
    assert await box.files.read_file("/tmp/lines", offset=2, limit=2) == "two\nthree"
    assert await box.files.read_file("/tmp/lines", limit=1) == "one"


async def test_a_large_file_in_pieces(box: Both) -> None:
    content = bytes(range(256)) * (9 << 12)  # 9 MiB
    for path in ("/tmp/large", "/workspace/large"):
        await box.files.write_file(path, content)
        assert await box.files.read_bytes(path) == content
        stream = await box.files.read_bytes_stream(path)
        if hasattr(stream, "__aiter__"):
            pieces = [each async for each in stream]
        else:
            pieces = await asyncio.to_thread(list, stream)
        assert b"".join(pieces) == content
        await box.files.delete_files([path])


async def test_directories(box: Both) -> None:
    await box.files.create_directories([WriteEntry(path="/tmp/d/e/f", mode=700)])
    await box.files.create_directories([WriteEntry(path="/tmp/d/e/f", mode=755)])
    assert (await box.files.get_file_info(["/tmp/d/e/f"]))["/tmp/d/e/f"].mode == 700
    await box.files.write_file("/tmp/d/x", "1")
    listed = await box.files.list_directory(DirectoryListEntry(path="/tmp/d", depth=2))
    assert [each.path for each in listed] == ["/tmp/d/e", "/tmp/d/e/f", "/tmp/d/x"]
    one = await box.files.list_directory(DirectoryListEntry(path="/tmp/d"))
    assert [each.path for each in one] == ["/tmp/d/e", "/tmp/d/x"]
    assert (
        await failure(box.files.list_directory(DirectoryListEntry(path="/tmp/no")))
    ).status_code == 404
    assert (
        await failure(box.files.list_directory(DirectoryListEntry(path="/tmp/d/x")))
    ).status_code == 400
    await box.files.delete_directories(["/tmp/d", "/tmp/missing"])


async def test_deletes_that_miss_and_a_file_that_is_a_directory(box: Both) -> None:
    await box.files.delete_files(["/tmp/never"])
    await box.files.create_directories([WriteEntry(path="/tmp/dir", mode=755)])
    assert (await failure(box.files.delete_files(["/tmp/dir"]))).status_code == 400


async def test_move_makes_parents_and_replaces_nothing(box: Both) -> None:
    await box.files.write_files(
        [WriteEntry(path="/tmp/from", data="1"), WriteEntry(path="/tmp/there", data="2")]
    )
    await box.files.move_files([MoveEntry(src="/tmp/from", dest="/workspace/p/q/to")])
    assert await box.files.read_file("/workspace/p/q/to") == "1"
    taken = await failure(
        box.files.move_files([MoveEntry(src="/workspace/p/q/to", dest="/tmp/there")])
    )
    assert taken.status_code == 409
    assert await box.files.read_file("/tmp/there") == "2"
    missing = await failure(box.files.move_files([MoveEntry(src="/tmp/no", dest="/tmp/x")]))
    assert missing.status_code == 404


async def test_permissions(box: Both) -> None:
    await box.files.write_file("/tmp/perm", "1", mode=600)
    await box.files.set_permissions([SetPermissionEntry(path="/tmp/perm", mode=640)])
    assert (await box.files.get_file_info(["/tmp/perm"]))["/tmp/perm"].mode == 640
    error = await failure(
        box.files.set_permissions([SetPermissionEntry(path="/tmp/perm", mode=640, owner="root")])
    )
    assert error.status_code == 403
    assert (
        await failure(box.files.set_permissions([SetPermissionEntry(path="/tmp/no", mode=640)]))
    ).status_code == 404


async def test_replace_keeps_the_mode(box: Both) -> None:
    await box.files.write_file("/tmp/rep", "a b a", mode=640)
    entry = ContentReplaceEntry(path="/tmp/rep", old_content="a", new_content="c")
    await box.files.replace_contents([entry])
    assert await box.files.read_file("/tmp/rep") == "c b c"
    assert (await box.files.get_file_info(["/tmp/rep"]))["/tmp/rep"].mode == 640
    again = ContentReplaceEntry(path="/tmp/rep", old_content="c", new_content="d")
    (result,) = await box.files.replace_contents_detailed([again])
    assert result.replaced_count == 2
    (none,) = await box.files.replace_contents_detailed([again])
    assert none.replaced_count == 0


# -- the code interpreter --------------------------------------------------------------------------


async def test_python_has_results_and_output(interpreter: Both) -> None:
    code = "import sys\nprint('hi'); print('err', file=sys.stderr)\n2 + 2"
    execution = await interpreter.codes.run(code, language="python")
    assert execution.result[0].text == "4"
    assert "".join(each.text for each in execution.logs.stdout) == "hi\n"
    assert "".join(each.text for each in execution.logs.stderr) == "err\n"
    assert execution.execution_count >= 1
    assert execution.error is None
    assert execution.complete.execution_time_in_millis >= 0


async def test_python_keeps_variables_and_reports_errors(interpreter: Both) -> None:
    await interpreter.codes.run("kept = 41", language="python")
    again = await interpreter.codes.run("kept + 1", language="python")
    assert again.result[0].text == "42"
    execution = await interpreter.codes.run("print('before')\n1/0", language="python")
    assert (execution.error.name, execution.error.value) == (
        "ZeroDivisionError",
        "division by zero",
    )
    assert any("ZeroDivisionError" in line for line in execution.error.traceback)
    assert "".join(each.text for each in execution.logs.stdout) == "before\n"


async def test_contexts_share_files_and_not_variables(interpreter: Both) -> None:
    codes = interpreter.codes
    one, two = await codes.create_context("python"), await codes.create_context("python")
    await codes.run("x = 1; open('/workspace/ctx', 'w').write('f')", context=one)
    missing = await codes.run("x", context=two)
    assert missing.error.name == "NameError"
    read = await codes.run("open('/workspace/ctx').read()", context=two)
    assert read.result[0].text == "'f'"
    listed = [each.id for each in await codes.list_contexts("python")]
    assert {one.id, two.id} <= set(listed)
    assert (await codes.get_context(one.id)).language == "python"
    await codes.delete_context(one.id)
    error = await failure(codes.get_context(one.id))
    assert (error.status_code, error.error.code) == (404, "CONTEXT_NOT_FOUND")
    assert (await failure(codes.run("1", context=one))).status_code == 404
    await codes.delete_contexts("python")
    assert two.id not in [each.id for each in await codes.list_contexts("python")]


@pytest.mark.parametrize(
    ("language", "code", "shown"),
    [
        ("bash", "echo $((1 + 1))", "2\n"),
        ("javascript", "console.log(1 + 1)", "2\n"),
        ("typescript", "const n: number = 2; console.log(n)", "2\n"),
        (
            "java",
            "public class Main { public static void main(String[] a) {"
            " System.out.println(1 + 1); } }",
            "2\n",
        ),
        ("go", 'package main\nimport "fmt"\nfunc main() { fmt.Println(2) }', "2\n"),
    ],
)
async def test_other_languages(interpreter: Both, language: str, code: str, shown: str) -> None:
    try:
        context = await interpreter.codes.create_context(language)
    except SandboxApiException as error:
        if error.error.code == "LANGUAGE_UNAVAILABLE":
            pytest.skip(f"this host has no program for {language}")
        raise
    assert context.language == language
    execution = await interpreter.codes.run(code, context=context)
    assert execution.error is None, execution.error
    assert "".join(each.text for each in execution.logs.stdout) == shown


async def test_a_language_that_is_unknown(interpreter: Both) -> None:
    error = await failure(interpreter.codes.create_context("cobol"))
    assert (error.status_code, error.error.code) == (400, "NOT_SUPPORTED")


async def test_interrupt_of_code_keeps_the_variables(face: Face, interpreter: Both) -> None:
    log: list[Any] = []
    await interpreter.codes.run("before = 7", language="python")
    running = asyncio.create_task(
        interpreter.codes.run(
            "print('on', flush=True)\nimport time\ntime.sleep(600)",
            language="python",
            handlers=face.handlers(log),
        )
    )
    async with asyncio.timeout(30):
        run_id = await printed(log)
        await interpreter.codes.interrupt(run_id)
        execution = await running
    assert execution.error.name == "KeyboardInterrupt"
    again = await interpreter.codes.run("before", language="python")
    assert again.result[0].text == "7"
    assert (await failure(interpreter.codes.interrupt("run-unknown"))).status_code == 404


async def test_input_is_an_error(interpreter: Both) -> None:
    execution = await interpreter.codes.run("input()", language="python")
    assert execution.error is not None


async def test_handlers_of_code_get_each_kind(face: Face, interpreter: Both) -> None:
    log: list[Any] = []
    await interpreter.codes.run("print(1)\n2", language="python", handlers=face.handlers(log))
    names = [name for name, _ in log]
    assert names[0] == "on_init"
    assert names[-1] == "on_execution_complete"
    assert {"on_stdout", "on_result"} <= set(names)


# -- the Unix socket, attacks and restarts ---------------------------------------------------------


async def test_over_the_unix_socket(face: Face, sdk: SdkService) -> None:
    kind = httpx.AsyncHTTPTransport if face.is_async else httpx.HTTPTransport
    transport = kind(uds=str(sdk.served.socket))
    config = type(face.config)(
        domain="localhost/opensandbox", api_key=face.config.api_key, transport=transport
    )
    box = Both(await face.sandboxes.create("ubuntu", connection_config=config))
    assert (await box.commands.run("echo socket")).text.strip() == "socket"
    await box.files.write_file("/tmp/x", "1")
    assert await box.files.read_file("/tmp/x") == "1"
    await box.kill()
    if isinstance(transport, httpx.AsyncHTTPTransport):
        await transport.aclose()
    else:
        transport.close()


async def test_through_the_proxy_of_the_server(face: Face, sdk: SdkService) -> None:
    config = type(face.config)(
        domain=f"{sdk.host}/opensandbox",
        api_key=face.config.api_key,
        use_server_proxy=True,
        transport=face.transport,
    )
    box = Both(await face.sandboxes.create("ubuntu", connection_config=config))
    assert (await box.commands.run("echo proxy")).text.strip() == "proxy"
    await box.files.write_file("/tmp/x", "1")
    await box.kill()


@pytest.mark.parametrize(
    ("key", "code"),
    [("sk-sbx-" + "0" * 64, "INVALID_API_KEY"), ("short", "INVALID_API_KEY_FORM")],
)
async def test_wrong_keys(face: Face, sdk: SdkService, key: str, code: str) -> None:
    wrong = Face(face.kind, sdk.host, key)
    error = await failure(wrong.create())
    await wrong.close()
    assert (error.status_code, error.error.code) == (401, code)


async def test_another_owner_sees_nothing(face: Face, sdk: SdkService, box: Both) -> None:
    stranger = Face(face.kind, sdk.host, await sdk.key("stranger"))
    manager = await stranger.manager()
    assert (await failure(manager.get_sandbox_info(box.id))).status_code == 404
    assert (await failure(manager.kill_sandbox(box.id))).status_code == 404
    listed = await manager.list_sandbox_infos(SandboxFilter())
    assert box.id not in [each.id for each in listed.sandbox_infos]
    await stranger.close()


async def test_a_link_opens_only_its_own_sandbox_and_port(
    face: Face, sdk: SdkService, box: Both
) -> None:
    other = await face.create()
    mine = await box.get_endpoint(44772)
    web = await box.get_endpoint(8000)
    theirs = await other.get_endpoint(44772)
    async with httpx.AsyncClient(timeout=60) as http:

        async def ping(address: str, headers: dict[str, str]) -> int:
            return (await http.get(f"http://{address}/ping", headers=headers)).status_code

        assert await ping(mine.endpoint, mine.headers) == 200
        assert await ping(theirs.endpoint, mine.headers) == 401
        assert await ping(mine.endpoint, web.headers) == 401
        assert await ping(mine.endpoint, {}) == 401
        forged = {name: f"{value[:-3]}AAA" for name, value in mine.headers.items()}
        assert await ping(mine.endpoint, forged) == 401
        outside = mine.endpoint.partition("/sandboxes/")[0]
        reply = await http.get(f"http://{outside}/sandboxes/{box.id}", headers=mine.headers)
        assert reply.status_code == 401
    await other.destroy()


async def test_a_link_ends_with_the_key_of_its_maker(sdk: SdkService) -> None:
    record, key = await sdk.served.service.access.make_key("leaver")
    face = Face("async", sdk.host, key)
    box = await face.create()
    endpoint = await box.get_endpoint(44772)
    await sdk.served.service.access.revoke_key(record.id)
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.get(f"http://{endpoint.endpoint}/ping", headers=endpoint.headers)
    assert reply.status_code == 401
    await face.close()


async def test_host_files_networks_and_forged_paths(box: Both) -> None:
    for path in ("/etc/shadow", "/workspace/../../etc/shadow", "/proc/1/root/etc/shadow"):
        error = await failure(box.files.read_file(path))
        assert error.status_code in (403, 404), path
    error = await failure(box.files.write_file("/usr/bin/planted", "x"))
    assert error.status_code == 403
    execution = await box.commands.run("exec 3<>/dev/tcp/1.1.1.1/53")
    assert execution.exit_code != 0


async def test_code_inside_cannot_forge_the_answer_of_the_file_program(face: Face) -> None:
    box = await face.create()
    await box.commands.run(
        "mkdir -p /workspace/json && echo 'raise SystemExit(9)' > /workspace/json/__init__.py"
        " && echo 'raise SystemExit(9)' > /workspace/json.py"
    )
    await box.files.write_file("/tmp/real", "real")
    assert await box.files.read_file("/tmp/real") == "real"
    await box.destroy()


async def test_errors_have_both_fields_on_every_route(sdk: SdkService) -> None:
    key = await sdk.key("raw")
    base = f"{sdk.url}/opensandbox/v1"
    async with httpx.AsyncClient(headers={"open-sandbox-api-key": key}, timeout=60) as http:
        for method, route in (
            ("GET", "/nowhere"),
            ("GET", "/sandboxes/x"),
            ("POST", "/sandboxes"),
            ("PUT", "/sandboxes"),
            ("GET", "/sandboxes/x/proxy/44772/ping"),
        ):
            reply = await http.request(method, f"{base}{route}", content=b"{")
            assert reply.status_code >= 400
            assert {"code", "message"} <= set(reply.json()), route
            assert json.loads(reply.content)["message"]


async def test_fifty_clients_at_once(sdk: SdkService) -> None:
    face = Face("async", sdk.host, await sdk.key("crowd"))

    async def work(number: int) -> str:
        box = await face.create()
        await box.files.write_file("/workspace/own", str(number))
        execution = await box.commands.run("cat own")
        await box.destroy()
        return str(execution.text).strip()

    assert await asyncio.gather(*map(work, range(50))) == [str(n) for n in range(50)]
    await face.close()
