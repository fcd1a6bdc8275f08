"""The watchdog: a process that can kill another one for a service that gave up the right to do so.

    service (dropped) ──pipe──► watchdog (root) ──pidfd──► broker, or project server (root, or of
                                                           another uid)

A service that was started as root cannot signal its broker after it has dropped root's rights. A
broker that hangs, or is stopped, does not see the end of its socket either. A parent-death signal
does not help: Linux checks the rights of the parent that ends, which are the dropped ones.

The service writes one byte to have the process killed at once. If it closes the pipe, or ends, the
process has `GRACE_S` to end by itself. The watchdog ends with the process that it watches. It knows
no other process and reads nothing else, so an attacker in the service gains only a right that
the service has already: to end its broker.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0
_END_S = 5.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from sbx.isolation.broker.watchdog import main; main(int(sys.argv[2]), float(sys.argv[3]))"
)


class Watchdog:
    """The service's side. Start it with the rights to kill `process`, a child of this process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        pidfd = os.pidfd_open(process.pid)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_ROOT, str(pidfd), str(GRACE_S)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(pidfd,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
            os.close(pidfd)

    def kill(self) -> None:
        with suppress(OSError):  # closed, or ended together with the process
            os.write(self._writing, b"k")

    def close(self) -> None:
        """Wait for the end of the watchdog, when the process that it watches has ended."""
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)
        self._process.wait(_END_S)


def kill(process: "subprocess.Popen[bytes]", watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.kill()
    with suppress(PermissionError):  # which is why there is a watchdog
        process.kill()


def end(process: "subprocess.Popen[bytes]", watchdog: Watchdog | None, end_s: float) -> None:
    """Wait for a child that ends by itself, and kill it if it has not ended after `end_s`."""
    if not _ends_within(process, end_s):
        kill(process, watchdog)
    process.wait(_END_S)
    if watchdog is not None:
        watchdog.close()


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for the end of a child by its pidfd: `Popen.wait` with a time-out is 15 ms late."""
    if process.poll() is not None:
        return True
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def main(victim: int, grace_s: float) -> None:
    """Watch the process of this pidfd. The other end of the pipe at fd 0 is the service's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process, and not before
    poll = select.poll()
    poll.register(victim, select.POLLIN)
    poll.register(0, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if victim not in ready and not os.read(0, 1):
        poll.unregister(0)
        ready = {fd for fd, _ in poll.poll(grace_s * 1000)}
    if victim not in ready:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(victim, signal.SIGKILL)
