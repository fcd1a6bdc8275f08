"""The changes of a tree: the effect of a dry run or a restore on the files of a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sbx import errors
from sbx.protocol.changes import ChangeBudget
from sbx.protocol.dry_runs import CHANGES_MAX, FileChange
from sbx.protocol.runs import Run
from sbx.runtime.files.open_files import OpenFiles
from sbx.workspace.snapshots.diff import FILE_MAX, plain, shown_in, tell
from sbx.workspace.snapshots.manifest import Nodes, PlannedChange, within
from sbx.workspace.snapshots.scan import digest_of_bytes, written_since
from sbx.workspace.tree import Tree


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a tree. `summary` describes them for the user. `truncated`: it or `left_out`
    is not complete."""

    changed: Sequence[PlannedChange]
    before: Nodes
    summary: tuple[FileChange, ...]
    truncated: bool
    left_out: tuple[str, ...]


def effect_of(
    changed: Sequence[PlannedChange], left_out: Sequence[str], original: Tree, staged: Tree
) -> Changes:
    """Return these changes, described by the present content of the original and the staged
    content."""
    summary, truncated = tell(
        changed,
        shown_in(original),
        partial(content_of, original),
        partial(content_of, staged),
    )
    named = tuple(plain(shown_in(original)(path)) for path in left_out[:CHANGES_MAX])
    return Changes(changed, {}, summary, truncated or len(left_out) > len(named), named)


def protected(opened: OpenFiles, change: PlannedChange) -> bool:
    """Return whether the path guard kept the content: only its times can be others in a copy."""
    host = opened.host_directory
    return host is not None and opened.quarantine is not None and host.is_protected(change.relative)


def may_change(opened: OpenFiles, change: PlannedChange) -> bool:
    """Return whether code inside may change the file: a program that the host runs is read-only
    inside, and so for a restore."""
    if opened.host_directory is None or opened.quarantine is None:
        return True
    try:
        opened.host_directory.refuse_change(change.relative)
    except errors.Denied:
        return False
    return True


def with_set_id(change: PlannedChange, base: Nodes) -> PlannedChange:
    """Return the change with the set-id bits that the original has: the copy has none."""
    was = base.get(change.path)
    if change.before is None or was is None:
        return change
    return replace(change, before=replace(change.before, set_id=was.set_id))


def without_digest(change: PlannedChange) -> PlannedChange:
    """Return the change with no digest to compare with: no jail ever sees a checkpoint's copy. A
    file that was cut short while it was copied has another size than its node."""
    return (
        change
        if change.after is None
        else replace(change, after=replace(change.after, sha256=None))
    )


def recorded_content(tree: Tree, change: PlannedChange) -> bytes | None:
    """Return the content whose digest the change has. Raises Conflict `workspace_changed`."""
    content = content_of(tree, change)
    assert change.after is not None
    if content is not None and digest_of_bytes(content) != change.after.sha256:
        raise written_since(tree, change)
    return content


def content_of(tree: Tree, change: PlannedChange) -> bytes | None:
    try:
        return tree.read(change.relative, max_bytes=FILE_MAX)
    except errors.SbxError:
        return None


class ChangeSet:
    """The changes of one tool call, as a person decides by them. `host_executables`: the new paths
    that a program of the host would obey, each with the program."""

    def __init__(
        self,
        effect: Changes,
        run: Run | None = None,
        host_executables: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self.host_executables = host_executables or {}
        self.changes: Sequence[FileChange] = effect.summary
        self.truncated = effect.truncated
        self.left_out: Sequence[str] = effect.left_out
        self.planned: Sequence[PlannedChange] = effect.changed

    @property
    def is_empty(self) -> bool:
        return not self.planned

    @property
    def paths(self) -> Sequence[str]:
        return [change.path for change in self.planned]

    def within(self, allowances: Sequence[ChangeBudget]) -> bool:
        """Whether every change is within one of these allowances."""
        return within(self.planned, allowances)
