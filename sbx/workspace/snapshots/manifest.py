"""Compare the content of a tree at two moments. Pure functions.

A file is unchanged if its inode and its ctime are the same: code inside cannot set a ctime back. If
they differ, or are not reliable, a digest of the content decides.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sbx.protocol.changes import ChangeBudget
from sbx.protocol.dry_runs import ChangeKind

Kind = Literal["file", "directory", "symlink", "special"]
Relative = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileNode:
    """One entry of a tree.

    `mode` excludes the set-id bits. `size` and `mtime_ns` are set for files, `text` for symlinks.
    The kind `special` means FIFOs, sockets and devices, which are never copied. `identity` is the
    inode and the ctime in ns; compare it within one tree only. For files, `set_id` has the set-id
    bits, which no commit sets, and `links` is the number of hard links.
    """

    kind: Kind
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    text: bytes | None = None
    identity: tuple[int, int] = field(default=(0, 0), compare=False)
    sha256: bytes | None = field(default=None, compare=False)
    set_id: int = field(default=0, compare=False)
    links: int = field(default=1, compare=False)

    def same_content(self, other: "FileNode") -> bool:
        """Return whether both are files with the same content, by their digests or identities."""
        if self.kind != "file" or other.kind != "file" or self.size != other.size:
            return False
        if self.sha256 is not None and other.sha256 is not None:
            return self.sha256 == other.sha256
        return self.identity == other.identity


Nodes = Mapping[str, FileNode]  # by path relative to the top, with / between names


@dataclass(frozen=True, slots=True)
class Manifest:
    """A tree at one moment.

    `left_out` has the paths of special files and of files and directories that cannot be read. The
    content of an unreadable directory is unknown. Each write after `until_ns` has a later ctime.
    """

    nodes: Nodes
    left_out: tuple[str, ...] = ()
    until_ns: int = 0

    @property
    def unseen(self) -> list[str]:
        """Return the paths that were left out because they cannot be read."""
        nodes = self.nodes
        return [
            path for path in self.left_out if path not in nodes or nodes[path].kind != "special"
        ]


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """The change of one path.

    A path that changes its kind has two changes: a removal and then an addition. `content` is False
    if only the mode or the mtime of a file differs.
    """

    path: str
    before: FileNode | None
    after: FileNode | None
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
    def node(self) -> FileNode:
        """Return the node after the change; for a removal, the node before it."""
        node = self.after or self.before
        assert node is not None
        return node


def relative(path: str) -> Relative:
    return tuple(path.split("/"))


def _in_order(path: str) -> str:
    """Return a key that sorts as `relative` does, with a hundredth of its memory for deep paths."""
    return path.replace("/", "\0")


def changes(before: Nodes, after: Nodes) -> list[PlannedChange]:
    """Return the changes from `before` to `after`, sorted by path: directories come first."""
    changed: list[PlannedChange] = []
    for path in sorted(before.keys() | after.keys(), key=_in_order):
        was, becomes = before.get(path), after.get(path)
        if was is None or becomes is None:
            changed.append(PlannedChange(path, was, becomes))
        elif was.kind != becomes.kind:
            changed += (PlannedChange(path, was, None), PlannedChange(path, None, becomes))
        elif was.kind != "file":
            if was != becomes:
                changed.append(PlannedChange(path, was, becomes))
        elif not was.same_content(becomes):
            changed.append(PlannedChange(path, was, becomes))
        elif was != becomes:
            changed.append(PlannedChange(path, was, becomes, content=False))
    return changed


def with_specials(after: Nodes, before: Nodes) -> Nodes:
    """Return the nodes of a changed copy together with the special files, which are never copied.

    A special file disappears with its directory. It stays unless the copy has its name.
    """
    kept = dict(after)
    for path, node in before.items():
        if node.kind == "special" and path not in after:
            above = path.rpartition("/")[0]
            if not above or ((parent := kept.get(above)) and parent.kind == "directory"):
                kept[path] = node
    return kept


def excluding(changed: Sequence[PlannedChange], spared: Iterable[str]) -> list[PlannedChange]:
    """Return the changes that leave the `spared` paths, and everything below them, in place.

    The content below a spared path is unknown in one of the two trees.
    """
    names = set(spared)
    above: set[str] = set()
    for path in names:
        while (path := path.rpartition("/")[0]) and path not in above:
            above.add(path)
    stay = {change.path for change in changed if change.after is None and change.path in above}
    remaining: list[PlannedChange] = []
    for change in changed:
        if change.path in names or change.path.rpartition("/")[0] in names:
            names.add(change.path)
        elif change.path not in stay:
            remaining.append(change)
    return remaining


def missed(changed: Sequence[PlannedChange], manifest: Manifest) -> list[str]:
    """Return the paths that would be removed only because they were moved during the survey.

    The survey of `manifest` saw no node with that inode. But the file existed at that time: its
    ctime is not later than the end of the survey.
    """
    seen = {node.identity[0] for node in manifest.nodes.values()}
    return [
        change.path
        for change in changed
        if change.after is None
        and change.node.kind != "directory"
        and change.node.identity[0] not in seen
        and change.node.identity[1] <= manifest.until_ns
    ]


def needs_digest(before: Nodes, after: Nodes) -> list[str]:
    """Return the files that need a comparison of their content."""
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
) -> dict[str, FileNode]:
    """Return the nodes with the digests of these files, as far as `digest` can compute them."""
    digested = dict(nodes)
    for path in paths:
        if digested[path].sha256 is None:
            digested[path] = replace(digested[path], sha256=digest(path))
    return digested


def within(changed: Iterable[PlannedChange], allowances: Sequence[ChangeBudget]) -> bool:
    """Return whether every change is within one of these allowances.

    A change counts for the allowance of the deepest directory above it, and of several for one
    directory, for the first. A new symlink is within only if its target, read as text, lies below
    one of them as well.
    """
    tops = {_top(allowance): allowance for allowance in reversed(allowances)}
    counts = dict.fromkeys(tops, 0)
    for change in changed:
        name = change.relative
        above = (name[:depth] for depth in range(len(name), -1, -1))
        top = next((path for path in above if path in tops), None)
        if top is None or not (change.after is None or _stays(change, list(tops))):
            return False
        counts[top] += 1
        allowance = tops[top]
        if allowance.files is not None and counts[top] > allowance.files:
            return False
        if change.after is None and not allowance.deletions:
            return False
    return True


def _top(allowance: ChangeBudget) -> Relative:
    return relative(allowance.below) if allowance.below else ()


def _below(name: Relative, tops: Sequence[Relative]) -> bool:
    return any(name[: len(top)] == top for top in tops)


def _stays(change: PlannedChange, tops: Sequence[Relative]) -> bool:
    text = change.after.text if change.after is not None else None
    if text is None:
        return True
    if text.startswith(b"/"):
        return False
    parts = [
        part for part in text.decode("utf-8", "surrogateescape").split("/") if part not in ("", ".")
    ]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    above = change.relative[:-1]
    if up > len(above) or ".." in parts[up:]:  # after a name, which may be a symlink itself
        return False
    return _below((*above[: len(above) - up], *parts[up:]), tops)
