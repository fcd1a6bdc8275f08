"""The intents of a commit: its step for each path, with the facts that undoing needs. Pure.

No record has the progress of a commit: the tree and the stage show it. The new node of a path is in
the stage until it is put into place. The old node is in the stage from then on. Each of them is
recognized by its inode.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sbx.workspace.snapshots.manifest import FileNode, PlannedChange


@dataclass(frozen=True, slots=True)
class JournalStep:
    """The intent for one path.

    `old` is the inode of the current node, and `new` the inode of the new node; 0 means no node.
    `mode` has the permission bits of the current directory. `serial` is unique in its commit.
    """

    serial: int
    change: PlannedChange
    old: int = 0
    mode: int = 0o700
    new: int = 0

    @property
    def new_name(self) -> bytes:
        """Return the name of the new node in the stage."""
        return b"%d" % self.serial

    @property
    def aside(self) -> bytes:
        """Return the name of the old node in the stage."""
        return b"%d.old" % self.serial

    @property
    def again(self) -> bytes:
        """Return the name in the stage of a directory that will replace a removed one."""
        return b"%d.again" % self.serial

    @property
    def is_directory(self) -> bool:
        return self.change.node.kind == "directory"


def in_order(intents: Sequence[JournalStep]) -> list[tuple[str, JournalStep]]:
    """Return the steps of a commit, in their order; undoing reverses them.

    Directories are made writable first. A directory is created before its content, and removed
    after it.
    """
    directories = sorted(
        (intent for intent in intents if intent.is_directory),
        key=lambda intent: intent.change.relative,
    )
    others = [intent for intent in intents if not intent.is_directory]
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
    action: str, intents: Iterable[JournalStep], does: Callable[[PlannedChange], bool]
) -> list[tuple[str, JournalStep]]:
    return [(action, intent) for intent in intents if does(intent.change)]


def to_json(intents: Iterable[JournalStep]) -> list[Any]:
    """Return the facts that undoing needs."""
    return [
        [
            intent.serial,
            intent.change.path,
            _node_to_json(intent.change.before),
            _node_to_json(intent.change.after),
            intent.change.content,
            intent.old,
            intent.mode,
            intent.new,
        ]
        for intent in intents
    ]


def from_json(data: Iterable[Any]) -> list[JournalStep]:
    """Return the steps. Raise ValueError, TypeError or LookupError for data that `to_json` cannot
    produce."""
    return [
        JournalStep(
            serial,
            PlannedChange(path, _node(before), _node(after), content),
            old=old,
            mode=mode,
            new=new,
        )
        for serial, path, before, after, content, old, mode, new in data
    ]


def _node_to_json(node: FileNode | None) -> list[Any] | None:
    return None if node is None else [node.kind, node.mode, node.size, node.mtime_ns]


def _node(data: list[Any] | None) -> FileNode | None:
    if data is None:
        return None
    kind, mode, size, mtime_ns = data
    return FileNode(kind, mode, size, mtime_ns)
