"""E2B's published packages against the service, both kinds of client."""

import asyncio
import hashlib
import io
import json
import struct
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import e2b
import httpx
import pytest
import pytest_asyncio
from both_sdks import Both
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    TimeoutException,
)
from e2b_face import Face, collector, e2b_key
from sdk_service import SdkService
from sessions_calls import until

from sbx.api import middleware
from sbx.api.e2b import connect


@pytest_asyncio.fixture(scope="module", params=["async", "sync"])
async def face(request: pytest.FixtureRequest, sdk: SdkService) -> Face:
    return Face(request.param, sdk, await sdk.key("e2b-user"))


@pytest_asyncio.fixture(scope="module")
async def box(face: Face) -> AsyncIterator[Both]:
    """One sandbox for all tests that leave it usable."""
    box = await face.create(metadata={"of": "module"}, envs={"FROM_CREATE": "a b"}, timeout=1200)
    yield box
    await box.kill()


# -- the control plane -----------------------------------------------------------------------------


async def test_the_first_example_of_the_readme(face: Face) -> None:
    box = await face.create()
    await box.run_code("x = 1")
    assert (await box.run_code("x+=1; x")).text == "2"
    assert (await box.commands.run('echo "Hello from E2B!"')).stdout == "Hello from E2B!\n"
    assert await box.kill()


async def test_info_has_the_fields_of_a_sandbox(face: Face, box: Both) -> None:
    info = await box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert box.sandbox_id.isalnum()
    assert info.sandbox_id.islower()
    assert (info.template_id, info.metadata) == ("code-interpreter-v1", {"of": "module"})
    assert info.state.value == "running"
    assert info.end_at - info.started_at == timedelta(seconds=1200)
    assert info.cpu_count >= 1
    assert info.memory_mb > 0


@pytest.mark.parametrize("template", ["base", "code-interpreter-v1"])
async def test_both_templates_run_code(face: Face, template: str) -> None:
    box = await face.create(template)
    assert (await box.run_code("6 * 7")).text == "42"
    assert (await box.get_info()).template_id == template
    await box.kill()


async def test_an_unknown_template_is_refused(face: Face) -> None:
    with pytest.raises(SandboxException, match=r"^404: .*'nothing-like-it' has no policy"):
        await face.create("nothing-like-it")


async def test_the_time_out_is_set_from_now_on(face: Face) -> None:
    box = await face.create(timeout=600)
    await box.set_timeout(60)
    left = (await box.get_info()).end_at - datetime.now(UTC)
    assert timedelta(seconds=50) < left <= timedelta(seconds=60)
    await box.set_timeout(0)
    assert not await box.is_running()
    with pytest.raises(SandboxNotFoundException):
        await box.get_info()


async def test_kill_is_final(face: Face) -> None:
    box = await face.create()
    assert await box.is_running()
    assert await box.kill()
    assert not await box.kill()
    assert not await box.is_running()
    with pytest.raises(SandboxNotRunningException, match="was not found"):
        await box.commands.run("true")
    with pytest.raises(TimeoutException, match="was not found"):
        await box.run_code("1")
    with pytest.raises(TimeoutException, match="was not found"):
        await box.files.read("x")


async def test_connect_finds_the_same_sandbox(face: Face, box: Both) -> None:
    await box.files.write("mark", "here")
    again = await face.connect(box.sandbox_id)
    assert await again.files.read("mark") == "here"
    assert again.traffic_access_token == box.traffic_access_token
    with pytest.raises(SandboxNotFoundException):
        await face.connect("sandbox0123456789ab")


async def test_connect_extends_the_time_and_does_not_shorten_it(face: Face) -> None:
    box = await face.create(timeout=100)
    before = (await box.get_info()).end_at
    await face.connect(box.sandbox_id, timeout=50)
    assert (await box.get_info()).end_at == before
    await face.connect(box.sandbox_id, timeout=500)
    assert (await box.get_info()).end_at > before + timedelta(seconds=300)
    await box.kill()


async def test_list_filters_and_pages(face: Face) -> None:
    mark = {"mark of": f"ü/{face.is_async}"}
    boxes = [await face.create(metadata={**mark, "n": str(n)}) for n in range(3)]
    ids = [each.sandbox_id for each in boxes]
    query = SandboxQuery(metadata=mark)
    assert await face.pages(query=query) == [ids[::-1]]
    assert await face.pages(query=query, limit=2) == [[ids[2], ids[1]], [ids[0]]]
    assert await face.pages(query=query, limit=2, order="asc") == [ids[:2], ids[2:]]
    assert await face.pages(query=SandboxQuery(metadata={**mark, "n": "1"})) == [[ids[1]]]
    assert await face.pages(query=SandboxQuery(metadata={"n": "none"})) == [[]]
    await boxes[0].pause()
    paused = SandboxQuery(metadata=mark, state=[e2b.SandboxState.PAUSED])
    assert await face.pages(query=paused) == [[ids[0]]]
    for each in boxes:
        await each.kill()


async def test_pause_keeps_files_and_variables(face: Face) -> None:
    box = await face.create()
    await box.run_code("kept = 41")
    await box.files.write("kept", "1")
    assert await box.pause()
    assert not await box.pause()
    assert not await box.is_running()
    assert (await box.get_info()).state.value == "paused"
    with pytest.raises(SandboxNotRunningException):
        await box.commands.run("true")
    again = await face.connect(box.sandbox_id)
    assert (await box.get_info()).state.value == "running"
    assert await again.files.read("kept") == "1"
    assert (await box.run_code("kept + 1")).text == "42"
    await box.pause()
    assert await again.kill()


async def test_a_sandbox_that_pauses_at_its_end(face: Face) -> None:
    box = await face.create(lifecycle={"on_timeout": "pause"})
    await box.files.write("kept", "1")
    assert (await box.get_info()).lifecycle["on_timeout"].value == "pause"
    await box.set_timeout(0)
    assert (await box.get_info()).state.value == "paused"
    assert not await box.is_running()
    await face.connect(box.sandbox_id)
    assert await box.files.read("kept") == "1"
    await box.kill()


async def test_a_sandbox_that_resumes_by_itself(face: Face) -> None:
    box = await face.create(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True})
    await box.pause()
    assert (await box.commands.run("echo back")).stdout == "back\n"
    assert (await box.get_info()).state.value == "running"
    await box.kill()


async def test_metrics_are_of_the_sandbox(box: Both) -> None:
    await box.run_code("1")
    (metrics,) = await box.get_metrics()
    assert metrics.cpu_count >= 1
    assert 0 < metrics.mem_used < metrics.mem_total
    assert 0 <= metrics.disk_used < metrics.disk_total


@pytest.mark.parametrize(
    "call",
    [
        lambda face, box: box.create_snapshot(),
        lambda face, box: box.fork(),
        lambda face, box: box.update_network({"allow_internet_access": True}),
        lambda face, box: face.create(volume_mounts={"/mnt": "vol"}),
        lambda face, box: face.create(mcp={"duckduckgo": {}}),
    ],
    ids=["snapshot", "fork", "network", "volume", "mcp"],
)
async def test_a_local_jail_says_what_it_has_not(face: Face, box: Both, call: Any) -> None:
    with pytest.raises(SandboxException, match="501: sbx does not offer"):
        await call(face, box)


@pytest.mark.parametrize(
    "call",
    [
        lambda options: e2b.Volume.create("own", **options),
        lambda options: e2b.Secret.create("own", "value", **options),
        lambda options: e2b.Template.exists("own", **options),
        lambda options: e2b.Template.build(
            e2b.Template().from_python_image(), alias="own", **options
        ),
    ],
    ids=["volume", "secret", "template", "build"],
)
async def test_what_needs_a_cloud_is_an_error_of_the_sdk(sdk: SdkService, call: Any) -> None:
    options = {"api_key": e2b_key(await sdk.key("cloudy")), "api_url": sdk.url}
    classes = (SandboxException, e2b.BuildException, e2b.SecretException, e2b.VolumeException)
    with pytest.raises(classes) as raised:
        await asyncio.to_thread(call, options)
    assert "sbx does not offer" in str(raised.value)


# -- commands --------------------------------------------------------------------------------------


async def test_streams_directory_and_environment(face: Face, box: Both) -> None:
    result = await box.commands.run(
        'pwd; echo "$HOME $USER $FROM_CREATE $OWN $E2B_SANDBOX $E2B_SANDBOX_ID"; echo e >&2',
        envs={"OWN": "1"},
    )
    assert result.exit_code == 0
    assert result.stdout == f"/home/user\n/home/user user a b 1 true {box.sandbox_id}\n"
    assert result.stderr == "e\n"
    assert result.error is None
    assert (await box.commands.run("pwd", cwd="/tmp")).stdout == "/tmp\n"
    await box.files.make_dir("sub")
    assert (await box.commands.run("pwd", cwd="sub")).stdout == "/home/user/sub\n"


async def test_commands_get_the_variables_that_a_kernel_must_not_have(face: Face) -> None:
    box = await face.create(envs={"PYTHONPATH": "/tmp/own", "PLAIN": "1"})
    assert (await box.commands.run("echo $PYTHONPATH $PLAIN")).stdout == "/tmp/own 1\n"
    code = "import os\nos.environ.get('PYTHONPATH'), os.environ['PLAIN']"
    assert (await box.run_code(code)).text == "(None, '1')"
    await box.kill()


async def test_a_failure_is_an_exception_with_the_exit_code(box: Both) -> None:
    with pytest.raises(CommandExitException) as raised:
        await box.commands.run("echo o; echo e >&2; exit 3")
    error = raised.value
    assert (error.exit_code, error.stdout, error.stderr) == (3, "o\n", "e\n")
    assert error.error == "exit status 3"


async def test_callbacks_get_the_output(box: Both) -> None:
    out: list[str] = []
    err: list[str] = []
    await box.commands.run("echo 1; echo 2 >&2", on_stdout=collector(out), on_stderr=collector(err))
    assert ("".join(out), "".join(err)) == ("1\n", "2\n")


async def test_a_missing_directory_is_refused(box: Both) -> None:
    with pytest.raises(InvalidArgumentException, match="'/nowhere' does not exist"):
        await box.commands.run("true", cwd="/nowhere")


async def test_a_command_that_takes_too_long_is_killed(box: Both) -> None:
    with pytest.raises(TimeoutException, match="time"):
        await box.commands.run("sleep 1000 # late", timeout=1)

    async def is_gone() -> bool:
        return not any("# late" in str(each.args) for each in await box.commands.list())

    await until(is_gone)


async def test_a_background_command_is_listed_and_killed(box: Both) -> None:
    handle = Both(await box.commands.run("echo begun; sleep 1000", background=True, timeout=0))
    (shown,) = [each for each in await box.commands.list() if each.pid == handle.pid]
    assert (shown.cmd, shown.args) == ("/bin/bash", ["-l", "-c", "echo begun; sleep 1000"])
    assert shown.cwd == "/home/user"
    # A process that is being executed has no command line for a moment.
    shows = f"tr '\\0' ' ' < /proc/{handle.pid}/cmdline | grep sleep"
    inside = await box.commands.run(f"until {shows}; do sleep 0.01; done")
    assert "sleep 1000" in inside.stdout
    assert await handle.kill()
    with pytest.raises(CommandExitException) as raised:
        await handle.wait()
    assert (raised.value.exit_code, raised.value.error) == (-1, "signal: killed")
    assert not await box.commands.kill(handle.pid)


async def test_connect_to_a_command_gets_its_later_output(box: Both) -> None:
    handle = Both(await box.commands.run("read line; echo got $line", background=True, stdin=True))
    again = Both(await box.commands.connect(handle.pid))
    await box.commands.send_stdin(handle.pid, "it\n")
    assert (await again.wait()).stdout == "got it\n"
    assert (await handle.wait()).stdout == "got it\n"
    with pytest.raises(NotFoundException):
        await box.commands.connect(4_000_000)


async def test_stdin_and_its_end(box: Both) -> None:
    handle = Both(await box.commands.run("cat | md5sum", background=True, stdin=True))
    for _ in range(3):
        await box.commands.send_stdin(handle.pid, b"\x00\xff" * 100_000)
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout.split()[0] == hashlib.md5(b"\x00\xff" * 300_000).hexdigest()
    without = Both(await box.commands.run("sleep 1000", background=True))
    with pytest.raises(SandboxException, match="standard input"):
        await box.commands.send_stdin(without.pid, "x")
    await without.kill()


async def test_streamed_input(face: Face, box: Both) -> None:
    handle = Both(await box.commands.run("wc -c", background=True, stdin=True))
    await face.stream_input(box, handle.pid, [b"x" * 300_000, "yz"])
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout.strip() == "300002"
    with pytest.raises(NotFoundException):
        await face.stream_input(box, 4_000_000, ["x"])


async def test_streamed_input_may_pause(sdk: SdkService, monkeypatch: pytest.MonkeyPatch) -> None:
    face = Face("async", sdk, await sdk.key("typist"))
    box = await face.create()
    handle = Both(await box.commands.run("wc -c", background=True, stdin=True))
    monkeypatch.setattr(middleware, "IDLE_S", 0.5)
    stream = box.commands.inner.stream_input(handle.pid)
    await stream.send("a")
    await asyncio.sleep(1)  # longer than other bodies may pause
    await stream.send("b")
    await stream.close()
    monkeypatch.undo()
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout.strip() == "2"
    await box.kill()


async def test_output_that_nobody_reads_does_not_block_others(face: Face, box: Both) -> None:
    handle = Both(await box.commands.run("head -c 3000000 /dev/zero", background=True))
    assert (await box.commands.run("echo other")).stdout == "other\n"
    assert len((await handle.wait()).stdout) == 3_000_000


async def test_a_large_output_is_complete(box: Both) -> None:
    result = await box.commands.run("seq 300000")
    assert result.stdout.split() == [str(n) for n in range(1, 300_001)]


async def test_a_process_outlives_its_client(face: Face, box: Both) -> None:
    handle = Both(await box.commands.run("sleep 0.3; echo > outlived", background=True, timeout=30))
    await handle.disconnect()

    async def is_written() -> bool:
        return bool(await box.files.exists("outlived"))

    await until(is_written)


def envelopes(content: bytes) -> list[tuple[int, dict[str, Any]]]:
    """The flags and the messages of a stream."""
    messages = []
    while content:
        flags, length = struct.unpack_from(">BI", content)
        messages.append((flags, json.loads(content[5 : 5 + length])))
        content = content[5 + length :]
    return messages


async def test_a_silent_stream_is_kept_alive(sdk: SdkService) -> None:
    face = Face("async", sdk, await sdk.key("listener"))
    box = await face.create()
    headers = {
        "e2b-sandbox-id": box.sandbox_id,
        "e2b-sandbox-port": "49983",
        "x-access-token": box.traffic_access_token,
        "content-type": "application/connect+json",
        "keepalive-ping-interval": "1",
    }

    async def start(message: dict[str, Any]) -> httpx.Response:
        url = f"{sdk.url}/process.Process/Start"
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            return await client.post(url, content=connect.envelope(message))

    process = {"cmd": "/bin/bash", "args": ["-c", "sleep 2.5; echo up"]}
    reply = await start({"process": process, "stdin": False})
    assert reply.headers["content-type"] == "application/connect+json"
    *events, last = envelopes(reply.content)
    kinds = [next(iter(message["event"])) for _, message in events]
    assert kinds[0] == "start"
    assert kinds.count("keepalive") >= 1
    assert kinds[-2:] == ["data", "end"]
    assert {flags for flags, _ in events} == {0}
    assert last == (2, {})
    refused = await start({"process": {**process, "cwd": "/nowhere"}})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_argument")
    reply = await start({"process": {**process, "args": ["-c", "kill -9 $$"]}})
    end = envelopes(reply.content)[-2][1]["event"]["end"]
    assert (end["exitCode"], end["exited"], end["status"]) == (-1, False, "signal: killed")
    await box.kill()


async def test_another_user_does_not_exist(box: Both) -> None:
    assert (await box.commands.run("echo 1", user="user")).stdout == "1\n"
    assert (await box.commands.run("echo 1", user="root")).stdout == "1\n"
    with pytest.raises(AuthenticationException):
        await box.commands.run("true", user="mallory")
    with pytest.raises(AuthenticationException):
        await box.files.list("/", user="mallory")
    with pytest.raises(AuthenticationException):
        await box.files.read("/etc/passwd", user="mallory")


async def test_git_works_as_commands(box: Both) -> None:
    await box.git.configure_user("A", "a@example.com")
    await box.git.init("repo")
    await box.files.write("repo/a", "1")
    await box.git.add("repo", ["a"])
    await box.git.commit("repo", "first")
    assert (await box.git.status("repo")).is_clean
    assert (await box.git.branches("repo")).current_branch in ("main", "master")


# -- terminals -------------------------------------------------------------------------------------


async def test_a_terminal_has_a_size_and_an_end(face: Face, box: Both) -> None:
    log: list[bytes] = []
    terminal = await face.terminal(box, log, envs={"MARK": "seen"}, cwd="/tmp")
    await box.pty.send_stdin(terminal.pid, b"stty size; pwd; echo $MARK; tty; exit 4\n")
    with pytest.raises(CommandExitException) as raised:
        await face.ended(terminal, log)
    assert raised.value.exit_code == 4
    shown = b"".join(log)
    assert b"30 100\r\n/tmp\r\nseen\r\n/dev/pts/" in shown


async def test_a_terminal_is_resized_and_killed(face: Face, box: Both) -> None:
    log: list[bytes] = []
    terminal = await face.terminal(box, log)
    await box.pty.resize(terminal.pid, e2b.PtySize(rows=40, cols=120))
    await box.pty.send_stdin(terminal.pid, b"stty size > /tmp/size\n")

    async def is_resized() -> bool:
        try:
            return bool(await box.files.read("/tmp/size") == "40 120\n")
        except FileNotFoundException:
            return False

    await until(is_resized)
    assert await box.pty.kill(terminal.pid)
    with pytest.raises(CommandExitException):
        await face.ended(terminal, log)
    assert not await box.pty.kill(terminal.pid)


async def test_input_goes_to_terminals_and_commands_by_their_kind(face: Face, box: Both) -> None:
    handle = Both(await box.commands.run("cat", background=True, stdin=True))
    with pytest.raises(SandboxException):
        await box.pty.send_stdin(handle.pid, b"x")
    with pytest.raises(SandboxException, match="no terminal"):
        await box.pty.resize(handle.pid, e2b.PtySize(rows=1, cols=1))
    await handle.kill()


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["", "/home/user/abs/", "/tmp/out/", "~/tilde/"])
async def test_write_and_read(face: Face, box: Both, root: str) -> None:
    info = await box.files.write(f"{root}dir/a.txt", "ü\r\n")
    shown = root.replace("~", "/home/user") or "/home/user/"
    assert (info.name, info.path) == ("a.txt", f"{shown}dir/a.txt")
    assert await box.files.read(f"{root}dir/a.txt") == "ü\r\n"
    assert bytes(await box.files.read(f"{root}dir/a.txt", format="bytes")) == "ü\r\n".encode()
    pieces = await face.stream(await box.files.read(f"{root}dir/a.txt", format="stream"))
    assert b"".join(pieces) == "ü\r\n".encode()
    await box.files.write(f"{root}dir/a.txt", b"\x00\xff")
    assert bytes(await box.files.read(f"{root}dir/a.txt", format="bytes")) == b"\x00\xff"
    assert (await box.commands.run(f"cat {shown}dir/a.txt | wc -c")).stdout.strip() == "2"


async def test_several_files_in_one_call(box: Both) -> None:
    names = ["many/1", 'many/q"uote', "many/é", "/tmp/many/2"]
    infos = await box.files.write_files([{"path": name, "data": name} for name in names])
    assert [each.path for each in infos] == [
        name if name[0] == "/" else f"/home/user/{name}" for name in names
    ]
    for name in names:
        assert await box.files.read(name) == name
    with pytest.raises(InvalidArgumentException, match="twice"):
        await box.files.write_files([{"path": "same", "data": "1"}] * 2)
    assert await box.files.write_files([]) == []


@pytest.mark.parametrize("gzip", [False, True])
async def test_large_files_and_files_of_the_client(face: Face, box: Both, gzip: bool) -> None:
    content = bytes(range(256)) * 16_000
    await box.files.write("large", io.BytesIO(content), gzip=gzip)
    assert bytes(await box.files.read("large", format="bytes", gzip=gzip)) == content
    await box.files.write("/tmp/large", content, use_octet_stream=True, gzip=gzip)
    assert b"".join(await face.stream(await box.files.read("/tmp/large", format="stream"))) == (
        content
    )


async def test_metadata_of_a_file(box: Both) -> None:
    info = await box.files.write("tagged", "1", metadata={"Kind": "a b"})
    assert info.metadata == {"kind": "a b"}
    assert (await box.files.get_info("tagged")).metadata == {"kind": "a b"}
    await box.files.write("tagged", "2", metadata={"other": "c"})
    assert (await box.files.get_info("tagged")).metadata == {"other": "c"}


async def test_info_of_files_directories_and_links(box: Both) -> None:
    await box.files.write("info/file", "12345")
    await box.commands.run("chmod 640 info/file; ln -s file info/link; ln -s none info/dangling")
    info = await box.files.get_info("info/file")
    assert (info.name, info.path, info.size) == ("file", "/home/user/info/file", 5)
    assert (info.type.value, info.mode, info.permissions) == ("file", 0o640, "-rw-r-----")
    assert info.modified_time.tzinfo is not None
    link = await box.files.get_info("/home/user/info/link")
    assert (link.type.value, link.symlink_target) == ("symlink", "/home/user/info/file")
    assert (await box.files.get_info("info")).type.value == "dir"
    assert await box.files.exists("info/dangling")
    listed = {entry.name: entry.type.value for entry in await box.files.list("info")}
    assert listed == {"dangling": "symlink", "file": "file", "link": "symlink"}
    assert not await box.files.exists("info/none")
    with pytest.raises(FileNotFoundException):
        await box.files.get_info("info/none")


async def test_list_to_a_depth(box: Both) -> None:
    await box.files.write("tree/b/c/d", "1")
    await box.files.write("tree/a", "1")

    async def names(path: str, depth: int) -> list[str]:
        return [each.path for each in await box.files.list(path, depth=depth)]

    top = "/home/user/tree"
    assert await names("tree", 1) == [f"{top}/a", f"{top}/b"]
    assert await names(top, 3) == [f"{top}/a", f"{top}/b", f"{top}/b/c", f"{top}/b/c/d"]
    assert await names("/workspace/tree", 1) == ["/workspace/tree/a", "/workspace/tree/b"]
    with pytest.raises(FileNotFoundException):
        await box.files.list("tree/none")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        await box.files.list("tree/a")


async def test_directories_moves_and_removals(box: Both) -> None:
    assert await box.files.make_dir("made/deep")
    assert not await box.files.make_dir("made/deep")
    await box.files.write("made/file", "1")
    with pytest.raises(InvalidArgumentException):
        await box.files.make_dir("made/file")
    moved = await box.files.rename("made/file", "made/other/file")
    assert moved.path == "/home/user/made/other/file"
    await box.files.write("made/second", "2")
    await box.files.rename("made/second", "made/other/file")
    assert await box.files.read("made/other/file") == "2"
    with pytest.raises(FileNotFoundException):
        await box.files.rename("made/none", "made/x")
    await box.files.remove("made")
    await box.files.remove("made")
    assert not await box.files.exists("made")


async def test_reads_and_writes_that_fail(box: Both) -> None:
    await box.files.make_dir("adir")
    with pytest.raises(FileNotFoundException):
        await box.files.read("none")
    for path in ("adir", "/tmp"):
        with pytest.raises(InvalidArgumentException):
            await box.files.read(path)
        with pytest.raises(InvalidArgumentException):
            await box.files.write(path, "x")
    with pytest.raises(InvalidArgumentException, match="another user"):
        await box.files.read("~root/x")


@pytest.mark.parametrize("recursive", [False, True])
async def test_a_watch_reports_changes(face: Face, box: Both, recursive: bool) -> None:
    top = f"watched{recursive}"
    await box.files.make_dir(f"{top}/sub")
    log: list[Any] = []
    handle = await face.watched(box, top, log, recursive=recursive, include_entry=True)
    await box.files.write(f"{top}/new", "1")
    await box.files.write(f"{top}/sub/deep", "1")
    await box.files.remove(f"{top}/new")

    async def seen(name: str, kind: str) -> bool:
        events = await face.events(handle, log)
        return any((each.name, each.type.value) == (name, kind) for each in events)

    await until(lambda: seen("new", "create"))
    await until(lambda: seen("new", "remove"))
    if recursive:
        await until(lambda: seen("sub/deep", "create"))
    assert recursive or not any(each.name == "sub/deep" for each in log)
    entries = [each.entry for each in log if each.entry is not None]
    assert all(each.path.startswith(f"/home/user/{top}") for each in entries)
    await handle.stop()


async def test_watches_that_cannot_begin(face: Face, box: Both) -> None:
    await box.files.write("plain", "1")
    with pytest.raises(FileNotFoundException):
        await face.watched(box, "none", [])
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        await face.watched(box, "plain", [])
    with pytest.raises(InvalidArgumentException, match="only directories below /home/user"):
        await face.watched(box, "/tmp", [])


async def test_signed_addresses(box: Both, sdk: SdkService) -> None:
    await box.files.write("signed ü", "content")
    async with httpx.AsyncClient(timeout=60) as client:
        url = await box.download_url("signed ü")
        assert "sandbox" not in url.partition("?")[0]
        assert (await client.get(url)).text == "content"
        assert (await client.get(url + "x")).status_code == 401
        head = await client.head(url)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "7", b"")
        assert (await client.get(url.replace("signed", "other"))).status_code == 401
        late = await box.download_url("signed ü", use_signature_expiration=1000)
        assert (await client.get(late)).text == "content"
        over = await box.download_url("signed ü", use_signature_expiration=-1)
        assert (await client.get(over)).status_code == 401
        files = {"file": ("ignored", b"uploaded")}
        assert (await client.post(url, files=files)).status_code == 401
        up = await client.post(await box.upload_url("up/load"), files=files)
        assert up.json() == [{"name": "load", "path": "/home/user/up/load", "type": "file"}]
    assert await box.files.read("up/load") == "uploaded"


async def test_a_server_inside_is_reachable_by_its_host(box: Both, sdk: SdkService) -> None:
    await box.files.write("site/index.html", "<p>inside")
    server = Both(
        await box.commands.run("exec python3 -m http.server 3000 -d site", background=True)
    )
    host = await box.get_host(3000)
    assert host.endswith(f".localhost:{sdk.host.rpartition(':')[2]}")
    token = {"e2b-traffic-access-token": box.traffic_access_token}
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as client:

        async def answers() -> bool:
            reply = await client.get("/", headers={"host": host, **token})
            return reply.text == "<p>inside"

        await until(answers)
        assert (await client.get("/", headers={"host": host})).status_code == 401
        named = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "3000"}
        assert (await client.get("/", headers={**named, **token})).text == "<p>inside"
        assert (await client.get("/", headers=named)).status_code == 401
    await server.kill()


# -- code ------------------------------------------------------------------------------------------


async def test_output_result_and_count(box: Both) -> None:
    run = await box.run_code("import sys\nprint('a')\nprint('b', file=sys.stderr)\n'quoted'")
    assert (run.logs.stdout, run.logs.stderr) == (["a\n"], ["b\n"])
    assert run.text == "quoted"
    assert run.error is None
    again = await box.run_code("1")
    assert again.execution_count == run.execution_count + 1


async def test_callbacks_of_code(box: Both) -> None:
    log: list[tuple[str, str]] = []

    def add(name: str) -> Any:
        return lambda each: log.append((name, str(getattr(each, "line", each))))

    await box.run_code(
        "import sys, time\nprint('one', end='')\ntime.sleep(0.5)\nprint('two')\n"
        "print('e', file=sys.stderr)\ndisplay('shown')\n1/0",
        **{f"on_{name}": add(name) for name in ("stdout", "stderr", "result", "error")},
    )
    names = [name for name, _ in log]
    assert list(dict.fromkeys(names)) == ["stdout", "stderr", "result", "error"]
    assert "".join(text for name, text in log if name == "stdout") == "onetwo\n"


async def test_errors_of_code(box: Both) -> None:
    run = await box.run_code("def f():\n    return 1/0\nf()")
    assert (run.error.name, run.error.value) == ("ZeroDivisionError", "division by zero")
    assert "return 1/0" in run.error.traceback
    assert "\x1b" not in run.error.traceback
    syntax = await box.run_code("def")
    assert syntax.error.name == "SyntaxError"


async def test_results_of_each_type(box: Both) -> None:
    kinds = {
        "text/html": "<p>", "text/markdown": "# m", "image/svg+xml": "<svg/>", "image/png": "cG5n",
        "image/jpeg": "anBn", "application/pdf": "cGRm", "text/latex": "$x$",
        "application/json": {"a": 1}, "application/javascript": "f()", "x/own": "o",
    }  # fmt: skip
    run = await box.run_code(f"display({kinds!r}, raw=True)")
    (result,) = run.results
    assert (result.html, result.markdown, result.svg) == ("<p>", "# m", "<svg/>")
    assert (result.png.strip(), result.jpeg.strip(), result.pdf.strip()) == ("cG5n", "anBn", "cGRm")
    assert (result.latex, result.json, result.javascript) == ("$x$", {"a": 1}, "f()")
    assert result.extra == {"x/own": "o"}
    assert not result.is_main_result
    assert (await box.run_code("{'k': [1]}")).results[0].json == {"k": [1]}


async def test_charts_and_tables_have_their_data(sdk: SdkService) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    box = await Face("async", sdk, await sdk.key("painter")).create()
    run = await box.run_code(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4], label='line')\n"
        "plt.title('Title')\nplt.show()",
        timeout=120,
    )
    (result,) = run.results
    assert result.png
    assert result.chart.title == "Title"
    assert result.chart.elements[0].points == [(1, 3), (2, 4)]
    gap = "plt.plot([1, 2, 3], [3, float('nan'), float('inf')])\nplt.show()"
    (result,) = (await box.run_code(gap)).results
    assert result.chart.elements[0].points == [(1, 3), (2, None), (3, None)]
    assert (await box.run_code("{'k': float('nan')}")).results[0].json == {"k": None}
    run = await box.run_code("plt.bar(['a', 'b'], [1, 2])\nplt.show()")
    assert run.results[0].chart.type.value == "bar"
    run = await box.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', None]})")
    assert run.results[0].data == {"a": [1, 2], "b": ["x", None]}
    await box.kill()


async def test_variables_of_one_run(box: Both) -> None:
    code = "import os\nos.environ.get('ONE_RUN'), os.environ.get('FROM_CREATE')"
    assert (await box.run_code(code, envs={"ONE_RUN": "1"})).text == "('1', 'a b')"
    assert (await box.run_code(code)).text == "(None, 'a b')"
    assert (await box.run_code("[n for n in dir() if 'sbx' in n]")).text == "[]"
    await box.run_code("1/0", envs={"ONE_RUN": "1"})
    assert (await box.run_code(code)).text == "(None, 'a b')"


async def test_contexts_share_files_and_not_variables(box: Both) -> None:
    context = await box.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert (await box.run_code("import os\nown = 1\nos.getcwd()", context=context)).text == "/tmp"
    assert (await box.run_code("own")).error.name == "NameError"
    await box.run_code("open('/home/user/shared', 'w').close()", context=context)
    assert await box.files.exists("shared")
    contexts = {each.id: each.cwd for each in await box.list_code_contexts()}
    assert contexts[context.id] == "/tmp"
    assert "/home/user" in contexts.values()
    await box.restart_code_context(context)
    assert (await box.run_code("import os\nos.getcwd()", context=context)).text == "/tmp"
    assert (await box.run_code("own", context=context)).error.name == "NameError"
    await box.remove_code_context(context.id)
    with pytest.raises(NotFoundException, match="not found"):
        await box.run_code("1", context=context)
    with pytest.raises(SandboxException, match="does not exist"):
        await box.create_code_context(cwd="/nowhere")


async def test_a_default_context_is_found_by_its_id(box: Both) -> None:
    await box.run_code("shared_by_default = 5")
    default = (await box.list_code_contexts())[0]
    assert default.language == "python"
    assert (await box.run_code("shared_by_default", context=default)).text == "5"


@pytest.mark.parametrize(
    ("language", "code"),
    [("bash", "echo $((6*7))"), ("js", "console.log(6*7)"), ("python", "print(6*7)")],
)
async def test_languages(box: Both, language: str, code: str) -> None:
    run = await box.run_code(code, language=language)
    assert (run.logs.stdout, run.error) == (["42\n"], None)


async def test_a_language_that_is_unknown(box: Both) -> None:
    with pytest.raises(SandboxException, match="language"):
        await box.run_code("1", language="r")


async def test_code_that_takes_too_long_is_interrupted(box: Both) -> None:
    await box.run_code("kept_over_timeout = 7")
    begun = time.monotonic()
    with pytest.raises(TimeoutException):
        await box.run_code("import time\nwhile True: time.sleep(0.05)", timeout=1)
    assert (await box.run_code("kept_over_timeout")).text == "7"
    assert time.monotonic() - begun < 60


async def test_a_kernel_that_died_is_replaced(face: Face) -> None:
    box = await face.create()
    run = await box.run_code("import os\nos._exit(1)")
    assert run.error is not None
    assert (await box.run_code("1 + 1")).text == "2"
    await box.kill()


async def test_input_is_an_error(box: Both) -> None:
    assert (await box.run_code("input()")).error is not None


# -- authentication, attacks and crowds ------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [("e2b_" + "0" * 64, "unknown|valid"), ("e2b_short", "form of a key")],
    ids=["wrong", "malformed"],
)
async def test_wrong_keys(face: Face, key: str, message: str) -> None:
    with pytest.raises(AuthenticationException, match=message):
        await face.create(api_key=key)


async def test_another_owner_sees_nothing(face: Face, box: Both, sdk: SdkService) -> None:
    other = Face("async" if face.is_async else "sync", sdk, await sdk.key("mallory"))
    with pytest.raises(SandboxNotFoundException):
        await other.connect(box.sandbox_id)
    with pytest.raises(SandboxNotFoundException):
        await other.sandboxes.get_info(box.sandbox_id, **other.options)
    with pytest.raises(SandboxNotFoundException):
        await other.sandboxes.set_timeout(box.sandbox_id, timeout=1, **other.options)
    with pytest.raises(SandboxNotFoundException):
        await other.sandboxes.pause(box.sandbox_id, **other.options)
    assert not await other.sandboxes.kill(box.sandbox_id, **other.options)
    assert await other.pages() == [[]]
    assert await box.is_running()


async def test_a_token_opens_only_its_own_sandbox(face: Face, box: Both, sdk: SdkService) -> None:
    other = Face("async", sdk, await sdk.key("mallory2"))
    theirs = await other.create()
    token = theirs.traffic_access_token
    named = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "49983"}
    code = {**named, "e2b-sandbox-port": "49999"}
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as client:
        for headers in (
            named,
            {**named, "x-access-token": token},
            {**named, "x-access-token": "forged"},
            {**named, "x-api-key": e2b_key(await sdk.key("mallory3"))},
        ):
            stat = await client.post(
                "/filesystem.Filesystem/Stat", headers=headers, json={"path": "/"}
            )
            assert stat.status_code in (401, 502)
            files = await client.get("/files", headers=headers, params={"path": "mark"})
            assert files.status_code in (401, 502)
        for headers in (code, {**code, "e2b-traffic-access-token": token}):
            assert (await client.get("/contexts", headers=headers)).status_code in (401, 502)
            run = await client.post("/execute", headers=headers, json={"code": "1"})
            assert run.status_code in (401, 502)
    await theirs.kill()


async def test_a_token_ends_with_the_key_of_its_maker(sdk: SdkService) -> None:
    access = sdk.served.service.access
    key, text = await access.make_key("leaver", operator=False)
    face = Face("async", sdk, text)
    box = await face.create()
    assert (await box.commands.run("echo 1")).stdout == "1\n"
    url = await box.download_url("x")
    await access.revoke_key(key.id)

    async def is_refused() -> bool:
        try:
            await box.commands.run("echo 1")
        except AuthenticationException:
            return True
        return False

    await until(is_refused)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(url)).status_code == 401


async def test_host_files_networks_and_forged_paths(box: Both) -> None:
    assert "root:x:0:0:root:/root:/usr/sbin/nologin" in await box.files.read("/etc/passwd")
    for path in ("/root/.bashrc", "/proc/1/root/etc/shadow", "../../etc/shadow", "/etc/shadow"):
        with pytest.raises(SandboxException):
            await box.files.read(path)
    for path in ("/etc/own", "/usr/own", "/proc/1/mem"):
        with pytest.raises(SandboxException):
            await box.files.write(path, "x")
    with pytest.raises(CommandExitException):
        await box.commands.run("exec 3<>/dev/tcp/192.0.2.1/80", timeout=20)
    await box.commands.run("ln -sfn / root_of_host; ln -sf /etc/shadow shadow")
    for path in ("shadow", "root_of_host/etc/shadow"):
        with pytest.raises(SandboxException):
            await box.files.read(path)


async def test_a_page_of_the_server_inside_gets_no_credential(box: Both, sdk: SdkService) -> None:
    server = Both(
        await box.commands.run(
            "printf 'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok' > /tmp/reply;"
            " exec python3 -c 'import socket\n"
            's = socket.create_server(("127.0.0.1", 3001))\n'
            "while True:\n"
            ' c, _ = s.accept(); d = c.recv(65536); open("/tmp/head", "wb").write(d)\n'
            ' c.sendall(open("/tmp/reply", "rb").read()); c.close()\'',
            background=True,
        )
    )
    headers = {
        "e2b-sandbox-id": box.sandbox_id,
        "e2b-sandbox-port": "3001",
        "e2b-traffic-access-token": box.traffic_access_token,
        "x-own": "kept",
    }
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as client:

        async def answers() -> bool:
            return (await client.get("/", headers=headers)).text == "ok"

        await until(answers)
    head = (await box.files.read("/tmp/head")).lower()
    assert "x-own: kept" in head
    assert box.traffic_access_token.lower() not in head
    assert "e2b-" not in head
    await server.kill()


async def test_a_watch_reports_an_overwrite_as_a_write(face: Face) -> None:
    """It was reported as a new file."""
    box = await face.create()
    await box.files.write("watched/größe.txt", "1")
    log: list[Any] = []
    handle = await face.watched(box, "/home/user/watched", log)

    async def kinds() -> list[tuple[str, str]]:
        return [(event.name, event.type.value) for event in await face.events(handle, log)]

    async def is_reported(name: str) -> bool:
        return any(name == each for each, _ in await kinds())

    await box.files.write("watched/größe.txt", "22")
    await until(lambda: is_reported("größe.txt"))
    await box.files.write("watched/new.txt", "1")
    await until(lambda: is_reported("new.txt"))
    assert set(await kinds()) == {("größe.txt", "write"), ("new.txt", "create")}
    await box.kill()


@pytest.mark.parametrize(
    "call",
    [
        "filesystem.Filesystem/WatchDir",
        "process.Process/Connect",
        "process.Process/Start",
        "process.Process/StreamInput",
    ],
)
async def test_each_stream_ends_at_the_deadline_of_the_request(sdk: SdkService, call: str) -> None:
    """A watch never ended: its time-out cancelled a task that had ended already."""
    face = Face("async", sdk, await sdk.key(f"deadline-{call[-5:]}"))
    box = await face.create()
    process = await box.commands.run("sleep 600", background=True)
    contents: dict[str, dict[str, Any]] = {
        "filesystem.Filesystem/WatchDir": {"path": "/home/user"},
        "process.Process/Connect": {"process": {"pid": process.pid}},
        "process.Process/Start": {"process": {"cmd": "sleep", "args": ["600"]}},
        "process.Process/StreamInput": {"start": {"process": {"pid": process.pid}}},
    }

    message = connect.envelope(contents[call])
    key = e2b_key(await sdk.key(f"deadline-{call[-5:]}"))
    last = b"" if call.endswith("StreamInput") else b"0\r\n\r\n"  # its input never ends
    url = httpx.URL(sdk.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"POST {url.path}//{call} HTTP/1.1\r\nhost: {url.host}:{url.port}\r\nconnection: close\r\n"
        f"connect-timeout-ms: 1000\r\ncontent-type: {connect.STREAM_TYPE}\r\nx-api-key: {key}\r\n"
        f"e2b-sandbox-id: {box.sandbox_id}\r\ne2b-sandbox-port: 49983\r\n"
        f"transfer-encoding: chunked\r\n\r\n{len(message):x}\r\n".encode()
        + message
        + b"\r\n"
        + last
    )
    try:
        async with asyncio.timeout(60):
            reply = await reader.readuntil(b'{"error":{"code":"deadline_exceeded"')
    finally:
        writer.close()
    assert reply.startswith(b"HTTP/1.1 200 ")
    await box.kill()


async def test_errors_have_the_form_that_the_sdk_reads(sdk: SdkService) -> None:
    key = {"x-api-key": e2b_key(await sdk.key("forms"))}
    inside = {"e2b-sandbox-id": "sandbox0", "e2b-sandbox-port": "49983", **key}
    code = {**inside, "e2b-sandbox-port": "49999"}
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as client:
        replies = [
            (await client.get("/sandboxes/none", headers=key), 404),
            (await client.get("/sandboxes/none"), 401),
            (await client.post("/v2/sandboxes", headers=key, content=b"{"), 422),
            (await client.post("/v2/sandboxes", headers=key, json={"timeout": 0}), 422),
            (await client.post("/v2/sandboxes", headers=key), 400),
            (await client.post("/sandboxes", headers=key), 400),
            (await client.get("/v2/sandboxes?nextToken=x", headers=key), 400),
            (await client.get("/templates", headers=key), 501),
            (await client.get("/health", headers=inside), 502),
            (await client.get(f"{sdk.url}//files?path=x", headers=inside), 502),
        ]
        for reply, status in replies:
            assert reply.status_code == status, reply.text
            assert reply.json()["code"] == status
            assert reply.json()["message"]
        assert replies[8][0].json()["sandboxId"] == "sandbox0"
        rpc = await client.post(f"{sdk.url}//process.Process/List", headers=inside, json={})
        assert (rpc.status_code, rpc.json()["code"]) == (502, "unavailable")
        text = await client.post("/execute", headers=code, json={"code": "1"})
        assert (text.status_code, text.text) == (502, "The sandbox was not found")


async def test_fifty_clients_at_once(sdk: SdkService) -> None:
    face = Face("async", sdk, await sdk.key("e2b-crowd"))

    async def work(number: int) -> str:
        box = await face.create(timeout=600)
        await box.files.write("own", str(number))
        shown = (await box.run_code("print(open('own').read(), end='')")).logs.stdout
        again = (await box.commands.run("cat own")).stdout
        await box.kill()
        return f"{''.join(shown)} {again}"

    results = await asyncio.gather(*map(work, range(50)))
    assert results == [f"{n} {n}" for n in range(50)]
