"""What a tree held at two moments, and how they differ; pure.

A file is known to be unchanged by its inode and the time of its last change, which code inside
cannot set back; where these say otherwise, or cannot say, by a digest of its content.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sbx.protocol.rehearsals import ChangeKind

Kind = Literal["file", "directory", "symlink", "special"]
Relative = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One name of a tree. `mode` without set-id bits; `size` and `mtime_ns` of files, `text` of
    symlinks; `special` are FIFOs, sockets and devices, which are never copied. `identity` is inode
    and ctime in ns, to be compared within one tree only. Of files: `set_id` are the bits that no
    commit sets, and `links` is the number of names that the file has."""

    kind: Kind
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    text: bytes | None = None
    identity: tuple[int, int] = field(default=(0, 0), compare=False)
    sha256: bytes | None = field(default=None, compare=False)
    set_id: int = field(default=0, compare=False)
    links: int = field(default=1, compare=False)

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
    """A tree at one moment. `left_out`: what is there and is no file, directory or symlink, or
    cannot be read; of a directory that cannot, nothing below it is known. Whatever is written after
    `until_ns` has a later ctime."""

    nodes: Nodes
    left_out: tuple[str, ...] = ()
    until_ns: int = 0

    @property
    def unseen(self) -> list[str]:
        """What was left out because it cannot be read."""
        nodes = self.nodes
        return [
            path for path in self.left_out if path not in nodes or nodes[path].kind != "special"
        ]


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


def _in_order(path: str) -> str:
    """Sorts as `relative` does, which would take a hundred times the memory for deep paths."""
    return path.replace("/", "\0")


def changes(before: Nodes, after: Nodes) -> list[Change]:
    """How the one becomes the other, by path, directories before what lies in them."""
    found: list[Change] = []
    for path in sorted(before.keys() | after.keys(), key=_in_order):
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


def with_specials(after: Nodes, before: Nodes) -> Nodes:
    """What a copy became, with what is never copied: a special file goes with its directory, and
    stays while it has its name."""
    kept = dict(after)
    for path, node in before.items():
        if node.kind == "special" and path not in after:
            above = path.rpartition("/")[0]
            if not above or ((parent := kept.get(above)) and parent.kind == "directory"):
                kept[path] = node
    return kept


def sparing(changed: Sequence[Change], spared: Iterable[str]) -> list[Change]:
    """Those of `changes` that leave the `spared` names, and whatever lies below them, where they
    are. One of the two trees knows nothing of what lies below a spared name."""
    names = set(spared)
    above: set[str] = set()
    for path in names:
        while (path := path.rpartition("/")[0]) and path not in above:
            above.add(path)
    stay = {one.path for one in changed if one.after is None and one.path in above}
    left: list[Change] = []
    for one in changed:
        if one.path in names or one.path.rpartition("/")[0] in names:
            names.add(one.path)
        elif one.path not in stay:
            left.append(one)
    return left


def missed(changed: Sequence[Change], known: Manifest) -> list[str]:
    """What would be removed only because it was moved about while `known` was looked at: nothing of
    that inode was seen, and yet it was there, as it has not changed since."""
    seen = {node.identity[0] for node in known.nodes.values()}
    return [
        one.path
        for one in changed
        if one.after is None
        and one.node.kind != "directory"
        and one.node.identity[0] not in seen
        and one.node.identity[1] <= known.until_ns
    ]


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


def within(changed: Iterable[Change], prefixes: Sequence[str]) -> bool:
    """Return whether every change lies at or below one of these relative paths. A new symlink
    counts only if its target, read as text, lies below one of them as well."""
    tops = [relative(prefix) for prefix in prefixes]
    return all(
        _below(one.relative, tops) and (one.after is None or _stays(one, tops)) for one in changed
    )


def _below(name: Relative, tops: Sequence[Relative]) -> bool:
    return any(name[: len(top)] == top for top in tops)


def _stays(one: Change, tops: Sequence[Relative]) -> bool:
    text = one.after.text if one.after is not None else None
    if text is None:
        return True
    if text.startswith(b"/"):
        return False
    parts = [
        part for part in text.decode("utf-8", "surrogateescape").split("/") if part not in ("", ".")
    ]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    above = one.relative[:-1]
    if up > len(above) or ".." in parts[up:]:  # after a name, which may be a symlink itself
        return False
    return _below((*above[: len(above) - up], *parts[up:]), tops)
