"""The child processes of PID 1: which of them dies first, their signals, their exit status."""

import os
import signal

from sbx.linux import prctl

OOM_SUPERVISOR, OOM_KERNEL, OOM_COMMAND = 0, 500, 700  # added to the score that PID 1 started with


class OomScore:
    """Decides which process dies first if memory is short: a command, then the kernel, then PID 1.

    A child inherits its parent's score at the fork. /proc/self/oom_score_adj is opened while that
    is still allowed. Without privilege, the score may not be set below the host's value (systemd's
    user sessions start at 100, some pods at 1000): proc_pid_oom_score_adj(5).
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._base_score = int(os.read(self._fd, 16))

    def set(self, above: int) -> None:
        os.pwrite(self._fd, str(min(self._base_score + above, 1000)).encode(), 0)

    def close(self) -> None:
        os.close(self._fd)


def end_with(supervisor: int) -> None:
    """Let Linux kill this child of the supervisor if the supervisor is killed."""
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def outcome(status: int) -> dict[str, int]:
    code = os.waitstatus_to_exitcode(status)
    return {"code": code} if code >= 0 else {"signal": -code}


def signal_group(pid: int, number: int) -> None:
    """Signal a child that is not reaped yet, or was just seen alive, so its pid is not reused."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, number)
