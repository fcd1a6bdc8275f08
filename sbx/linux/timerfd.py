"""An alarm clock that can be waited for like any other descriptor: timerfd_create(2).

Python has it from 3.13 on.
"""

import os
import struct
import time

from sbx.linux import libc

_ITIMERSPEC = struct.Struct("@qqqq")  # struct itimerspec: the interval, then the first time
_S = 1_000_000_000


def create() -> int:
    """A descriptor that is readable once the alarm went off; close-on-exec, non-blocking."""
    return libc.call(
        "timerfd_create", time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK
    )  # TFD_CLOEXEC and TFD_NONBLOCK are these


def go_off_in(timer: int, seconds: float) -> None:
    """Once, in so many seconds (more than 0); forgets what it was set to before."""
    after = divmod(max(1, int(seconds * _S)), _S)
    libc.call("timerfd_settime", timer, 0, _ITIMERSPEC.pack(0, 0, *after), None)


def clear(timer: int) -> bool:
    """Whether it went off since the last call; it is not readable any more."""
    try:
        return bool(os.read(timer, 8))
    except BlockingIOError:
        return False
