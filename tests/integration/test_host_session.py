"""With the sandbox off: the host itself, still bounded, still with one result for each run."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from persistent_sandboxes import eventually

from sbx.errors import BadRequest, Closed, InvalidPath, NotFound
from sbx.protocol.runs import Cause, Run, Stdout
from sbx.runtime.run.active_run import ActiveRun
from sbx.service.projects.host_mode import HostSession

GRACE_S = 30.0  # on a busy machine an interrupt takes long
SHORT_GRACE_S = 0.3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
async def box(directory: Path) -> AsyncIterator[HostSession]:
    box = HostSession(directory, None, GRACE_S)
    yield box
    await box.close()


@pytest.fixture
async def hasty(directory: Path) -> AsyncIterator[HostSession]:
    """A session that kills soon after an interrupt."""
    box = HostSession(directory, None, SHORT_GRACE_S)
    yield box
    await box.close()


async def cell(box: HostSession, code: str, timeout: float | None = None) -> Run:
    return await box.start_run(code, timeout=timeout).result()


async def command(box: HostSession, text: str, timeout: float | None = None) -> Run:
    return await box.start_shell(text, timeout=timeout).result()


async def printed(live: ActiveRun) -> str:
    async for event in live.events():
        if isinstance(event, Stdout):
            return event.text.strip()
    raise AssertionError("it ended before it printed anything")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_command_acts_on_the_host(box: HostSession, directory: Path) -> None:
    run = await command(box, "pwd; id -u; echo warned >&2; echo new > made.txt; exit 3")
    assert run.stdout == f"{directory}\n{os.geteuid()}\n"
    assert (run.stderr, run.status, run.exit_code) == ("warned\n", "error", 3)
    assert (directory / "made.txt").read_text() == "new\n"
    below = box.start_shell("pwd", cwd="..")
    assert (await below.result()).stdout == f"{directory.parent}\n"


async def test_the_output_comes_as_it_is_printed(box: HostSession, directory: Path) -> None:
    live = box.start_shell("echo on; while [ ! -e go ]; do sleep 0.01; done; echo ü")
    assert await printed(live) == "on"
    (directory / "go").touch()
    assert (await live.result()).stdout == "on\nü\n"


@pytest.mark.full_tier
async def test_a_command_that_takes_too_long_ends_with_what_it_started(
    hasty: HostSession,
) -> None:
    live = hasty.start_shell("trap '' INT; sleep 600 & echo $!; wait; sleep 600", timeout=2)
    pid = int(await printed(live))
    run = await live.result()
    assert (run.status, run.exit_code) == ("timeout", 128 + signal.SIGKILL)
    await eventually(lambda: gone(pid))


async def test_what_a_command_left_in_its_group_ends_with_it(box: HostSession) -> None:
    run = await command(box, "sleep 600 & echo $!")
    assert run.ok
    await eventually(lambda: gone(int(run.stdout)))


async def test_a_command_that_is_given_up_ends(hasty: HostSession) -> None:
    live = hasty.start_shell("trap '' INT; echo $$; while :; do sleep 1; done")
    pid = int(await printed(live))
    await hasty.give_up(live)
    assert (await live.result()).status == "interrupted"
    assert gone(pid)


async def test_closing_ends_commands_and_python(directory: Path) -> None:
    box = HostSession(directory, None, GRACE_S)
    shell = box.start_shell("echo $$; sleep 600")
    python = box.start_run("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    pids = [int(await printed(shell)), int(await printed(python))]
    await box.close()
    for live in (shell, python):
        with pytest.raises(Closed):
            await live.result()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(Closed):
        box.start_shell("true")


@pytest.mark.full_tier
async def test_output_has_an_end(box: HostSession) -> None:
    run = await command(box, "yes")
    assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)


async def test_a_directory_that_is_not_there_is_the_run_s_result(box: HostSession) -> None:
    run = await box.start_shell("true", cwd="missing").result()
    assert run.status == "error"
    assert run.error is not None
    assert "No such file" in run.error.value


async def test_python_keeps_its_variables_and_shows_what_it_draws(
    box: HostSession, directory: Path
) -> None:
    (directory / "json.py").write_text("raise SystemExit('imported before the first cell')")
    (directory / "mine.py").write_text("answer = 42")
    assert (await cell(box, "from mine import answer; import os; os.getcwd()")).result == repr(
        str(directory)
    )
    shown = await cell(box, "from IPython.display import display, HTML; display(HTML('<b>'))")
    assert shown.outputs[0]["text/html"] == "<b>"
    failed = await cell(box, "answer / 0")
    assert (failed.status, failed.state_lost) == ("error", False)
    assert failed.error is not None
    assert failed.error.name == "ZeroDivisionError"
    assert (await cell(box, "!echo $((20 + 1))")).stdout.strip() == "21"
    late = await cell(box, "import time; time.sleep(600)", timeout=0.2)
    assert (late.status, late.state_lost) == ("timeout", False)
    assert (await cell(box, "answer")).result == "42"


async def test_python_that_dies_is_started_again_and_says_so(hasty: HostSession) -> None:
    died = await cell(hasty, "x = 1; import os; os._exit(3)")
    assert (died.status, died.cause, died.state_lost) == ("killed", Cause.CRASHED, True)
    live = hasty.start_run(
        "import time\nprint('x' in globals(), flush=True)\n"
        "while True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt: pass"
    )
    assert await printed(live) == "False"
    await hasty.give_up(live)  # it ignores interrupts
    ignored = await live.result()
    assert (ignored.status, ignored.state_lost) == ("interrupted", True)


async def test_a_reply_that_arrives_with_the_kill_reports_the_lost_state(
    hasty: HostSession, directory: Path
) -> None:
    """The reply was reported as if the kernel lived. A race on purpose: the loop stands still from
    the end of the code to the end of the grace period, until the kill and the reply met once."""
    interrupted, go, ended = (directory / name for name in ("interrupted", "go", "ended"))
    code = (
        "import os, time\ntry:\n    print('on', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    open('interrupted', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.001)\nopen('ended', 'w').close()"
    )
    for _ in range(20):
        before = await cell(hasty, "import os; os.getpid()")
        live = hasty.start_run(code, timeout=1)
        assert await printed(live) == "on"
        await eventually(interrupted.exists)
        go.touch()
        time.sleep(2 * SHORT_GRACE_S)  # noqa: ASYNC251 - the stall
        late = await live.result()
        after = await cell(hasty, "import os; os.getpid()")
        assert (late.status, late.state_lost) == ("timeout", before.result != after.result)
        if late.state_lost and ended.exists():
            return
        for path in (interrupted, go, ended):
            path.unlink(missing_ok=True)
    raise AssertionError("the reply never met the kill")


async def test_the_receipt_states_that_no_wall_is_in_force(box: HostSession) -> None:
    assert box.receipt is None
    await cell(box, "1")
    receipt = box.receipt
    assert receipt is not None
    assert (receipt.path, receipt.network, receipt.seccomp) == ("host", "host", {})
    assert (receipt.landlock_abi, receipt.limits) == (0, {})
    assert receipt.namespaces == receipt.host_namespaces
    (wall,) = receipt.walls
    assert (wall["demanded"], wall["weaker"]) == ("none", True)
    assert "no walls" in wall["means"]


@pytest.mark.full_tier
async def test_commands_survive_the_death_of_python(box: HostSession, directory: Path) -> None:
    live = box.start_shell("echo on; while [ ! -e go ]; do sleep 0.01; done; echo off")
    assert await printed(live) == "on"
    died = await cell(box, "import os; os._exit(3)")
    assert died.state_lost
    (directory / "go").touch()
    assert (await live.result()).stdout == "on\noff\n"


async def test_everything_ends_when_the_guest_is_killed(box: HostSession) -> None:
    """Without a PID namespace Linux ends nothing with the supervisor but what asked for it."""
    shell = box.start_shell("echo $$ $PPID; sleep 600")
    pid, supervisor = map(int, (await printed(shell)).split())
    os.kill(supervisor, signal.SIGKILL)
    run = await shell.result()
    assert (run.status, run.cause) == ("killed", Cause.CRASHED)
    await eventually(lambda: gone(pid))


async def test_no_key_of_ours_is_handed_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API_KEY", "SANDBOX_API_KEY", "SBX_AGENT_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-secret")
    monkeypatch.setenv("OTHER", "is there")
    box = HostSession(directory, None, GRACE_S)
    run = await command(box, "env")
    await box.close()
    assert "is there" in run.stdout
    assert "sk-secret" not in run.stdout


async def test_files_are_the_host_s(box: HostSession, directory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.sh"
    assert await box.files.write(str(outside), "echo hi") == 7
    outside.chmod(0o750)
    (directory / "link").symlink_to(outside)
    await box.files.write("link", "echo you")
    assert outside.read_text() == "echo you"
    assert outside.stat().st_mode & 0o777 == 0o750
    assert (directory / "link").is_symlink()
    await box.files.write("a/b/c.txt", b"x")
    await box.files.make_directory("a/d")
    assert await box.files.read_bytes("../work/a/b/c.txt") == b"x"
    assert [entry.name for entry in await box.files.list(max_depth=2)] == ["a", "b", "d", "link"]
    for pattern in ("c.*", "a/b/*"):
        found = await box.files.find(pattern)
        assert [entry.path for entry in found] == [str(directory / "a/b/c.txt")]
    entry = await box.files.stat("link")
    assert (entry.kind, entry.path) == ("symlink", str(directory / "link"))
    os.mkfifo(directory / "fifo")
    for path, error in (("missing", NotFound), ("fifo", InvalidPath), ("a", InvalidPath)):
        with pytest.raises(error):
            await box.files.read_bytes(path)
    with pytest.raises(InvalidPath):
        await box.files.write("a", "x")
    assert names(directory) == ["a", "fifo", "link"]


async def test_results_and_uploads_lie_beside_the_directory(
    box: HostSession, directory: Path
) -> None:
    path = await box.save_result("long.txt", b"all of it")
    assert await box.files.read_bytes(path) == b"all of it"
    upload = await box.uploads.put_bytes("u.csv", b"1,2\n")
    assert (await command(box, f"cat {upload.path}")).stdout == "1,2\n"
    assert names(directory) == []
    await box.close()
    with pytest.raises(NotFound):
        await box.files.read_bytes(path)


async def test_what_no_program_can_be_given_is_refused(box: HostSession) -> None:
    starts: tuple[Callable[[], ActiveRun], ...] = (
        lambda: box.start_shell("echo \0"),
        lambda: box.start_run("1", timeout=0),
        lambda: box.start_script("1", "javascript"),
    )
    for start in starts:
        with pytest.raises(BadRequest):
            start()
    assert (await box.start_script("echo $0", "bash").result()).ok


async def test_many_commands_run_beside_each_other(box: HostSession) -> None:
    marks = [f"m{number}" for number in range(8)]
    all_there = " && ".join(f"[ -e {name} ]" for name in marks)
    wait = f"until {all_there}; do sleep 0.02; done"
    lives = [box.start_shell(f"touch {name}; {wait}; echo {name}") for name in marks]
    runs = await asyncio.gather(*(live.result() for live in lives))
    assert [run.stdout.strip() for run in runs] == marks
