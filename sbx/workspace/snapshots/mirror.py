"""Keep a copy of a tree for many uses, and bring it up to date before each use.

    restore   make the copy equal to the original
    compare   return the changes in the copy that are not in the original yet
    accept    record that a commit has made these changes in the original, too

The code that uses the copy may write to it at any time. Therefore sbx does not trust the copy: a
comparison reads it again, and `freezing.take` copies the content before a commit. The comparison is
with the original. It uses inode and ctime of the copy only to skip a file whose content was
compared after that ctime.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sbx.linux import stamps
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import settle
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import (
    FileNode,
    Manifest,
    Nodes,
    PlannedChange,
    changes,
    excluding,
    needs_digest,
    relative,
    with_digests,
    with_specials,
)
from sbx.workspace.snapshots.scan import Bounds, ScanScope, TreeScan, digest, look, node_at
from sbx.workspace.tree import Tree

_NOWHERE = (-1, -1)  # the identity of no file


class Mirror:
    """The nodes of the copy and the original when both were equal.

    `base` has the identities of the original, `copied` those of the copy.
    """

    def __init__(self, base: Manifest, copied: Manifest, scope: ScanScope) -> None:
        self.base: dict[str, FileNode] = dict(base.nodes)
        self.left_out = base.left_out
        self.scope = scope
        self._copied: dict[str, FileNode] = dict(copied.nodes)
        self._seen: Nodes = {}
        self._settled_ns = 0

    def restore(self, original: Tree, copy: Tree, journal: Journal, bounds: Bounds) -> None:
        """Make the copy equal to the original, whichever of them changed.

        Raises the errors of `commit`, and TooLarge `workspace_too_large`.
        """
        changed, _ = self.compare(original, copy, bounds)
        survey = TreeScan(original, self.scope, bounds)
        now = look(original, self.scope, bounds)
        nodes = _exact(original, now.nodes, survey)
        paths = {change.path for change in changes(_plain(self.base), _plain(nodes))}
        paths.update((change.path for change in changed), self._rewritten(original, nodes, survey))
        if paths:
            self._update_copy(original, copy, nodes, paths, journal, bounds)
        self.base, self.left_out = nodes, now.left_out

    def compare(
        self, original: Tree, copy: Tree, bounds: Bounds
    ) -> tuple[list[PlannedChange], tuple[str, ...]]:
        """Return the changes of the copy since the last restore, and the left-out paths."""
        check = TreeScan(copy, self.scope, bounds)
        settled_ns = stamps.now_ns() - 2 * stamps.TICK_NS
        after = look(copy, self.scope, bounds)
        expected = self._expected()
        paths = needs_digest(expected, after.nodes)
        was = with_digests(
            expected,
            paths,
            lambda path: (
                digest(original, relative(path), check)
                if self.is_as_it_was(original, path)
                else None
            ),
        )
        becomes = with_digests(after.nodes, paths, lambda path: digest(copy, relative(path), check))
        for path in paths:
            if was[path].same_content(becomes[path]) and becomes[path].identity[1] < settled_ns:
                self._copied[path] = replace(was[path], identity=becomes[path].identity)
        specials = {path: node for path, node in self.base.items() if node.kind == "special"}
        changed = changes({**was, **specials}, with_specials(becomes, specials))
        self._seen, self._settled_ns = after.nodes, settled_ns
        changed = [self._from_base(change, was) for change in excluding(changed, after.left_out)]
        return changed, (*self.left_out, *after.left_out)

    def accept(self, changed: Iterable[PlannedChange], original: Tree) -> None:
        """Record that a commit made these changes in the original.

        If a node of the original differs from the committed node, the next restore brings it into
        the copy.
        """
        for change in changed:
            seen = self._seen.get(change.path)
            if seen is not None and seen.kind == "file" and change.after is not None:
                # A write may have followed in the clock tick in which the file was read.
                is_certain = seen.identity[1] < self._settled_ns
                identity = seen.identity if is_certain else _NOWHERE
                seen = replace(
                    seen, set_id=0, identity=identity, sha256=change.after.sha256 or seen.sha256
                )
            _set(self._copied, change.path, seen)
            try:
                now = node_at(original, change.relative)
            except OSError:
                now = None
            same = now is not None and now == change.after
            _set(self.base, change.path, now if same else None)

    def is_as_it_was(self, original: Tree, path: str) -> bool:
        """Return whether the original has the same node at the path as at the last restore."""
        was = self.base.get(path)
        try:
            now = node_at(original, relative(path))
        except OSError:
            return False
        return was is not None and now == was and now.identity == was.identity

    def _expected(self) -> dict[str, FileNode]:
        """Return the nodes that an unchanged copy has. Modes, kinds and symlinks are those of the
        original: live code may have changed the copy before its node was recorded."""
        expected: dict[str, FileNode] = {}
        for path, node in _plain(self.base).items():
            noted = self._copied.get(path)
            if node.kind != "file":
                expected[path] = node
            elif noted is None or noted.kind != "file":
                expected[path] = _foreign(node)
            else:
                expected[path] = replace(noted, mode=node.mode)
        return expected

    def _from_base(self, change: PlannedChange, was: Nodes) -> PlannedChange:
        """Return the change with the size and the time of the original."""
        node = self.base.get(change.path)
        if change.before is None or node is None or node.kind != "file":
            return change
        before = was[change.path]
        return replace(change, before=replace(node, identity=before.identity, sha256=before.sha256))

    def _rewritten(self, original: Tree, now: Nodes, survey: TreeScan) -> list[str]:
        """Return the files that changed in the clock tick of the last restore.

        Their timestamps do not show the change, so their content is compared.
        """
        return [
            path
            for path, was in self.base.items()
            if was.sha256 is not None
            and (node := now.get(path)) is not None
            and node.identity == was.identity
            and (node.sha256 or digest(original, relative(path), survey)) != was.sha256
        ]

    def _update_copy(
        self,
        original: Tree,
        copy: Tree,
        now: Nodes,
        paths: Collection[str],
        journal: Journal,
        bounds: Bounds,
    ) -> None:
        current = look(copy, self.scope, bounds)
        expected = _plain(current.nodes)
        for path in paths:
            node = now.get(path)
            _set(expected, path, None if node is None or node.kind == "special" else _foreign(node))
        expected = _reachable(expected)
        changed = excluding(changes(current.nodes, expected), current.left_out)
        digests: dict[str, bytes] = {}
        commit(changed, current.nodes, copy, original, journal, digests=digests, forced=True)
        until_ns = settle()
        for path in {*paths, *(change.path for change in changed)}:
            _set(self._copied, path, _written_node(copy, path, digests.get(path), until_ns))


def _plain(nodes: Nodes) -> dict[str, FileNode]:
    """Return the nodes without FIFOs, sockets and devices, which are never copied."""
    return {path: node for path, node in nodes.items() if node.kind != "special"}


def _foreign(node: FileNode) -> FileNode:
    """Return the node without its identity and digest, which are not valid in another tree."""
    return replace(node, identity=_NOWHERE, sha256=None)


def _reachable(nodes: Mapping[str, FileNode]) -> dict[str, FileNode]:
    """Return the nodes without those whose parent directory is missing."""
    kept: dict[str, FileNode] = {}
    for path in sorted(nodes, key=lambda path: path.replace("/", "\0")):
        above = path.rpartition("/")[0]
        if not above or ((parent := kept.get(above)) and parent.kind == "directory"):
            kept[path] = nodes[path]
    return kept


def _exact(tree: Tree, nodes: Nodes, survey: TreeScan) -> dict[str, FileNode]:
    """Return the nodes with digests of recently written files: a further write might get the same
    timestamps."""
    recent = stamps.now_ns() - 2 * stamps.TICK_NS
    paths = [
        path
        for path, node in nodes.items()
        if node.kind == "file" and node.sha256 is None and node.identity[1] > recent
    ]
    return with_digests(nodes, paths, lambda path: digest(tree, relative(path), survey))


def _written_node(copy: Tree, path: str, sha256: bytes | None, until_ns: int) -> FileNode | None:
    """Return the node of a file that a restore just wrote to the copy.

    `sha256` is the digest of the written content. The node has no identity if live code may have
    written the file since.
    """
    try:
        node = node_at(copy, relative(path))
    except OSError:
        return None
    if node is None or node.kind != "file":
        return node
    is_certain = node.identity[1] <= until_ns and digest(copy, relative(path)) == sha256
    return replace(node, identity=node.identity if is_certain else _NOWHERE, sha256=sha256)


def _set(nodes: dict[str, FileNode], path: str, node: FileNode | None) -> None:
    if node is None:
        nodes.pop(path, None)
    else:
        nodes[path] = node
