"""An attack as a value, and what its outcome means.

An outcome is one word: `ok`, the name of an errno, another exception's or a signal's, `held` where
the code looked and found its wall, `absent` where this linux has nothing to attack; of a whole run
`killed:memory` and its kin, or `timeout`; of an act of the host side the code of its error.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ALWAYS_HELD = frozenset(("EPERM", "EACCES", "ENOSYS", "held", "absent"))
# Neither a wall nor a way through it: this host was short of something, or too old a linux.
_UNCLEAR = frozenset(("EAGAIN", "EINTR", "EIO", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"))


class Class(StrEnum):
    FS = "fs"
    PROC = "proc"
    NET = "net"
    KERNEL = "kernel"
    RESOURCES = "resources"
    SEAL = "seal"
    HOST = "host"
    HOST_EXECUTABLES = "host_executables"


class Outcome(StrEnum):
    HELD = "held"
    ESCAPED = "escaped"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing that code inside tries.

    `layer` is the wall that answers, or the first of several. `held` are the outcomes by which the
    wall is known, beside ALWAYS_HELD. `lone`: only in a child of its own, because it may end or
    change who tries it; where no child can be had, that is what held. `act` is what the host does
    afterwards with what the code has planted, and `narrower` asks for a sandbox of its own, where
    the outcome is that of the whole run.
    """

    name: str
    kind: Class
    layer: str
    code: str
    held: frozenset[str] = frozenset()
    lone: bool = False
    act: tuple[str, ...] = ()
    narrower: Mapping[str, Any] | None = None

    def judge(self, outcome: str) -> Outcome:
        if outcome in self.held or outcome in ALWAYS_HELD:
            return Outcome.HELD
        if outcome in _UNCLEAR or not _is_known(outcome):
            return Outcome.UNCLEAR
        return Outcome.ESCAPED


def _is_known(outcome: str) -> bool:
    """Whether the code came to an end of its own choice, so that the word says something."""
    return outcome in ("ok", "timeout") or outcome in errno.errorcode.values()


def attacks(
    kind: Class,
    layer: str,
    codes: Mapping[str, str],
    held: Sequence[str] = (),
    *,
    lone: bool = False,
) -> tuple[Attack, ...]:
    """Those that share all but their name and code."""
    return tuple(
        Attack(name, kind, layer, code, frozenset(held), lone) for name, code in codes.items()
    )
