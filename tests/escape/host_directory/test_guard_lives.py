"""The path guard survives all that code inside does: its end would be the end of the jail."""

import errno
from pathlib import Path

import pytest
from planting import make_place, sandbox

from sbx import Runtime
from sbx.guest import path_guard
from sbx.linux import seccomp_notify
from sbx.linux.seccomp_notify import Call

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

    def perform(self, call: Call) -> None:
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
    path_guard._answer(3, Call(1, 2, 3, ()), Failing(error))  # type: ignore[arg-type]
    assert answers == [error.errno if isinstance(error, OSError) else errno.EPERM]
