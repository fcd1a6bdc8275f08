"""Apply changes to a tree that other processes use at the same time: all of them, or none.

    check     compare the nodes that the changes touch with the expected nodes; ignore all others
    stage     create the new nodes outside the tree, as new inodes, and compare their content with
              the digests in the changes. No process inside ever had such an inode open
    write     write the intents and the stage to the disk: see `journal`
    do        rename, exchange and chmod. Check each node that a rename took away once more:
              another process may have replaced it
    verify    compare the contents again after the renames, if the stage had to be in the tree
              itself: code inside could write to it there
    undo      after any failure, undo the steps from the last to the first. After a kill, the next
              process that opens the files does this

Between the first rename and the last, the code inside may see some of the changes without the
others, because Linux renames one name at a time.
"""

import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sbx.errors import Conflict, InvalidPath, NotFound
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import exchange
from sbx.workspace.errors import translate
from sbx.workspace.snapshots.copy import copy_content, give, keep_attributes
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.journal_records import JournalStep, in_order
from sbx.workspace.snapshots.manifest import FileNode, Nodes, PlannedChange
from sbx.workspace.snapshots.recover import begin_commit
from sbx.workspace.snapshots.scan import digest, digest_of, node_at, written_since
from sbx.workspace.snapshots.staging import NOT_AS_IT_WAS, Stage, stamp
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0


def commit(
    changed: Sequence[PlannedChange],
    expected: Nodes,
    target: Tree,
    source: Tree,
    journal: Journal,
    *,
    digests: dict[str, bytes] | None = None,
    forced: bool = False,
) -> None:
    """Apply these changes, which are in the order of `changes.changes`, to `target`.

    Files get the content that they have in `source`. If a change has a digest, the content must
    match it. `expected` has the nodes of `target` at the time when the changes were decided. The
    digest of each new file is stored in `digests`, by path. `forced` discards writes that live code
    makes to these paths in the meantime.

    Raises Conflict `workspace_changed`, Denied `file_not_permitted`, Unavailable `no_space` and
    `io_error`. Nothing is changed then. Raises Broken `commit_not_undone` if the undo failed, too.
    """
    if changed:
        with begin_commit(target, journal) as current:
            steps = _Doing(expected, source, current.stage, digests, forced=forced)
            intents = steps.prepare(changed)
            with current.undoing(intents):
                steps.do(intents)
                if journal.in_tree:
                    steps.verify(intents)


class _Doing:
    """The steps of a commit: those in the stage, and then those in the tree."""

    def __init__(
        self,
        expected: Nodes,
        source: Tree,
        stage: Stage,
        digests: dict[str, bytes] | None,
        *,
        forced: bool,
    ) -> None:
        self._digests = digests
        self._forced = forced
        self._expected = expected
        self._source = source
        self._stage = stage
        self._target = stage.target
        self._kept: set[str] = set()  # files that are replaced and keep their content
        # By inode: the name in the stage, the required digest, the digest of the content.
        self._linked: dict[int, tuple[bytes, bytes | None, bytes | None]] = {}

    def prepare(self, changed: Sequence[PlannedChange]) -> list[JournalStep]:
        """Check all changes, create their new nodes in the stage, and return the intents."""
        added = {change.path for change in changed if change.before is None}
        every = enumerate((*changed, *self._narrow(changed)), start=1)
        intents = [self._checked(serial, change, added) for serial, change in every]
        return [self._staged(intent) for intent in intents]

    def do(self, intents: Sequence[JournalStep]) -> None:
        actions: Mapping[str, Callable[[JournalStep], None]] = {
            "lift": self._lift,
            "take away": self._take_away,
            "remove": self._remove,
            "put": self._put,
            "replace": self._replace,
            "stamp": self._stamp,
            "set mode": self._set_mode,
        }
        for action, intent in in_order(intents):
            with self._about(self._target, intent.change):
                actions[action](intent)

    def _narrow(self, changed: Sequence[PlannedChange]) -> Iterator[PlannedChange]:
        """Yield a change for each unchanged parent directory that its owner cannot write.

        Code inside has changed the mode and changed it back.
        """
        paths = {change.path for change in changed}
        for path in sorted({path.rpartition("/")[0] for path in paths} - paths):
            node = self._expected.get(path)
            if node is not None and node.kind == "directory" and node.mode & 0o700 != 0o700:
                yield PlannedChange(path, node, node)

    # -- check ----------------------------------------------------------------------------------

    def _checked(self, serial: int, change: PlannedChange, added: Container[str]) -> JournalStep:
        """Return the intent of a change. `added` has the paths that do not exist yet."""
        expected = self._expected.get(change.path)
        if change.before is None and expected is not None:
            return JournalStep(serial, change)  # its kind changes: the removal is checked
        if change.path.rpartition("/")[0] in added:
            return JournalStep(serial, change)
        with self._about(self._target, change):
            node = node_at(self._target, change.relative)
            if change.before is None:
                if node is not None:
                    raise _changed(self._target, change)
                return JournalStep(serial, change)
            if expected is None or node is None or not self._is_same(change, expected, node):
                raise _changed(self._target, change)
            if not change.content and node.links > 1:
                # A new mode would apply to its other names, too, which no user has reviewed.
                change = replace(change, content=True)
                self._kept.add(change.path)
            return JournalStep(serial, change, old=node.identity[0], mode=node.mode)

    def _is_same(self, change: PlannedChange, expected: FileNode, node: FileNode) -> bool:
        if self._forced:
            return node.kind == expected.kind
        if expected.kind == "directory":
            same = node.kind == "directory" and node.identity[0] == expected.identity[0]
            return same and (change.after is None or node.mode == expected.mode)
        if expected.kind == "special":  # each use changes its times
            return node.kind == "special" and node.identity[0] == expected.identity[0]
        if node != expected or node.identity != expected.identity:
            return False
        sha256 = expected.sha256
        return sha256 is None or sha256 == digest(self._target, change.relative)

    # -- stage ----------------------------------------------------------------------------------

    def _staged(self, intent: JournalStep) -> JournalStep:
        change, after = intent.change, intent.change.after
        if after is None or not change.content:
            return intent
        if after.kind == "directory" and change.before is not None:
            return intent
        with self._about(self._source, change, foreign=True):
            return replace(intent, new=self._make(intent, after))

    def _make(self, intent: JournalStep, after: FileNode) -> int:
        """Create the new node in the stage and return its inode."""
        if after.kind == "directory":
            return self._stage.make_directory(intent.new_name)
        if after.text is not None:
            os.symlink(after.text, intent.new_name, dir_fd=self._stage.fd)
            if (owner := self._target.owner) is not None:
                os.chown(intent.new_name, *owner, dir_fd=self._stage.fd, follow_symlinks=False)
        else:
            self._make_file(intent, after)
        return os.stat(intent.new_name, dir_fd=self._stage.fd, follow_symlinks=False).st_ino

    def _make_file(self, intent: JournalStep, after: FileNode) -> None:
        fd = self._stage.fd
        source = self._target if intent.change.path in self._kept else self._source
        with source.open(intent.change.relative) as file:
            status = os.fstat(file.fd)
            if source is self._target:
                identity = status.st_ino, status.st_ctime_ns
                if identity != self._expected[intent.change.path].identity:
                    raise _changed(self._target, intent.change)
            elif (first := self._linked.get(status.st_ino)) is not None:
                if first[1] != after.sha256:
                    raise written_since(self._source, intent.change)
                os.link(first[0], intent.new_name, src_dir_fd=fd, dst_dir_fd=fd)
                if self._digests is not None and first[2] is not None:
                    self._digests[intent.change.path] = first[2]
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with closing(os.open(intent.new_name, flags, 0o600, dir_fd=fd)) as new_fd:
                copy_content(file.fd, new_fd, after.size)
                if not _has_content(new_fd, after):
                    raise written_since(self._source, intent.change)
                content = None
                if self._digests is not None:
                    content = digest_of(new_fd, os.fstat(new_fd).st_size, None)
                    self._digests[intent.change.path] = content
                give(new_fd, after, self._target.owner)
                if intent.old and not self._forced:
                    with self._target.open(intent.change.relative) as old:
                        keep_attributes(old.fd, new_fd, after.mode)
            if status.st_nlink > 1 and source is self._source:
                self._linked[status.st_ino] = intent.new_name, after.sha256, content

    # -- do -------------------------------------------------------------------------------------

    def _lift(self, intent: JournalStep) -> None:
        """Make a directory writable that the commit changes or removes: its mode may forbid it."""
        self._stage.chmod(intent.change, 0o700, keep=0o777)

    def _take_away(self, intent: JournalStep) -> None:
        self._stage.take(intent.change, intent.aside)
        self._check_taken(intent, intent.aside)

    def _remove(self, intent: JournalStep) -> None:
        with self._stage.above(intent.change) as (parent, last):
            os.rmdir(last, dir_fd=parent)

    def _put(self, intent: JournalStep) -> None:
        self._check_made(intent)
        self._stage.put(intent.new_name, intent.change)

    def _replace(self, intent: JournalStep) -> None:
        self._check_made(intent)
        with self._stage.above(intent.change) as (parent, last):
            exchanged = exchange(self._stage.fd, intent.new_name, parent, last)
        if exchanged:
            self._check_taken(intent, intent.new_name)
        else:
            self._take_away(intent)
            self._put(intent)

    def _stamp(self, intent: JournalStep) -> None:
        """Set the mode and the time of a file that keeps its content."""
        before, after = intent.change.before, intent.change.after
        assert before is not None
        assert after is not None
        with self._stage.open_target(intent.change) as fd:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (intent.old, before.size):
                raise _changed(self._target, intent.change)
            stamp(fd, after)

    def _set_mode(self, intent: JournalStep) -> None:
        assert intent.change.after is not None
        self._stage.chmod(intent.change, intent.change.after.mode)

    def _check_made(self, intent: JournalStep) -> None:
        """Raise before the rename if the stage has another inode under this name.

        Code inside can do that if the stage is in the tree. Undoing could not remove such an inode
        together with the directory that it was put into.
        """
        staged = self._stage.staged(intent.new_name)
        if staged is None or staged.st_ino != intent.new:
            raise written_since(self._target, intent.change)

    def _check_taken(self, intent: JournalStep, staged: bytes) -> None:
        """Raise if another process replaced the node between the check and the rename.

        The ctime cannot be compared: the rename has set it.
        """
        if self._forced:
            return
        expected = self._expected[intent.change.path]
        status = self._stage.staged(staged)
        if (
            status is None
            or status.st_ino != expected.identity[0]
            or (
                expected.kind == "file"
                and (status.st_size, status.st_mtime_ns) != (expected.size, expected.mtime_ns)
            )
        ):
            raise _changed(self._target, intent.change)

    def verify(self, intents: Sequence[JournalStep]) -> None:
        """Compare the nodes in the tree with the intended nodes.

        Code inside sees a stage in the tree, so it could replace or write each of these inodes.
        """
        for intent in intents:
            after = intent.change.after
            if after is None or not intent.new:
                continue
            with self._about(self._target, intent.change):
                node = node_at(self._target, intent.change.relative)
                if node is None or node.identity[0] != intent.new or node.text != after.text:
                    raise written_since(self._target, intent.change)
                if after.sha256 is not None:
                    with self._target.open(intent.change.relative) as file:
                        if not _has_content(file.fd, after):
                            raise written_since(self._target, intent.change)

    @contextmanager
    def _about(self, tree: Tree, change: PlannedChange, *, foreign: bool = False) -> Iterator[None]:
        """Translate errors of Linux. `foreign`: no other process can change the file."""
        try:
            yield
        except (NotFound, InvalidPath) as error:
            raise _changed(tree, change) from error
        except OSError as error:
            if error.errno in NOT_AS_IT_WAS and not foreign:
                raise _changed(tree, change) from error
            raise translate(error, tree.shown(change.relative)) from error


def _has_content(fd: int, node: FileNode) -> bool:
    """Return whether the content of the file matches the digest of the node, if it has one."""
    return node.sha256 is None or digest_of(fd, os.fstat(fd).st_size, None) == node.sha256


def _changed(tree: Tree, change: PlannedChange) -> Conflict:
    path = tree.shown(change.relative)
    return Conflict(
        f"'{path}' has changed in the meantime, so nothing was changed",
        code="workspace_changed",
        hint="look at its current content, and dry-run the command again",
        details={"path": path},
    )
