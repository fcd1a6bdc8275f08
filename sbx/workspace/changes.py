"""What a tree held at two moments, and how they differ; pure.

A file is known to be unchanged by its inode and the time of its last change, which code inside
cannot set back; where these say otherwise, or cannot say, by a digest of its content.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from sbx.protocol.rehearsals import ChangeKind

Kind = Literal["file", "directory", "symlink"]
Relative = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One name of a tree. `mode` without set-id bits; `size` and `mtime_ns` of files, `text` of
    symlinks. `identity` is inode and ctime in ns, to be compared within one tree only."""

    kind: Kind
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    text: bytes | None = None
    identity: tuple[int, int] = field(default=(0, 0), compare=False)
    sha256: bytes | None = field(default=None, compare=False)

    def holds_what(self, other: "Node") -> bool:
        """Whether both are files with the same content, as far as can be told without reading."""
        if self.kind != "file" or other.kind != "file" or self.size != other.size:
            return False
        if self.sha256 is not None and other.sha256 is not None:
            return self.sha256 == other.sha256
        return self.identity == other.identity


Nodes = Mapping[str, Node]  # by path relative to the top, with / between names


@dataclass(frozen=True, slots=True)
class Manifest:
    """A tree at one moment. `left_out`: what is there and is neither file, directory nor symlink,
    or cannot be read."""

    nodes: Nodes
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What is to become of one name. One that becomes another kind of thing is two: first it is
    removed, then added. `content` is False where only mode or mtime of a file differ."""

    path: str
    before: Node | None
    after: Node | None
    content: bool = True

    @property
    def relative(self) -> Relative:
        return relative(self.path)

    @property
    def kind(self) -> ChangeKind:
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def node(self) -> Node:
        """Afterwards, or what it was where it is removed."""
        found = self.after or self.before
        assert found is not None
        return found


def relative(path: str) -> Relative:
    return tuple(path.split("/"))


def changes(before: Nodes, after: Nodes) -> list[Change]:
    """How the one becomes the other, by path, directories before what lies in them."""
    found: list[Change] = []
    for path in sorted(before.keys() | after.keys(), key=relative):
        was, becomes = before.get(path), after.get(path)
        if was is None or becomes is None:
            found.append(Change(path, was, becomes))
        elif was.kind != becomes.kind:
            found += (Change(path, was, None), Change(path, None, becomes))
        elif was.kind != "file":
            if was != becomes:
                found.append(Change(path, was, becomes))
        elif not was.holds_what(becomes):
            found.append(Change(path, was, becomes))
        elif was != becomes:
            found.append(Change(path, was, becomes, content=False))
    return found


def doubtful(before: Nodes, after: Nodes) -> list[str]:
    """The files of which only their content can tell whether it has changed."""
    return [
        path
        for path in before.keys() & after.keys()
        if (was := before[path]).kind == (becomes := after[path]).kind == "file"
        and was.size == becomes.size
        and was.identity != becomes.identity
        and (was.sha256 is None or becomes.sha256 is None)
    ]


def with_digests(
    nodes: Nodes, paths: Iterable[str], digest: Callable[[str], bytes | None]
) -> dict[str, Node]:
    """The same, with the digests of these files where `digest` can give them."""
    known = dict(nodes)
    for path in paths:
        if known[path].sha256 is None:
            known[path] = replace(known[path], sha256=digest(path))
    return known
