"""A copy of a tree that is used many times, and brought up to date before each use.

    update    the copy gets what changed in the original since the last time; the original wins
    compare   what was changed in the copy, and is not in the original yet
    accept    a commit has made these changes in the original too

The code that uses the copy may write to it at any time. Therefore nothing of the copy is trusted:
a comparison reads it anew, and what is to be committed is taken out of it first (`freezing.take`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sbx.linux import stamps
from sbx.workspace.changes import (
    Change,
    Manifest,
    Node,
    Nodes,
    changes,
    doubtful,
    relative,
    sparing,
    with_digests,
    with_specials,
)
from sbx.workspace.committing import commit
from sbx.workspace.freezing import settle
from sbx.workspace.journal import Journal
from sbx.workspace.snapshot import Bounds, Scope, Survey, digest, look, node_at
from sbx.workspace.tree import Tree


class Mirror:
    """What the copy and the original held when both were the same.

    `base` has the identities of the original, `copied` those of the copy.
    """

    def __init__(self, base: Manifest, copied: Manifest, scope: Scope) -> None:
        self.base: dict[str, Node] = dict(base.nodes)
        self.left_out = base.left_out
        self.scope = scope
        self._copied: dict[str, Node] = dict(copied.nodes)
        self._seen: Nodes = {}

    def update(
        self,
        original: Tree,
        copy: Tree,
        journal: Journal,
        bounds: Bounds,
        again: Collection[str] = (),
    ) -> None:
        """Bring the copy up to date. Paths of `again` become what they are in the original, even
        if only the copy was changed there.

        Raises as `commit`, and TooLarge `workspace_too_large`.
        """
        survey = Survey(original, self.scope, bounds)
        now = look(original, self.scope, bounds)
        nodes = _exact(original, now.nodes, survey)
        paths = {one.path for one in changes(_plain(self.base), _plain(nodes))}
        paths.update(again, self._rewritten(original, nodes, survey))
        if paths:
            self._bring(original, copy, nodes, paths, journal, bounds)
        self.base, self.left_out = nodes, now.left_out

    def compare(
        self, original: Tree, copy: Tree, bounds: Bounds
    ) -> tuple[list[Change], tuple[str, ...]]:
        """How the copy differs from the original as of the last update, and what is left out."""
        check = Survey(copy, self.scope, bounds)
        after = look(copy, self.scope, bounds)
        paths = doubtful(self._copied, after.nodes)
        was = with_digests(
            self._copied,
            paths,
            lambda path: (
                digest(original, relative(path), check)
                if self.is_as_it_was(original, path)
                else None
            ),
        )
        becomes = with_digests(after.nodes, paths, lambda path: digest(copy, relative(path), check))
        specials = {path: one for path, one in self.base.items() if one.kind == "special"}
        changed = changes({**was, **specials}, with_specials(becomes, specials))
        self._seen = after.nodes
        return sparing(changed, after.left_out), (*self.left_out, *after.left_out)

    def accept(self, changed: Iterable[Change], original: Tree) -> None:
        """Note that a commit made these changes in the original. What the original does not hold
        as it was committed is brought into the copy by the next update."""
        for one in changed:
            _set(self._copied, one.path, self._seen.get(one.path))
            try:
                now = node_at(original, one.relative)
            except OSError:
                now = None
            same = now is not None and now == one.after
            _set(self.base, one.path, now if same else None)

    def is_as_it_was(self, original: Tree, path: str) -> bool:
        """Return whether the original has the same node there as at the last update."""
        was = self.base.get(path)
        try:
            now = node_at(original, relative(path))
        except OSError:
            return False
        return was is not None and now == was and now.identity == was.identity

    def _rewritten(self, original: Tree, now: Nodes, survey: Survey) -> list[str]:
        """The files whose stamps could not prove at the last update that they would not be written
        again within the same tick of the clock, and whose content is another one now."""
        return [
            path
            for path, was in self.base.items()
            if was.sha256 is not None
            and (node := now.get(path)) is not None
            and node.identity == was.identity
            and (node.sha256 or digest(original, relative(path), survey)) != was.sha256
        ]

    def _bring(
        self,
        original: Tree,
        copy: Tree,
        now: Nodes,
        paths: Collection[str],
        journal: Journal,
        bounds: Bounds,
    ) -> None:
        there = look(copy, self.scope, bounds)
        wanted = _plain(there.nodes)
        for path in paths:
            node = now.get(path)
            _set(wanted, path, None if node is None or node.kind == "special" else _foreign(node))
        wanted = _reachable(wanted)
        todo = sparing(changes(there.nodes, wanted), there.left_out)
        commit(todo, there.nodes, copy, original, journal)
        settle()
        for path in {*paths, *(one.path for one in todo)}:
            _set(self._copied, path, _held(copy, path))


def _plain(nodes: Nodes) -> dict[str, Node]:
    """Without FIFOs, sockets and devices, which are never copied."""
    return {path: node for path, node in nodes.items() if node.kind != "special"}


def _foreign(node: Node) -> Node:
    """The node of another tree: its identity and digest say nothing here."""
    return replace(node, identity=(-1, -1), sha256=None)


def _reachable(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Without those that lie in no directory."""
    kept: dict[str, Node] = {}
    for path in sorted(nodes, key=lambda path: path.replace("/", "\0")):
        above = path.rpartition("/")[0]
        if not above or ((parent := kept.get(above)) and parent.kind == "directory"):
            kept[path] = nodes[path]
    return kept


def _exact(tree: Tree, nodes: Nodes, survey: Survey) -> dict[str, Node]:
    """With digests of the files that were written so lately that a further write might get the
    same stamps."""
    recent = stamps.now_ns() - 2 * stamps.TICK_NS
    paths = [
        path
        for path, node in nodes.items()
        if node.kind == "file" and node.sha256 is None and node.identity[1] > recent
    ]
    return with_digests(nodes, paths, lambda path: digest(tree, relative(path), survey))


def _held(tree: Tree, path: str) -> Node | None:
    try:
        return node_at(tree, relative(path))
    except OSError:
        return None


def _set(nodes: dict[str, Node], path: str, node: Node | None) -> None:
    if node is None:
        nodes.pop(path, None)
    else:
        nodes[path] = node
