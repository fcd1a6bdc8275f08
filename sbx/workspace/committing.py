"""Make changes in a tree that others use meanwhile: all of them, or none.

    check     everything that the changes touch is there as it is expected; nothing else matters
    stage     what is to come is made whole beside the tree, in new inodes, and compared with the
              digests in the changes: no process inside ever held such an inode
    write     what is intended, to the disk, with what is staged: see `journal`
    do        renames and the like; looked at once more where a rename shows that somebody was
              quicker
    verify    where the stage had to lie in the tree itself: code inside could write to it there, so
              the contents are compared once more, after the renames
    undo      after any failure, last first; after a kill, by whoever opens the files next

Between the first rename and the last the code inside may see some of the changes and not the
others, since linux renames one name at a time.
"""

import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from sbx.errors import Broken, Conflict, InvalidPath, NotFound
from sbx.linux.renameat2 import exchange
from sbx.linux.syncfs import syncfs
from sbx.workspace.changes import Change, Node, Nodes
from sbx.workspace.freezing import copy_content, give, keep_attributes
from sbx.workspace.intents import Intent, in_order
from sbx.workspace.journal import Entry, Journal, Record
from sbx.workspace.refusals import translate, translated
from sbx.workspace.removal import remove_held
from sbx.workspace.rollback import new_name, set_aside
from sbx.workspace.snapshot import digest, digest_of, node_at, written_since
from sbx.workspace.stage import NOT_AS_IT_WAS, Stage, stamp
from sbx.workspace.tree import Tree
from sbx.workspace.undoing import not_put_back, undo

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0


def commit(
    changed: Sequence[Change],
    expected: Nodes,
    target: Tree,
    source: Tree,
    journal: Journal,
    *,
    digests: dict[str, bytes] | None = None,
    forced: bool = False,
) -> None:
    """Make these changes, in the order of `changes`, in `target`; files get the content that they
    have in `source`, which must be that of their digest where they have one. `expected` is what
    `target` held when the changes were decided. `digests` gets that of each new file, by path.
    `forced`: live code may write to these names meanwhile, and what it writes is dropped, too.

    Raises Conflict `workspace_changed`, Denied `file_not_permitted`, Unavailable `no_space` and
    `io_error`; nothing is changed then. Broken `commit_not_undone` where that failed, too.
    """
    if changed:
        with _begun(target, journal) as begun:
            doing = _Doing(expected, source, begun.stage, digests, forced=forced)
            intents = doing.prepare(changed)
            with begun.undoing(intents):
                doing.do(intents)
                if journal.in_tree:
                    doing.verify(intents)


class _Begun:
    """A commit with its stage, `name` in the directory fd `beside`, and its entry in a journal."""

    def __init__(self, stage: Stage, beside: int, record: Record, entry: Entry) -> None:
        self.stage = stage
        self._beside = beside
        self._record = record
        self._entry = entry
        self._left = False

    @contextmanager
    def undoing(self, intents: Sequence[Intent]) -> Iterator[None]:
        """What is done within is done for good, or undone: also if this process does not live to
        see which."""
        view = self.stage.target.view
        with translated(view):
            self._entry.intend(self._record, intents, self.stage.fd)
        try:
            yield
            with translated(view):
                self._entry.settle(self.stage.fd)
        except BaseException as error:
            failed = undo(self.stage, intents)
            with suppress(OSError):
                syncfs(self.stage.fd)
            if failed:
                raise self._not_undone(intents, failed) from error
            raise

    def _not_undone(self, intents: Sequence[Intent], failed: Sequence[Exception]) -> Broken:
        """What could not be put back is left to whom it belongs; where that fails, too, it stays in
        the stage, for who comes next."""
        told = "%d changes of a workspace could not be undone, the first of them:"
        _log.error(told, len(failed), exc_info=failed[0])  # one line, however many code inside made
        hint = "look at the files; the service's log says what failed first"
        try:
            if kept := not_put_back(self.stage, intents):
                self._left = True
                place = set_aside(self.stage, self._beside, self._record.stage, kept)
                hint = f"{hint}; what could not be put back is in '{place}'"
                self._entry.forget()
        except OSError as error:
            _log.error("nor could they be set aside: %s", error)
        return Broken(
            "the changes were made in part: what stopped them stopped undoing them, too",
            code="commit_not_undone",
            hint=hint,
        )

    def end(self) -> None:
        """The stage goes, and then its entry, unless something is left in it. What fails of that is
        removed by who comes next."""
        if not self._left:
            remove_held(self.stage.fd, self._beside, self._record.stage, _REMOVE_S)
            with suppress(OSError):
                self._entry.forget()


@contextmanager
def _begun(target: Tree, journal: Journal) -> Iterator[_Begun]:
    beside = target.fd if journal.in_tree else journal.directory
    record = Record(
        stage=new_name(),
        in_tree=journal.in_tree,
        inode=os.fstat(target.fd).st_ino,
        host=None if journal.host is None else str(journal.host),
        owner=target.owner,
    )
    with translated(target.view):
        entry = Entry.begin(journal, record)
        try:
            os.mkdir(record.stage, 0o700, dir_fd=beside)
        except OSError:
            entry.forget()
            raise
        fd = os.open(record.stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=beside)
    begun = _Begun(Stage(target, fd), beside, record, entry)
    try:
        yield begun
    finally:
        begun.end()
        os.close(fd)


class _Doing:
    """The steps before anything is seen, and those that are."""

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
        self._kept: set[str] = set()  # the files that are replaced, and whose content stays
        # By inode: the name in the stage, the digest that was asked for, the digest of the content.
        self._linked: dict[int, tuple[bytes, bytes | None, bytes | None]] = {}

    def prepare(self, changed: Sequence[Change]) -> list[Intent]:
        """Check all of it, and make in the stage what is to come."""
        made = {one.path for one in changed if one.before is None}
        every = enumerate((*changed, *self._narrow(changed)), start=1)
        intents = [self._checked(serial, one, made) for serial, one in every]
        return [self._staged(one) for one in intents]

    def do(self, intents: Sequence[Intent]) -> None:
        acts: Mapping[str, Callable[[Intent], None]] = {
            "lift": self._lift,
            "take away": self._take_away,
            "remove": self._remove,
            "put": self._put,
            "replace": self._replace,
            "stamp": self._stamp,
            "set mode": self._set_mode,
        }
        for act, one in in_order(intents):
            with self._about(self._target, one.change):
                acts[act](one)

    def _narrow(self, changed: Sequence[Change]) -> Iterator[Change]:
        """The directories that stay as they are, and do not let their owner write into them: code
        inside has changed the mode and changed it back."""
        paths = {one.path for one in changed}
        for path in sorted({path.rpartition("/")[0] for path in paths} - paths):
            node = self._expected.get(path)
            if node is not None and node.kind == "directory" and node.mode & 0o700 != 0o700:
                yield Change(path, node, node)

    # -- check ----------------------------------------------------------------------------------

    def _checked(self, serial: int, one: Change, made: Container[str]) -> Intent:
        """`made`: the paths of what is to come, below which nothing can be yet."""
        expected = self._expected.get(one.path)
        if one.before is None and expected is not None:
            return Intent(serial, one)  # it was another kind of thing, whose removal is checked
        if one.path.rpartition("/")[0] in made:
            return Intent(serial, one)
        with self._about(self._target, one):
            found = node_at(self._target, one.relative)
            if one.before is None:
                if found is not None:
                    raise _changed(self._target, one)
                return Intent(serial, one)
            if expected is None or found is None or not self._is_same(one, expected, found):
                raise _changed(self._target, one)
            if not one.content and found.links > 1:
                # To change its mode would change that of its other names, which nobody was shown.
                one = replace(one, content=True)
                self._kept.add(one.path)
            return Intent(serial, one, old=found.identity[0], mode=found.mode)

    def _is_same(self, one: Change, expected: Node, found: Node) -> bool:
        if self._forced:
            return found.kind == expected.kind
        if expected.kind == "directory":
            same = found.kind == "directory" and found.identity[0] == expected.identity[0]
            return same and (one.after is None or found.mode == expected.mode)
        if expected.kind == "special":  # its times are those of its last use
            return found.kind == "special" and found.identity[0] == expected.identity[0]
        if found != expected or found.identity != expected.identity:
            return False
        told = expected.sha256
        return told is None or told == digest(self._target, one.relative)

    # -- stage ----------------------------------------------------------------------------------

    def _staged(self, one: Intent) -> Intent:
        change, after = one.change, one.change.after
        if after is None or not change.content:
            return one
        if after.kind == "directory" and change.before is not None:
            return one
        with self._about(self._source, change, foreign=True):
            return replace(one, new=self._make(one, after))

    def _make(self, one: Intent, after: Node) -> int:
        """Its inode."""
        if after.kind == "directory":
            return self._stage.make_directory(one.made)
        if after.text is not None:
            os.symlink(after.text, one.made, dir_fd=self._stage.fd)
            if (owner := self._target.owner) is not None:
                os.chown(one.made, *owner, dir_fd=self._stage.fd, follow_symlinks=False)
        else:
            self._make_file(one, after)
        return os.stat(one.made, dir_fd=self._stage.fd, follow_symlinks=False).st_ino

    def _make_file(self, one: Intent, after: Node) -> None:
        fd = self._stage.fd
        source = self._target if one.change.path in self._kept else self._source
        with source.open(one.change.relative) as file:
            found = os.fstat(file.fd)
            if source is self._target:
                found_now = found.st_ino, found.st_ctime_ns
                if found_now != self._expected[one.change.path].identity:
                    raise _changed(self._target, one.change)
            elif (first := self._linked.get(found.st_ino)) is not None:
                if first[1] != after.sha256:
                    raise written_since(self._source, one.change)
                os.link(first[0], one.made, src_dir_fd=fd, dst_dir_fd=fd)
                if self._digests is not None and first[2] is not None:
                    self._digests[one.change.path] = first[2]
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            made = os.open(one.made, flags, 0o600, dir_fd=fd)
            try:
                copy_content(file.fd, made, after.size)
                if not _has_content(made, after):
                    raise written_since(self._source, one.change)
                content = None
                if self._digests is not None:
                    content = digest_of(made, os.fstat(made).st_size, None)
                    self._digests[one.change.path] = content
                give(made, after, self._target.owner)
                if one.old and not self._forced:
                    with self._target.open(one.change.relative) as old:
                        keep_attributes(old.fd, made, after.mode)
            finally:
                os.close(made)
            if found.st_nlink > 1 and source is self._source:
                self._linked[found.st_ino] = one.made, after.sha256, content

    # -- do -------------------------------------------------------------------------------------

    def _lift(self, one: Intent) -> None:
        """Let us write into a directory whose mode may forbid it, or that is to be removed."""
        self._stage.chmod(one.change, 0o700, keep=0o777)

    def _take_away(self, one: Intent) -> None:
        self._stage.take(one.change, one.aside)
        self._check_taken(one, one.aside)

    def _remove(self, one: Intent) -> None:
        with self._stage.above(one.change) as (parent, last):
            os.rmdir(last, dir_fd=parent)

    def _put(self, one: Intent) -> None:
        self._check_made(one)
        self._stage.put(one.made, one.change)

    def _replace(self, one: Intent) -> None:
        self._check_made(one)
        with self._stage.above(one.change) as (parent, last):
            exchanged = exchange(self._stage.fd, one.made, parent, last)
        if exchanged:
            self._check_taken(one, one.made)
        else:
            self._take_away(one)
            self._put(one)

    def _stamp(self, one: Intent) -> None:
        """Mode and time of a file whose content stays."""
        before, after = one.change.before, one.change.after
        assert before is not None
        assert after is not None
        with self._stage.held(one.change) as fd:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (one.old, before.size):
                raise _changed(self._target, one.change)
            stamp(fd, after)

    def _set_mode(self, one: Intent) -> None:
        assert one.change.after is not None
        self._stage.chmod(one.change, one.change.after.mode)

    def _check_made(self, one: Intent) -> None:
        """Raise before the rename where a stage in the tree has another inode by this name. Such an
        inode could not be taken away again with a directory that it was put into."""
        staged = self._stage.staged(one.made)
        if staged is None or staged.st_ino != one.new:
            raise written_since(self._target, one.change)

    def _check_taken(self, one: Intent, staged: bytes) -> None:
        """What we hold now is what was checked: nobody put another one there in between. Its ctime
        is that of the rename."""
        if self._forced:
            return
        expected = self._expected[one.change.path]
        found = self._stage.staged(staged)
        if (
            found is None
            or found.st_ino != expected.identity[0]
            or (
                expected.kind == "file"
                and (found.st_size, found.st_mtime_ns) != (expected.size, expected.mtime_ns)
            )
        ):
            raise _changed(self._target, one.change)

    def verify(self, intents: Sequence[Intent]) -> None:
        """Compare what has its place now with what was to be made. From the stage on, each of these
        inodes could be replaced or written by code inside, which sees the stage in the tree."""
        for one in intents:
            after = one.change.after
            if after is None or not one.new:
                continue
            with self._about(self._target, one.change):
                there = node_at(self._target, one.change.relative)
                if there is None or there.identity[0] != one.new or there.text != after.text:
                    raise written_since(self._target, one.change)
                if after.sha256 is not None:
                    with self._target.open(one.change.relative) as file:
                        if not _has_content(file.fd, after):
                            raise written_since(self._target, one.change)

    @contextmanager
    def _about(self, tree: Tree, one: Change, *, foreign: bool = False) -> Iterator[None]:
        """Errors of linux, told. `foreign`: of what nobody else can change."""
        try:
            yield
        except (NotFound, InvalidPath) as error:
            raise _changed(tree, one) from error
        except OSError as error:
            if error.errno in NOT_AS_IT_WAS and not foreign:
                raise _changed(tree, one) from error
            raise translate(error, tree.shown(one.relative)) from error


def _has_content(fd: int, node: Node) -> bool:
    """Return whether the file has the content that the node's digest stands for, if it has one."""
    return node.sha256 is None or digest_of(fd, os.fstat(fd).st_size, None) == node.sha256


def _changed(tree: Tree, one: Change) -> Conflict:
    path = tree.shown(one.relative)
    return Conflict(
        f"'{path}' has changed meanwhile, so nothing was done",
        code="workspace_changed",
        hint="look at what it is now, and rehearse the command again",
        details={"path": path},
    )
