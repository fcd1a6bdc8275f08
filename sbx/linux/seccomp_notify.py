"""seccomp_unotify(2): decide on system calls of other processes, which wait for the answer.

A filter answers `bpf.NOTIFY`; the holder of its listener receives the number and the arguments of
the call, and answers with a result, an errno, a new descriptor, or "let it run". What a pointer
leads to is read from the caller's memory and can change at any time. Therefore "let it run" is only
safe where a second restriction (here: Landlock) holds whatever the caller does meanwhile.

Linux 5.9 (SECCOMP_IOCTL_NOTIF_ADDFD). Notifications end with ENOENT when the caller has ended.
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
_GONE = (errno.ENOENT, errno.EINPROGRESS)  # the caller has ended, or has an answer


# The calls that change files by a path, by their numbers; fchmod by a descriptor.
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


class Call(NamedTuple):
    """A call that waits. `thread` is the caller as this process numbers it (a TID)."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def path_calls(machine: str | None = None) -> dict[str, int]:
    """Return the numbers of the calls that change files by a path, on this machine if not named.

    Raises OSError ENOSYS for a machine without a known table.
    """
    machine = machine or os.uname().machine
    try:
        return _PATH_CALLS[machine]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no call numbers are known for {machine}") from None


def receive(listener: int) -> Call | None:
    """Return the next waiting call; None if its caller ended first. Block until there is one."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    call, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return Call(call, thread, number, tuple(arguments))


def succeed(listener: int, call: int, value: int = 0) -> bool:
    """Let the call return `value` without being executed. False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, value, 0, 0))


def fail(listener: int, call: int, number: int) -> bool:
    """Let the call fail with this errno. False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, 0, -number, 0))


def let_run(listener: int, call: int) -> bool:
    """Let Linux execute the call. False if the caller has ended."""
    return _send(listener, _RESPONSE.pack(call, 0, 0, _FLAG_CONTINUE))


def give_fd(listener: int, call: int, fd: int, *, close_on_exec: bool) -> bool:
    """Let the call return a copy of `fd` in the caller. False if the caller has ended.

    Raises OSError: EMFILE if the caller may not open another file.

    Two steps, without SECCOMP_ADDFD_FLAG_SEND: with that flag a signal to this process (SIGCHLD, a
    freezer) that comes before the caller takes the descriptor ends the call of the other with 0,
    and Linux refuses every further answer with EINPROGRESS. A single step that is interrupted had
    no effect.
    """
    flags = os.O_CLOEXEC if close_on_exec else 0
    number = _answer(listener, _ADD_FD, _ADDED_FD.pack(call, 0, fd, 0, flags))
    return number is not None and succeed(listener, call, number)


def _send(listener: int, response: bytes) -> bool:
    return _answer(listener, _SEND, response) is not None


def _answer(listener: int, request: int, argument: bytes) -> int | None:
    """Return the result of the ioctl, or None if no call waits. Repeat it after a signal."""
    while True:
        try:
            return int(fcntl.ioctl(listener, request, bytearray(argument)))
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
