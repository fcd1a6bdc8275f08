"""Shell commands: beside a busy cell, in the same walls, with an exit code as their verdict."""

import asyncio
from collections.abc import Iterator

import pytest

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox, Status
from sbx.errors import BadRequest, InvalidPath, TooLarge
from sbx.protocol.runs import Cause, RunEnd, Stdout


@pytest.fixture(scope="module")
def shell() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box
    sbx.close()


@pytest.mark.full_tier
def test_what_a_command_writes_and_how_it_ends(shell: Sandbox) -> None:
    run = shell.shell("echo out; echo err >&2; exit 3")
    assert (run.status, run.exit_code) == ("error", 3)
    assert (run.stdout, run.stderr) == ("out\n", "err\n")
    assert (run.execution_count, run.result, run.outputs) == (None, None, ())
    run = shell.shell("true")
    assert (run.status, run.exit_code, run.text) == ("ok", 0, "")


@pytest.mark.parametrize(("command", "code"), [("kill -TERM $$", 143), ("no-such-thing", 127)])
def test_a_death_by_signal_counts_as_in_a_shell(shell: Sandbox, command: str, code: int) -> None:
    run = shell.shell(command)
    assert (run.status, run.exit_code) == ("error", code)


def test_a_command_works_in_the_workspace_as_the_user_inside(shell: Sandbox) -> None:
    shell.files.write("dir/x", "")
    assert shell.shell("pwd; whoami; id -u").stdout == "/workspace\nsandbox\n1000\n"
    assert shell.shell("ls", cwd="dir").stdout == "x\n"
    assert shell.shell("pwd", cwd="/tmp").stdout == "/tmp\n"


def test_a_directory_that_is_not_there_is_the_command_s_failure(shell: Sandbox) -> None:
    run = shell.shell("true", cwd="nowhere")
    assert (run.status, run.exit_code) == ("error", 126)
    assert "/workspace/nowhere" in run.stderr


def test_git_does_not_wait_for_an_editor(shell: Sandbox) -> None:
    """It started vim, which waited for a terminal up to the time-out of the command."""
    new = "cd $(mktemp -d); git init -q; git config user.name a; git config user.email a@b; "
    run = shell.shell(f"{new} git commit --allow-empty", timeout=20)
    assert (run.status, run.exit_code) == ("error", 1), run.stderr
    assert "EDITOR" in run.stderr
    assert shell.shell(f"{new} git commit -qm m --allow-empty; git log --format=%s").text == "m\n"


def test_environment_is_the_command_s_own(shell: Sandbox) -> None:
    assert shell.shell("echo $A-$USER", env={"A": "1 é"}).stdout == "1 é-sandbox\n"
    assert shell.shell("echo $A").stdout == "\n"


def test_stdin_is_given_and_ends(shell: Sandbox) -> None:
    assert shell.shell("cat", stdin="hé\n").stdout == "hé\n"
    assert shell.shell("wc -c", stdin="x" * 3_000_000).stdout == "3000000\n"
    assert shell.shell("cat; echo end").stdout == "end\n"
    assert shell.shell("true", stdin="x" * 1_000_000).ok


def test_bytes_that_are_no_text_are_replaced_and_characters_never_cut(shell: Sandbox) -> None:
    assert shell.shell(r"printf 'a\xffb'").stdout == "a\ufffdb"
    run = shell.shell(r"printf '\xc3'; sleep 0.1; printf '\xa9'")
    assert run.stdout == "é"


def test_a_command_runs_beside_a_busy_cell_and_sees_its_files(shell: Sandbox) -> None:
    for event in shell.stream("open('mark', 'w').close()\nprint('busy')\nwhile True: pass"):
        if isinstance(event, Stdout) and "busy" in event.text:
            assert shell.shell("ls mark").stdout == "mark\n"
            assert shell.interrupt()
    assert isinstance(event, RunEnd)
    assert event.run.status == "interrupted"


async def test_commands_run_beside_each_other(box: AsyncSandbox) -> None:
    """Each waits for the file of the next one: in turn they would never end."""
    waits = "touch {0}; until [ -e {1} ]; do sleep 0.01; done"
    runs = await asyncio.gather(
        *(box.shell(waits.format(n, (n + 1) % 4), timeout=55) for n in range(4))
    )
    assert [run.exit_code for run in runs] == [0] * 4


async def test_command_and_kernel_cannot_signal_each_other(box: AsyncSandbox) -> None:
    pid = (await box.run("import os; os.getpid()")).result
    assert "not permitted" in (await box.shell(f"kill -9 {pid}")).stderr
    assert "not permitted" in (await box.shell("kill -9 1")).stderr
    assert (await box.run("2")).result == "2"


@pytest.mark.full_tier
def test_a_time_out_interrupts_the_command_and_keeps_the_kernel(shell: Sandbox) -> None:
    shell.run("kept = 1")
    run = shell.shell("echo begun; sleep 50", timeout=2)
    assert (run.status, run.stdout) == ("timeout", "begun\n")
    assert (run.state_lost, shell.run("kept").result) == (False, "1")


@pytest.mark.full_tier
def test_a_command_that_ignores_the_interrupt_is_killed(shell: Sandbox) -> None:
    shell.run("kept = 2")
    run = shell.shell("trap '' INT; while :; do sleep 0.1; done", timeout=0.5)
    assert (run.status, run.exit_code) == (Status.TIMEOUT, 137)
    assert shell.run("kept").result == "2"


def test_a_process_left_behind_does_not_hold_the_command(shell: Sandbox) -> None:
    run = shell.shell("sleep 300 & echo started", timeout=55)
    assert (run.status, run.stdout) == ("ok", "started\n")


async def test_many_processes_left_behind_do_not_end_pid_1(runtime: Runtime) -> None:
    """Each holds two of its descriptors until it ends; once, the first open beyond the limit was
    the end of PID 1, and with it of the kernel."""
    box = await runtime.create(narrower={"limits": {"open_files": 64}})
    await box.run("kept = 1")
    runs = [await box.shell("sleep 60 &") for _ in range(40)]
    assert runs[-1].error is not None
    assert "open files" in runs[-1].error.value
    assert (await box.run("kept")).result == "1"


async def test_output_beyond_the_limit_ends_the_command(box: AsyncSandbox) -> None:
    await box.run("kept = 3")
    run = await box.shell("yes")
    assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)
    assert len(run.stdout) <= box.policy.limits.output_max
    assert (await box.run("kept")).result == "3"


def test_events_of_a_command_come_live(shell: Sandbox) -> None:
    for event in shell.stream_shell("echo ready; until [ -e go ]; do sleep 0.01; done", timeout=55):
        if event == Stdout("ready\n"):
            shell.files.write("go", "")
    assert isinstance(event, RunEnd)
    assert event.run.exit_code == 0


async def test_a_cancelled_command_is_interrupted(box: AsyncSandbox) -> None:
    code = "trap 'touch heard; exit' INT; touch ready; while :; do sleep 0.1; done"
    running = asyncio.create_task(box.shell(code, timeout=60))
    assert (await box.shell("until [ -e ready ]; do sleep 0.05; done", timeout=60)).ok
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await box.shell("until [ -e heard ]; do sleep 0.05; done", timeout=60)).ok


@pytest.mark.parametrize(
    ("command", "more", "code"),
    [
        ("echo \0", {}, "invalid_code"),
        ("echo \udc80", {}, "invalid_code"),
        ("cat", {"stdin": "\udc80"}, "invalid_code"),
        ("pwd", {"cwd": "\udc80"}, "invalid_code"),
        ("env", {"env": {"A": "\udc80"}}, "invalid_env"),
        ("env", {"env": {"A": 5}}, "invalid_env"),
        ("env", {"env": {"A=B": "x"}}, "invalid_env"),
        ("env", {"env": {"": "x"}}, "invalid_env"),
        ("env", {"env": {"A": "\0"}}, "invalid_env"),
    ],
)
def test_what_no_command_can_be(
    shell: Sandbox, command: str, more: dict[str, str], code: str
) -> None:
    """Once, some of these were told as failures of sbx itself."""
    with pytest.raises(BadRequest) as raised:
        shell.shell(command, **more)  # type: ignore[arg-type]
    assert (raised.value.code, bool(raised.value.hint)) == (code, True)


@pytest.mark.full_tier
def test_what_is_too_long_for_a_command(shell: Sandbox) -> None:
    assert shell.shell("#" + "x" * ((128 << 10) - 2)).ok
    with pytest.raises(TooLarge):
        shell.shell("#" + "x" * ((128 << 10) - 1))
    with pytest.raises(TooLarge):
        shell.shell("cat", stdin="x" * (9 << 20))
    with pytest.raises(InvalidPath):
        shell.shell("pwd", cwd="a\0b")
