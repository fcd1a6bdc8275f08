"""seccomp(2): a classic BPF program that Linux runs for every system call.

A filter cannot be removed. Processes inherit it across fork and execve. Of several filters, the
strictest result applies. `install` does not need libseccomp. Only `syscall_number`, which builds
filters on a developer's machine, reads the tables of libseccomp (through pyseccomp).
"""

import ctypes
import errno
import functools
import os

from sbx.linux import libc

INSTRUCTION_BYTES = 8
MAX_INSTRUCTIONS = 4096

_NR_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
_GET_ACTION_AVAIL = 2
_FLAG_TSYNC = 1
_FLAG_NEW_LISTENER = 8
_FLAG_WAIT_KILLABLE = 32  # Linux 5.19: only a fatal signal interrupts a waiting call
_KILL_PROCESS = ctypes.c_uint32(0x80000000)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install(program: bytes, *, all_threads: bool = False) -> None:
    """Apply `program` (an array of struct sock_filter) to this thread and all threads it starts.

    With `all_threads`, apply it to every thread of the process or to none: raise OSError (ESRCH) if
    one of them has a filter that this thread does not have. Raise OSError EACCES without
    no_new_privs, and EINVAL for a program that Linux rejects. Raise ValueError for bytes that
    cannot be a program.
    """
    count, rest = divmod(len(program), INSTRUCTION_BYTES)
    if rest or not 0 < count <= MAX_INSTRUCTIONS:
        raise ValueError(f"{len(program)} bytes cannot be a seccomp program")
    refused_by = libc.syscall(
        "seccomp",
        _number(),
        _SET_MODE_FILTER,
        _FLAG_TSYNC if all_threads else 0,
        ctypes.byref(_Program(count, program)),
    )
    if refused_by:  # with TSYNC a failure returns the thread that could not follow, not -1
        raise OSError(errno.ESRCH, f"seccomp: thread {refused_by} has a different filter")


def install_with_listener(program: bytes) -> int:
    """Install `program` as `install` does; return the fd of its listener (seccomp_unotify(2)).

    A call for which the program returns `bpf.NOTIFY` waits until the process that holds the
    listener has decided (`sbx.linux.seccomp_notify`). It fails with ENOSYS once no process holds
    the fd. Raise OSError: EBUSY if a filter of this thread has a listener already.
    """
    filter_ = _Program(len(program) // INSTRUCTION_BYTES, program)
    arguments = ("seccomp", _number(), _SET_MODE_FILTER)
    try:
        flags = _FLAG_NEW_LISTENER | _FLAG_WAIT_KILLABLE
        return libc.syscall(*arguments, flags, ctypes.byref(filter_))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return libc.syscall(*arguments, _FLAG_NEW_LISTENER, ctypes.byref(filter_))


@functools.cache
def supported() -> bool:
    """Return whether this Linux has filters, and can kill a whole process by one (4.14)."""
    try:
        libc.syscall("seccomp", _number(), _GET_ACTION_AVAIL, 0, ctypes.byref(_KILL_PROCESS))
    except OSError:
        return False
    return True


def syscall_number(name: str, machine: str) -> int | None:
    """Return the number of the call `name` on `machine`.

    Return None if the call does not exist there or libseccomp is too old. Raise ImportError or
    RuntimeError without pyseccomp or libseccomp.
    """
    import pyseccomp

    arch = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[machine]
    number: int = pyseccomp.resolve_syscall(arch, name)
    return number if number >= 0 else None


def _number() -> int:
    machine = os.uname().machine
    try:
        return _NR_SECCOMP[machine]
    except KeyError:
        raise OSError(errno.ENOSYS, f"seccomp: no number is known for {machine}") from None
