"""prctl(2): what a process decides about itself for good, or about how it ends.

Everything here is about the calling *thread*, and is inherited by what it starts from then on.
"""

from sbx.linux import libc

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39

NAME_MAX_BYTES = 15


def prctl(option: int, *args: int) -> int:
    """Call prctl(2), with 0 for the arguments left out: newer options insist on that."""
    return libc.call("prctl", option, *(*args, 0, 0, 0, 0)[:4])


def set_no_new_privs() -> None:
    """From now on no execve gives privileges: set-id bits and file capabilities do nothing.

    Cannot be undone. Landlock and seccomp demand it of a process without CAP_SYS_ADMIN.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def no_new_privs() -> bool:
    return prctl(_PR_GET_NO_NEW_PRIVS) == 1


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
