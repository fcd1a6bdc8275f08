"""seccomp_unotify(2): decide on system calls of other processes, which wait for the decision.

A filter returns `bpf.NOTIFY`. The process that holds its listener receives the number and the
arguments of the call. It replies with a result, an errno, a new descriptor, or permission to
continue. The memory behind a pointer argument belongs to the caller and can change at any time.
Therefore it is safe to let a call continue only if a second restriction (here: Landlock) applies
whatever the caller does in the meantime.

Linux 5.9 (SECCOMP_IOCTL_NOTIF_ADDFD). Notifications fail with ENOENT when the caller has ended.
"""

import errno
import fcntl
import os
import struct
from typing import NamedTuple

_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_ADDED_FD = struct.Struct("=QIIII")
_FLAG_CONTINUE = 1
_GONE = (errno.ENOENT, errno.EINPROGRESS)  # the caller has ended, or has its reply already


# The numbers of the calls that change files by a path. fchmod uses a descriptor.
_PATH_CALLS = {
    "x86_64": {
        "open": 2, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86,
        "unlink": 87, "symlink": 88, "chmod": 90, "fchmod": 91, "mknod": 133, "openat": 257,
        "mkdirat": 258, "mknodat": 259, "unlinkat": 263, "renameat": 264, "linkat": 265,
        "symlinkat": 266, "fchmodat": 268, "renameat2": 316, "fchmodat2": 452,
    },
    "aarch64": {
        "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
        "truncate": 45, "fchmod": 52, "fchmodat": 53, "openat": 56, "renameat2": 276,
        "fchmodat2": 452,
    },
}  # fmt: skip


class SyscallNotice(NamedTuple):
    """A waiting call. `thread` is the TID of the caller in the PID namespace of this process."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def path_calls(machine: str | None = None) -> dict[str, int]:
    """Return the numbers of the calls that change files by a path; by default for this machine.

    Raise OSError ENOSYS for a machine without a table.
    """
    machine = machine or os.uname().machine
    try:
        return _PATH_CALLS[machine]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no call numbers are known for {machine}") from None


def receive(listener: int) -> SyscallNotice | None:
    """Block until a call waits and return it; None if its caller has ended first."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    call, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return SyscallNotice(call, thread, number, tuple(arguments))


def succeed(listener: int, call: int, value: int = 0) -> bool:
    """Let the call return `value` without executing it. Return False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, value, 0, 0))


def fail(listener: int, call: int, number: int) -> bool:
    """Let the call fail with this errno. Return False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, 0, -number, 0))


def let_run(listener: int, call: int) -> bool:
    """Let Linux execute the call. Return False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, 0, 0, _FLAG_CONTINUE))


def give_fd(listener: int, call: int, fd: int, *, close_on_exec: bool) -> bool:
    """Let the call return a copy of `fd` in the caller. Return False if the caller has ended.

    Raise OSError: EMFILE if the caller may not open another file.

    This takes two steps, without SECCOMP_ADDFD_FLAG_SEND. With that flag, a signal to this process
    (SIGCHLD, a freezer) that arrives before the caller takes the descriptor ends the caller's call
    with the result 0, and Linux refuses every further reply with EINPROGRESS. A single step that is
    interrupted has no effect.
    """
    flags = os.O_CLOEXEC if close_on_exec else 0
    number = _answer(listener, _ADD_FD, _ADDED_FD.pack(call, 0, fd, 0, flags))
    return number is not None and succeed(listener, call, number)


def _send(listener: int, response: bytes) -> bool:
    return _answer(listener, _SEND, response) is not None


def _answer(listener: int, request: int, argument: bytes) -> int | None:
    """Return the result of the ioctl, or None if no call waits. Repeat the ioctl after a signal."""
    while True:
        try:
            return int(fcntl.ioctl(listener, request, bytearray(argument)))
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
