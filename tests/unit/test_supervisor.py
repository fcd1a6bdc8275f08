"""PID 1 of a jail, beside its walls: whom it signals, and what it closes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.guest.start import lockdown
from sbx.linux import landlock

ROOT = Path(__file__).resolve().parents[2]

_INTERRUPT = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from sbx.guest import frames
from sbx.guest.supervisor import children, pid1
kernel_pid, kernel_fd = map(int, sys.argv[2:])
supervising = pid1.Supervisor(
    socket.socketpair()[0], kernel_pid, {}, children.OomScore()
)
supervising.watch_kernel(kernel_fd)
supervising._obey(frames.RawFrame("interrupt", {}))
"""


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, which ends by the first interrupt."""
    with subprocess.Popen(
        [sys.executable, "-Ic", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def interrupted(process: subprocess.Popen[bytes], kernel_fd: int) -> bool:
    """Whether an interrupt of the kernel of this number and pidfd is one of `process`."""
    numbers = (str(ROOT), str(process.pid), str(kernel_fd))
    command = [sys.executable, "-Ic", _INTERRUPT, *numbers]
    subprocess.run(command, check=True, pass_fds=[kernel_fd])
    process.communicate()  # what was not interrupted reads to the end of its input
    return process.returncode != 0


def test_an_interrupt_reaches_a_kernel_that_another_process_reaps(
    waiting: subprocess.Popen[bytes],
) -> None:
    kernel_fd = os.pidfd_open(waiting.pid)
    assert interrupted(waiting, kernel_fd)
    os.close(kernel_fd)


def test_an_interrupt_spares_who_has_the_number_of_a_kernel_that_ended(
    waiting: subprocess.Popen[bytes],
) -> None:
    ended = subprocess.Popen(["true"])
    kernel_fd = os.pidfd_open(ended.pid)
    ended.wait()
    assert not interrupted(waiting, kernel_fd)
    os.close(kernel_fd)


@pytest.mark.needs("landlock")
def test_a_domain_that_cannot_be_made_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(landlock, "_add_rule", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no memory"):
        lockdown.ruleset({"read": ["/usr"], "write": [], "devices": [], "guarded": []})
    assert len(os.listdir("/proc/self/fd")) == len(before)
