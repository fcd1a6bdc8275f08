"""prctl(2): settings of a process that are permanent, or that apply when the process ends.

All functions affect the calling *thread*. Processes and threads that it starts later inherit the
settings.
"""

import ctypes
from collections.abc import Iterable
from itertools import repeat

from sbx.linux import libc

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39

_prctl = libc.function("prctl", ctypes.c_int, *[ctypes.c_ulong] * 4)


def prctl(option: int, *args: int) -> int:
    """Call prctl(2), with 0 for missing arguments: newer options require this."""
    result = _prctl(option, *(*args, 0, 0, 0, 0)[:4])
    if result == -1:
        raise libc.error("prctl")
    return result


def prctl_each(option: int, values: Iterable[int]) -> None:
    """Call `prctl(option, value)` for each value, and stop at the first failure.

    A loop in Python would take four times as long.
    """
    zero = repeat(0)
    if -1 in map(_prctl, repeat(option), values, zero, zero, zero):
        raise libc.error("prctl")


def set_no_new_privs() -> None:
    """Prevent every later execve from gaining privileges by set-id bits or file capabilities.

    This cannot be undone. Landlock and seccomp require it of a process without CAP_SYS_ADMIN.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def no_new_privs() -> bool:
    return prctl(_PR_GET_NO_NEW_PRIVS) == 1


def set_keep_capabilities(keep: bool) -> None:
    """Set whether this thread keeps its permitted capabilities when its uid changes from 0.

    The effective capabilities never survive this change. An execve resets the setting.
    """
    prctl(_PR_SET_KEEPCAPS, int(keep))


def set_dumpable(dumpable: bool) -> None:
    """Set whether processes of the same uid may inspect this one (ptrace, /proc/PID/mem, core).

    The files of /proc/self of a process that is not dumpable belong to root. Therefore a process
    must be dumpable to write its own uid_map.
    """
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_parent_death_signal(signal: int) -> None:
    """Receive `signal` when the *thread* that started this process ends; 0 for no signal.

    A parent that starts processes from a thread pool therefore kills them at random. A parent that
    died before this call sends no signal: compare getppid(2) afterwards.
    """
    prctl(_PR_SET_PDEATHSIG, signal)


def set_child_subreaper(subreaper: bool) -> None:
    """Set whether orphaned descendants become children of this process instead of PID 1."""
    prctl(_PR_SET_CHILD_SUBREAPER, int(subreaper))
