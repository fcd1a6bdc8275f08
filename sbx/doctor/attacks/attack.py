"""An attack as a value, and the meaning of its outcomes.

An outcome is one word. For code inside: `ok`; the name of an errno, an exception or a signal;
`held` if the code found its wall; `absent` if this Linux has nothing to attack. For a whole run:
`killed:memory` and similar, or `timeout`. For an action of the host: the code of its error.

A refusal proves a wall only if the same act succeeds where it is allowed. Therefore each attack has
controls in the same sandbox (`probe_program.controls_of`). If one of them fails, the attack was not
tried.
"""

import errno
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

ALWAYS_HELD = frozenset(("EPERM", "EACCES", "ENOSYS", "held"))
# Neither a wall nor a way through it: this host is short of a resource, or its Linux is too old.
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
    NOT_TRIED = "not tried"
    NOT_APPLICABLE = "does not apply"


class Attack(Struct, frozen=True):
    """One attack of code inside.

    `layer` is the wall that stops it, or the first of several. `expected` are the outcomes that
    prove the wall, in addition to ALWAYS_HELD. A `lone` attack has its own child process, because
    it may end or change this process; a policy without processes stops it by that. `act` is the
    later action of the host on the planted file. `narrower` requests a separate sandbox, and then
    the outcome is that of the whole run.
    """

    name: str
    kind: Class
    layer: str
    code: str
    expected: frozenset[str] = frozenset()
    lone: bool = False
    act: tuple[str, ...] = ()
    narrower: Mapping[str, Any] | None = None

    def judge(self, outcome: str) -> Outcome:
        if outcome == "absent":
            return Outcome.NOT_APPLICABLE
        # An attack of the class seal only looks: an error means that it could not.
        refused = outcome in self.expected or outcome in ALWAYS_HELD
        if outcome == "held" or (refused and self.kind is not Class.SEAL):
            return Outcome.HELD
        if outcome in _UNCLEAR or not _is_known(outcome):
            return Outcome.UNCLEAR
        return Outcome.ESCAPED


def _is_known(outcome: str) -> bool:
    """Return whether the code ended by itself, so that its outcome has a meaning."""
    return outcome in ("ok", "timeout") or outcome in errno.errorcode.values()


def attacks(
    kind: Class,
    layer: str,
    codes: Mapping[str, str],
    expected: Sequence[str] = (),
    *,
    lone: bool = False,
) -> tuple[Attack, ...]:
    """Return attacks that differ only in their name and code."""
    return tuple(
        Attack(name, kind, layer, code, frozenset(expected), lone) for name, code in codes.items()
    )
