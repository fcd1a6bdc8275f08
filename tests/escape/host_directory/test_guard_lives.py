"""The path guard survives all that code inside does: its end would be the end of the jail."""

import errno
import os
import socket
from pathlib import Path

import pytest
from planting import make_place, sandbox

from sbx import Runtime
from sbx.guest import path_guard
from sbx.guest.guarded_calls import Opened, SlowOpen
from sbx.linux import seccomp_notify
from sbx.linux.seccomp_notify import SyscallNotice
from tests.unit.in_child import exit_status

CALL = SyscallNotice(1, 2, 3, ())

ORPHANS = """
import os, subprocess, threading
stop, wrong = False, []
def opens():
    while not stop:
        fd = os.open("f", os.O_WRONLY | os.O_CREAT)
        if fd <= 2: wrong.append(fd)
        else: os.close(fd)
thread = threading.Thread(target=opens)
thread.start()
for _ in range(150):
    subprocess.run(["sh", "-c", "(true &)"])
stop = True
thread.join()
print(wrong)
"""


@pytest.mark.parametrize("started_by", ["cold"], indirect=True, scope="module")
async def test_orphans_that_end_disturb_no_open(
    runtime: Runtime, own_temporary_directory: Path
) -> None:
    """SIGCHLD interrupted the guard, which is PID 1 there, while it gave a descriptor: the open
    returned 0, and the next answer ended the jail."""
    place = make_place(own_temporary_directory / "orphans")
    async with sandbox(runtime, place) as box:
        for _ in range(4):
            run = await box.run(ORPHANS)
            assert (run.stdout, run.error) == ("[]\n", None)


@pytest.mark.parametrize("started_by", ["cold"], indirect=True, scope="module")
async def test_a_fifo_connects_two_programs(
    runtime: Runtime, own_temporary_directory: Path
) -> None:
    place = make_place(own_temporary_directory / "pipe")
    async with sandbox(runtime, place) as box:
        run = await box.shell("mkfifo p; (echo through > p &); cat p; echo more > p & cat < p")
        assert run.stdout == "through\nmore\n", run.text


class Failing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def perform(self, call: SyscallNotice) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "no"), RuntimeError("a bug"), OverflowError(), RecursionError()]
)
@pytest.mark.parametrize("gone", [False, True])
def test_no_error_of_a_call_ends_the_guard(
    monkeypatch: pytest.MonkeyPatch, error: Exception, gone: bool
) -> None:
    answers = []

    def fail(listener: int, call: int, number: int) -> bool:
        answers.append(number)
        if gone:
            raise OSError(errno.EINPROGRESS, "answered already")
        return True

    monkeypatch.setattr(seccomp_notify, "fail", fail)
    path_guard._answer(3, SyscallNotice(1, 2, 3, ()), Failing(error))  # type: ignore[arg-type]
    assert answers == [error.errno if isinstance(error, OSError) else errno.EPERM]


class Answering:
    def __init__(self, answer: Opened | SlowOpen) -> None:
        self._answer = answer

    def perform(self, call: SyscallNotice) -> Opened | SlowOpen:
        return self._answer


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Return the answers that Linux would get: a descriptor as what it is open on."""
    answers: list[tuple[str, object]] = []

    def fail(listener: int, call: int, number: int) -> bool:
        answers.append(("errno", number))
        return True

    def give(listener: int, call: int, fd: int, *, close_on_exec: bool) -> bool:
        answers.append((os.readlink(f"/proc/self/fd/{fd}"), close_on_exec))
        return True

    monkeypatch.setattr(seccomp_notify, "fail", fail)
    monkeypatch.setattr(seccomp_notify, "give_fd", give)
    return answers


def test_slow_open_gives_its_file_and_keeps_no_descriptor(
    answers: list[tuple[str, object]], tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CLOEXEC):
        os.mkfifo(tmp_path / "fifo")
        slow = SlowOpen(os.open(tmp_path / "fifo", os.O_PATH), flags)
        path_guard._open_slowly(3, CALL, slow)
        assert answers.pop() == (str(tmp_path / "fifo"), bool(flags & os.O_CLOEXEC))
        (tmp_path / "fifo").unlink()
    slow = SlowOpen(os.open(tmp_path, os.O_PATH), os.O_WRONLY)
    path_guard._open_slowly(3, CALL, slow)
    assert answers == [("errno", errno.EISDIR)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_slow_open_without_a_task_for_it_is_refused(
    answers: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(path_guard, "start_new_thread", none_left)
    before = len(os.listdir("/proc/self/fd"))
    slow = Answering(SlowOpen(os.open(tmp_path, os.O_PATH), os.O_WRONLY))
    path_guard._answer(3, CALL, slow)  # type: ignore[arg-type]
    assert answers == [("errno", errno.EAGAIN)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_guard_ends_with_the_status_of_the_supervisor_after_it_reaped_orphans() -> None:
    def act() -> None:
        joining, _ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            os._exit(3)
        reading, writing = os.pipe()
        if (supervisor := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(7)
        os.close(writing)
        path_guard.serve(joining, Failing(OSError()), supervisor)  # type: ignore[arg-type]

    assert exit_status(act) == 7


def test_guard_that_cannot_hear_its_socket_ends() -> None:
    def act() -> None:
        path_guard.serve(socket.socket(), Failing(OSError()))  # type: ignore[arg-type]

    assert exit_status(act) == 1
