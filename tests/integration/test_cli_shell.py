"""`sbx shell`, driven by pexpect as a person would: against a service, and without one."""

import os
import re
import shutil
import signal
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import psutil
import pytest
import serving
from command import COMMAND, environment
from serving import Service

from tests.tiers import rows

pytestmark = pytest.mark.core
WAIT_S = 60.0
PROMPT = "sbx:[^ ]*[$#] "


@pytest.fixture
def sandbox(service: Service) -> Iterator[str]:
    made = service.quick("create", "--json")
    assert made.returncode == 0, made.stderr
    name = re.search(r'"id": "([^"]+)"', made.stdout)
    assert name is not None
    yield name[1]
    service.quick("rm", name[1])


@contextmanager
def shell(
    *words: str | Path, size: tuple[int, int] = (24, 80), **env: str
) -> Iterator["pexpect.spawn[bytes]"]:
    """`sbx shell` on a pty of the test's own."""
    command, *first = COMMAND
    child = pexpect.spawn(
        command,
        [*first, "shell", *map(str, words)],
        env=environment(TERM="xterm-256color", **env),
        dimensions=size,
        timeout=WAIT_S,
        maxread=1 << 16,
    )
    child.delaybeforesend = None
    try:
        yield child
    finally:
        child.close(force=True)


@contextmanager
def attached(
    service: Service, *words: str, **more: tuple[int, int]
) -> Iterator["pexpect.spawn[bytes]"]:
    with shell(*words, SBX_SOCKET=str(service.socket), **more) as child:  # type: ignore[arg-type]
        yield child


@contextmanager
def below_a_shell(*words: str, **env: str) -> Iterator["pexpect.spawn[bytes]"]:
    """A command of sbx below a shell, which leads the session, as in a user's terminal.

    Linux hangs a terminal up when the leader of its session ends. The shell waits for a line, runs
    the command, waits for another line, and prints the exit code.
    """
    script = 'read -r _; "$@"; code=$?; read -r _; echo "the exit code is $code"'
    child = pexpect.spawn(
        "/bin/sh",
        ["-c", script, "sh", *COMMAND, *words],
        env=environment(TERM="xterm-256color", **env),
        timeout=WAIT_S,
    )
    child.delaybeforesend = None
    try:
        yield child
    finally:
        child.close(force=True)


def ended(child: "pexpect.spawn[bytes]") -> int:
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus is not None
    return int(child.exitstatus)


def modes(child: "pexpect.spawn[bytes]") -> list[object]:
    return list(termios.tcgetattr(child.child_fd))


def left_by(child: "pexpect.spawn[bytes]") -> int:
    """Press the key that detaches; the exit code."""
    child.send(b"\x1d")
    return ended(child)


def test_a_shell_a_repl_and_ctrl_c(service: Service, sandbox: str) -> None:
    with attached(service, sandbox) as child:
        child.expect(PROMPT)
        child.sendline("python3 -q || python -q")
        child.expect(">>> ")
        child.sendline("6 * 7")
        child.expect("42")
        child.expect(">>> ")
        child.sendline("while True: pass\n")
        time.sleep(0.3)
        child.send(b"\x03")
        child.expect("KeyboardInterrupt")
        child.sendline("exit()")
        child.expect(PROMPT)
        child.sendline("exit 7")
        assert ended(child) == 7


def test_a_resize_reaches_who_runs_inside(service: Service, sandbox: str) -> None:
    with attached(service, sandbox, size=(30, 90)) as child:
        child.expect(PROMPT)
        child.sendline("stty size")
        child.expect("30 90")
        answer = "trap 'echo new size: $(stty size)' WINCH; echo wait''ing"
        child.sendline(f'bash -c "{answer}; while sleep 0.05; do :; done"'.replace("$", r"\$"))
        child.expect("waiting")
        child.setwinsize(41, 123)
        child.expect("new size: 41 123")


@pytest.mark.skipif(shutil.which("vi") is None, reason="this host has no vi")
def test_vi_draws_and_leaves_the_screen(service: Service, sandbox: str) -> None:
    with attached(service, sandbox) as child:
        child.expect(PROMPT)
        child.sendline("vi -u NONE notes.txt")
        child.expect("notes.txt")
        child.send(b"iwritten in vi\x1b:wq\r")
        child.expect(PROMPT)
        child.sendline("cat notes.txt | tr a-z A-Z")
        child.expect("WRITTEN IN VI")


@pytest.mark.full_tier
def test_ten_megabytes_arrive(service: Service, sandbox: str) -> None:
    with attached(service, sandbox) as child:
        child.expect(PROMPT)
        child.sendline("seq 1 1400000; echo all of'' it")
        child.expect("all of it", timeout=60)
        assert child.before is not None
        assert len(child.before) > 10_000_000
        assert b"1399999\r\n1400000\r\n" in child.before
        child.sendline("echo still here")
        child.expect("still here\r\n")


def test_one_that_detaches_finds_its_screen_again(service: Service, sandbox: str) -> None:
    with attached(service, sandbox) as first:
        first.expect(PROMPT)
        first.sendline("for n in $(seq 1000); do echo line $n; done; secret=kept")
        first.expect("line 1000")
        first.expect(PROMPT)
        assert left_by(first) == 0
    with attached(service, sandbox) as second:
        second.expect("line 999")
        second.sendline("echo $secret")
        second.expect("kept")


def test_a_client_that_vanishes_leaves_its_terminal(service: Service, sandbox: str) -> None:
    with attached(service, sandbox) as first:
        first.expect(PROMPT)
        opened = service.quick("shell", sandbox, "--list", "--json")
        (name,) = re.findall(r'"id": "(term-[0-9a-f]+)"', opened.stdout)
        first.sendline("echo before; sleep 1; echo aft''er")
        first.expect("before")
        os.kill(first.pid, signal.SIGKILL)
    with attached(service, sandbox, "--new") as other:
        other.expect(PROMPT)
        other.sendline("echo other lives")
        other.expect("other lives\r\n")
        listed = service.quick("shell", sandbox, "--list", "--json")
        assert len(re.findall(r'"id": "term-', listed.stdout)) == 2
        with attached(service, sandbox, "--terminal", name) as again:
            again.expect("before")
            again.expect("after")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_caller_s_terminal_is_restored(
    service: Service, sandbox: str, number: signal.Signals
) -> None:
    with below_a_shell("shell", sandbox, SBX_SOCKET=str(service.socket)) as child:
        before = modes(child)
        child.sendline("")
        child.expect(PROMPT)
        child.sendline(r"printf '\033[?1049h\033[?25l'; echo raw''now")
        child.expect("rawnow")
        assert modes(child) != before
        [command] = psutil.Process(child.pid).children()
        command.send_signal(number)
        child.expect(re.escape(b"\x1b[?1049l"))
        deadline = time.monotonic() + 60
        while modes(child) != before:
            assert time.monotonic() < deadline, "the terminal stays raw"
            time.sleep(0.02)
        child.sendline("")
        child.expect(f"the exit code is {128 + number}\r")


@pytest.mark.parametrize("number", rows([signal.SIGTERM, signal.SIGKILL], ci_tier=[signal.SIGKILL]))
def test_a_service_that_ends_is_said_and_the_terminal_restored(number: signal.Signals) -> None:
    with serving.service() as other:
        name = re.search(r'"id": "([^"]+)"', other.quick("create", "--json").stdout)
        assert name is not None
        with attached(other, name[1]) as child:
            before = modes(child)
            child.expect(PROMPT)
            other.process.send_signal(number)
            child.expect("connection was lost|service ended|its kernel ended")
            assert ended(child) in (3, 137)
            assert modes(child) == before
            other.process.wait(WAIT_S)


@pytest.mark.needs("memory")  # which strict has as a hard wall
def test_a_policy_without_processes_refuses(service: Service) -> None:
    made = service.quick("create", "--policy", "strict", "--json")
    name = re.search(r'"id": "([^"]+)"', made.stdout)
    assert name is not None
    with attached(service, name[1]) as child:
        child.expect("does not offer shell|does not allow processes")
        assert ended(child) == 3


def test_without_a_terminal_it_says_what_to_do(service: Service, sandbox: str) -> None:
    said = service.quick("shell", sandbox)
    assert said.returncode == 2
    assert "not a terminal" in said.stderr
    assert "sbx exec --shell" in said.stderr


def test_json_opens_one_and_lists_it(service: Service, sandbox: str) -> None:
    opened = service.quick("shell", sandbox, "--json", "-c", "echo hello; sleep 60")
    assert opened.returncode == 0, opened.stderr
    assert '"running": true' in opened.stdout
    listed = service.quick("shell", sandbox, "--list")
    assert "echo hello; sleep 60" in listed.stdout


def test_embedded_without_a_service() -> None:
    with shell("--policy", "default", SBX_SOCKET="/nowhere") as child:
        before = modes(child)
        child.expect(PROMPT)
        child.sendline("echo $((40 + 2)) > f; cat f; exit 5")
        child.expect("42")
        assert ended(child) == 5
        assert modes(child) == before


def test_what_would_retitle_the_caller_s_window_does_not_pass(
    service: Service, sandbox: str
) -> None:
    with attached(service, sandbox) as child:
        child.expect(PROMPT)
        child.sendline(r"printf '\033]0;pwned\007\033]52;c;cHduZWQ=\007\033[21t[%s]\n' end")
        child.expect(re.escape("[end]"))
        assert child.before is not None
        assert b"\x1b]" not in child.before
        assert b"\x1b[21t" not in child.before
