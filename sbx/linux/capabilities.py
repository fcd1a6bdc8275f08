"""capabilities(7): the five sets of the calling thread, and how to be rid of them for good.

The sets belong to a thread, not to a process: a thread started earlier keeps its own. So drop them
while there is only one.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

from sbx.linux import libc
from sbx.linux.prctl import prctl, prctl_each

_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_IS_SET = 1
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_VERSION_3 = 0x20080522  # 64 bits a set, as two words of 32

CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_FOWNER = 3
CAP_SETPCAP = 8
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21


class Sets(NamedTuple):
    """Bit masks; bit n is the capability number n of capabilities(7)."""

    effective: int
    permitted: int
    inheritable: int
    bounding: int
    ambient: int


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Word(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def effective() -> int:
    """The capabilities this thread may use now, as a bit mask."""
    return _capget()[0]


def current() -> Sets:
    """All five sets of this thread, read from linux."""
    known = range(last() + 1)
    return Sets(
        *_capget(),
        bounding=_bounding(),
        ambient=sum(prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_IS_SET, cap) << cap for cap in known),
    )


def drop_all() -> None:
    """Empty all five sets of this thread, so that not even an execve of uid 0 refills them.

    Needs CAP_SETPCAP when anything is left in the bounding set, and raises PermissionError without
    it, having dropped nothing. A fresh user namespace gives it, with all others, over itself.
    """
    empty_bounding()  # first: it needs a capability that the rest takes away
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), (_Word * 2)())


def empty_bounding() -> None:
    """Let no execve give this thread, or what it starts, a capability.

    Raises PermissionError without CAP_SETPCAP, having dropped nothing, unless nothing is left.
    """
    try:
        prctl_each(_PR_CAPBSET_DROP, range(last() + 1))
    except PermissionError:
        if _bounding():  # asked only now: to read it takes as long as to drop all
            raise


def keep_only(kept: int) -> None:
    """Leave this thread the capabilities of the mask `kept`, which it must have permitted: they are
    permitted and effective then, and neither inheritable nor ambient, so no child gets them."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    words = (_Word * 2)()
    for index, word in enumerate(words):
        word.effective = word.permitted = kept >> 32 * index & 0xFFFFFFFF
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), words)


def make_effective(used: int) -> None:
    """Use those of the mask `used` that are permitted to this thread, and no others. Seteuid to 0
    makes all of them effective again."""
    _, permitted, inheritable = _capget()
    words = (_Word * 2)()
    for index, word in enumerate(words):
        word.effective = (used & permitted) >> 32 * index & 0xFFFFFFFF
        word.permitted = permitted >> 32 * index & 0xFFFFFFFF
        word.inheritable = inheritable >> 32 * index & 0xFFFFFFFF
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), words)


def _bounding() -> int:
    """One file instead of a call for each capability."""
    with open("/proc/thread-self/status", "rb") as lines:
        return next(int(line[7:], 16) for line in lines if line.startswith(b"CapBnd:"))


def _capget() -> tuple[int, int, int]:
    low, high = words = (_Word * 2)()
    libc.call("capget", ctypes.byref(_Header(_VERSION_3, 0)), words)
    return (
        low.effective | high.effective << 32,
        low.permitted | high.permitted << 32,
        low.inheritable | high.inheritable << 32,
    )


@functools.cache
def last() -> int:
    """The highest capability this linux knows: 40 since 5.9, and the next one comes some day."""
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text())
