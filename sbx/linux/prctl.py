"""prctl(2): what a process decides about itself for good, or about how it ends.

Everything here is about the calling *thread*, and is inherited by what it starts from then on.
"""

import ctypes
from collections.abc import Iterable
from itertools import repeat

from sbx.linux import libc

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39

NAME_MAX_BYTES = 15

_prctl = libc.function("prctl", ctypes.c_int, *[ctypes.c_ulong] * 4)


def prctl(option: int, *args: int) -> int:
    """Call prctl(2), with 0 for the arguments left out: newer options insist on that."""
    answer = _prctl(option, *(*args, 0, 0, 0, 0)[:4])
    if answer == -1:
        raise libc.error("prctl")
    return answer


def prctl_each(option: int, values: Iterable[int]) -> None:
    """`prctl(option, value)` for each of them, up to the first that fails; without a loop in
    Python, which would take four times as long."""
    zero = repeat(0)
    if -1 in map(_prctl, repeat(option), values, zero, zero, zero):
        raise libc.error("prctl")


def set_no_new_privs() -> None:
    """From now on no execve gives privileges: set-id bits and file capabilities do nothing.

    Cannot be undone. Landlock and seccomp demand it of a process without CAP_SYS_ADMIN.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def no_new_privs() -> bool:
    return prctl(_PR_GET_NO_NEW_PRIVS) == 1


def set_keep_capabilities(keep: bool) -> None:
    """Whether this thread's permitted capabilities outlive a change from uid 0 to others. The
    effective ones never do. An execve forgets it."""
    prctl(_PR_SET_KEEPCAPS, int(keep))


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same uid may look into this one (ptrace, /proc/PID/mem, core).

    Without it root owns the files of /proc/self, so that a process which shall write its own
    uid_map has to be dumpable.
    """
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_name(name: str) -> None:
    """Name this thread as ps(1) shows it; longer than `NAME_MAX_BYTES` bytes is cut."""
    libc.call("prctl", _PR_SET_NAME, name.encode(), 0, 0, 0)


def set_parent_death_signal(signal: int) -> None:
    """Be sent `signal` when the *thread* that started this process ends; 0 for none.

    A parent that starts processes from a thread pool therefore kills them at random. A parent that
    died before this call sends nothing: compare getppid(2) afterwards.
    """
    prctl(_PR_SET_PDEATHSIG, signal)


def set_child_subreaper(subreaper: bool) -> None:
    """Whether orphaned descendants become children of this process instead of PID 1's."""
    prctl(_PR_SET_CHILD_SUBREAPER, int(subreaper))
