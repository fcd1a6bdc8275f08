"""capabilities(7): read the five sets of the calling thread, and drop them permanently.

The sets belong to a thread and not to a process: a thread that was started earlier keeps its own.
Therefore drop capabilities while the process has only one thread.
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

_VERSION_3 = 0x20080522  # each set has 64 bits, in two words of 32 bits

CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_FOWNER = 3
CAP_SETPCAP = 8
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21


class CapabilitySets(NamedTuple):
    """Bit masks: bit n is the capability number n of capabilities(7)."""

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
    """Return the effective capabilities of this thread as a bit mask."""
    return _capget()[0]


def current() -> CapabilitySets:
    """Read all five sets of this thread from Linux."""
    capabilities = range(last() + 1)
    return CapabilitySets(
        *_capget(),
        bounding=_bounding(),
        ambient=sum(
            prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_IS_SET, cap) << cap for cap in capabilities
        ),
    )


def drop_all() -> None:
    """Empty all five sets of this thread, so that not even an execve by uid 0 refills them.

    Needs CAP_SETPCAP if the bounding set is not empty. Without it, raise PermissionError and drop
    nothing. A new user namespace gives its creator CAP_SETPCAP, and all other capabilities, over
    that namespace.
    """
    empty_bounding()  # first, because it needs a capability that the next calls drop
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), (_Word * 2)())


def empty_bounding() -> None:
    """Prevent every later execve of this thread and its children from gaining a capability.

    Without CAP_SETPCAP, raise PermissionError and drop nothing, unless the bounding set is already
    empty.
    """
    try:
        prctl_each(_PR_CAPBSET_DROP, range(last() + 1))
    except PermissionError:
        if _bounding():  # read it only now: reading takes as long as dropping all
            raise


def keep_only(kept: int) -> None:
    """Leave this thread only the capabilities of the mask `kept`, which must be permitted already.

    They become permitted and effective. The inheritable and ambient sets become empty, so that no
    child gets them.
    """
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    words = (_Word * 2)()
    for index, word in enumerate(words):
        word.effective = word.permitted = kept >> 32 * index & 0xFFFFFFFF
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), words)


def make_effective(used: int) -> None:
    """Make exactly those capabilities of the mask `used` effective that this thread has permitted.

    A later seteuid to 0 makes all permitted capabilities effective again.
    """
    _, permitted, inheritable = _capget()
    words = (_Word * 2)()
    for index, word in enumerate(words):
        word.effective = (used & permitted) >> 32 * index & 0xFFFFFFFF
        word.permitted = permitted >> 32 * index & 0xFFFFFFFF
        word.inheritable = inheritable >> 32 * index & 0xFFFFFFFF
    libc.call("capset", ctypes.byref(_Header(_VERSION_3, 0)), words)


def _bounding() -> int:
    """Read the bounding set from one file instead of one call for each capability."""
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
    """Return the highest capability of this Linux: 40 since 5.9. Later versions may add more."""
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text())
