"""Ctrl-C, a second one, SIGTERM, and a terminal that answers."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from command import family, started

STUBBORN = """
import time
print('ready', flush=True)
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print('no', flush=True)
"""


def ended_by(process: "subprocess.Popen[bytes]", *signals: signal.Signals) -> tuple[int, str]:
    """Wait for `ready`, send the signals; nothing of it may live on after the last one."""
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    everyone = family(process)
    assert len(everyone) >= 4  # the command, the broker, PID 1 and the kernel at least
    for number in signals:
        process.send_signal(number)
        if len(signals) > 1:
            process.stdout.readline()  # the code has seen it
    assert psutil.wait_procs(everyone[1:], timeout=60)[1] == []
    return process.wait(60), process.stderr.read().decode()


def test_ctrl_c_interrupts_the_cell_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    with started("run", "-c", code, env={"TMPDIR": str(tmp_path)}) as process:
        exit_code, said = ended_by(process, signal.SIGINT)
    assert exit_code == 130
    assert "KeyboardInterrupt" in said
    assert said.endswith("error: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_a_cell_that_ignores_ctrl_c_is_killed(tmp_path: Path) -> None:
    with started("run", "-c", STUBBORN, env={"TMPDIR": str(tmp_path)}) as process:
        assert ended_by(process, signal.SIGINT) == (130, "error: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_a_second_ctrl_c_kills_at_once() -> None:
    with started("run", "-c", STUBBORN) as process:
        assert ended_by(process, signal.SIGINT, signal.SIGINT)[0] == 130


def test_ctrl_c_ends_a_shell_script() -> None:
    with started("run", "--shell", "-c", "trap '' INT; echo ready; sleep 60") as process:
        assert ended_by(process, signal.SIGINT) == (130, "error: interrupted\n")


def test_sigterm_kills_and_cleans_up(tmp_path: Path) -> None:
    with started("run", "-c", STUBBORN, env={"TMPDIR": str(tmp_path)}) as process:
        assert ended_by(process, signal.SIGTERM) == (143, "error: ended by SIGTERM\n")
    assert os.listdir(tmp_path) == []


def test_the_result_of_an_interrupted_run_is_in_the_json() -> None:
    with started("run", "--events", "-c", STUBBORN) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        next(line for line in lines if b'"ready' in line)
        process.send_signal(signal.SIGINT)
        assert b'"status": "interrupted"' in list(lines)[-1]
        assert process.wait(60) == 130


@pytest.mark.parametrize("delay_s", [0.4, 0.6, 0.8])
def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    with started("run", "-c", "input()", env={"TMPDIR": str(tmp_path)}) as process:
        time.sleep(delay_s)  # the moment is the point: wherever the start has come to by then
        everyone = family(process)
        process.send_signal(signal.SIGINT)
        assert psutil.wait_procs(everyone[1:], timeout=60)[1] == []
        assert process.wait(60) in (130, -signal.SIGINT, 1)
    assert os.listdir(tmp_path) == []


@contextmanager
def at_a_terminal(code: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The command with a terminal for stdin, stdout; our end of it."""
    ours, its = pty.openpty()
    terminal = {"TERM": "xterm", "NO_COLOR": ""}
    try:
        with (
            os.fdopen(its, "wb", closefd=False) as stdout,
            started("run", "-c", code, env=terminal, stdin=its, stdout=stdout) as process,
        ):
            os.close(its)
            yield process, ours
    finally:
        os.close(ours)


def read_until(fd: int, end: bytes) -> bytes:
    got = b""
    while end not in got:
        assert select.select([fd], [], [], 60)[0], got
        got += os.read(fd, 4096)
    return got


def test_input_is_asked_at_the_terminal() -> None:
    with at_a_terminal("name = input('name? ')\nprint('hello', name)") as (process, ours):
        assert process.stderr is not None
        assert process.stderr.read(6) == b"name? "
        os.write(ours, b"Ada\n")
        read_until(ours, b"hello Ada")
        assert process.wait(60) == 0


def test_a_password_is_not_echoed() -> None:
    code = "from getpass import getpass\nprint(len(getpass()))"
    with at_a_terminal(code) as (process, ours):
        assert process.stderr is not None
        assert process.stderr.read(10) == b"Password: "
        os.write(ours, b"secret\n")
        assert b"secret" not in read_until(ours, b"6")
        assert process.wait(60) == 0


def test_ctrl_d_is_the_end_of_input() -> None:
    code = "try: input('? ')\nexcept EOFError: print('ended')"
    with at_a_terminal(code) as (process, ours):
        assert process.stderr is not None
        assert process.stderr.read(2) == b"? "
        os.write(ours, b"\x04")
        read_until(ours, b"ended")


def test_a_terminal_gets_colours_and_no_other_sequence() -> None:
    code = r"print('\x1b[31mred \x1b]0;title\x07\x1b[2Jend')"
    with at_a_terminal(code) as (process, ours):
        shown = read_until(ours, b"end")
        assert process.wait(60) == 0
    assert b"\x1b[31mred \\x1b]0;title\\x07\\x1b[2Jend" in shown
