"""timerfd_create(2): a timer that is a descriptor, so that a process can wait for it like for
others.

Python has these functions since 3.13.
"""

import os
import struct
import time

from sbx.linux import libc

_ITIMERSPEC = struct.Struct("@qqqq")  # struct itimerspec: the interval, then the first time
_S = 1_000_000_000


def create() -> int:
    """Return a descriptor that becomes readable when the timer expires; close-on-exec,
    non-blocking."""
    return libc.call(
        "timerfd_create", time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK
    )  # TFD_CLOEXEC and TFD_NONBLOCK have the same values


def expires_in(timer: int, seconds: float) -> None:
    """Set the timer to expire once, in this many seconds (more than 0); replace an earlier
    setting."""
    after = divmod(max(1, int(seconds * _S)), _S)
    libc.call("timerfd_settime", timer, 0, _ITIMERSPEC.pack(0, 0, *after), None)


def clear(timer: int) -> bool:
    """Return whether the timer has expired since the last call, and make it unreadable again."""
    try:
        return bool(os.read(timer, 8))
    except BlockingIOError:
        return False
