"""What a commit is about to do to each name, so told that somebody else can undo it; pure.

Nothing says how far a commit came: that is seen in the tree. What is made for a name lies in the
stage until it has the name, what had the name before lies there from then on, and each of the two
is known by its inode.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sbx.workspace.changes import Change, Node


@dataclass(frozen=True, slots=True)
class Intent:
    """`old` is the inode of what has the name now, `new` that of what was made for it; 0 is none.
    `mode` are the permission bits of the directory that has the name now. `serial` is no other's.
    """

    serial: int
    change: Change
    old: int = 0
    mode: int = 0o700
    new: int = 0

    @property
    def made(self) -> bytes:
        """Its name in the stage, of what is to come."""
        return b"%d" % self.serial

    @property
    def aside(self) -> bytes:
        """The name in the stage of what was there."""
        return b"%d.old" % self.serial

    @property
    def again(self) -> bytes:
        """The name in the stage of a directory that is to take the place of a removed one."""
        return b"%d.again" % self.serial

    @property
    def is_directory(self) -> bool:
        return self.change.node.kind == "directory"


def in_order(intents: Sequence[Intent]) -> list[tuple[str, Intent]]:
    """The steps that do all of it. A directory can be written while it lasts, and is there before
    what lies in it; what undoes them is done from the last to the first."""
    directories = sorted(
        (one for one in intents if one.is_directory), key=lambda one: one.change.relative
    )
    others = [one for one in intents if not one.is_directory]
    return [
        *_steps("lift", directories, lambda change: change.before is not None),
        *_steps("take away", others, lambda change: change.kind == "removed"),
        *_steps("remove", reversed(directories), lambda change: change.kind == "removed"),
        *_steps("put", directories, lambda change: change.kind == "added"),
        *_steps("put", others, lambda change: change.kind == "added"),
        *_steps("replace", others, lambda change: change.kind == "changed" and change.content),
        *_steps("stamp", others, lambda change: change.kind == "changed" and not change.content),
        *_steps("set mode", reversed(directories), lambda change: change.after is not None),
    ]


def _steps(
    act: str, intents: Iterable[Intent], does: Callable[[Change], bool]
) -> list[tuple[str, Intent]]:
    return [(act, one) for one in intents if does(one.change)]


def to_json(intents: Iterable[Intent]) -> list[Any]:
    """What undoing needs of them, and no more."""
    return [
        [
            one.serial,
            one.change.path,
            _node_to_json(one.change.before),
            _node_to_json(one.change.after),
            one.change.content,
            one.old,
            one.mode,
            one.new,
        ]
        for one in intents
    ]


def from_json(told: Iterable[Any]) -> list[Intent]:
    """Raises ValueError, TypeError or LookupError for what `to_json` never made."""
    return [
        Intent(
            serial, Change(path, _node(before), _node(after), content), old=old, mode=mode, new=new
        )
        for serial, path, before, after, content, old, mode, new in told
    ]


def _node_to_json(node: Node | None) -> list[Any] | None:
    return None if node is None else [node.kind, node.mode, node.size, node.mtime_ns]


def _node(told: list[Any] | None) -> Node | None:
    if told is None:
        return None
    kind, mode, size, mtime_ns = told
    return Node(kind, mode, size, mtime_ns)
