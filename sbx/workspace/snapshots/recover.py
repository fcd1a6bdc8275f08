"""Begin a commit, and undo its executed steps after an error or after its process was killed.

`recover` undoes a commit that a kill interrupted, before the files are used again. No client
received a success of this commit. In a host directory, the owner may have continued to work: the
owner's files stay. The files that they displace are put next to them, in a directory whose name is
`.sbx-` and 32 hex digits.

A step is undone if the tree and the stage show that it was executed. So undoing is idempotent: it
can be interrupted, and continued by another process. If another process has put a file into the
place of a removed node, that file stays, and the removed node stays in the stage.
"""

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from sbx.errors import Broken, Conflict, Denied, SbxError
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import exchange, rename_new
from sbx.linux.syncfs import syncfs
from sbx.workspace.errors import translated
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.rmtree import remove_held, remove_tree
from sbx.workspace.safe_open import opener
from sbx.workspace.snapshots.journal import Journal, JournalFile, JournalHeader, unfinished
from sbx.workspace.snapshots.journal_records import JournalStep, in_order
from sbx.workspace.snapshots.staging import NOT_AS_IT_WAS, Stage, stamp, status_of
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0


class StagedCommit:
    """A commit that was begun: its stage, a directory in the fd `parent`, and its journal entry."""

    def __init__(
        self, stage: Stage, parent: int, record: JournalHeader, entry: JournalFile
    ) -> None:
        self.stage = stage
        self._parent = parent
        self._record = record
        self._entry = entry
        self._set_aside = False

    @contextmanager
    def undoing(self, intents: Sequence[JournalStep]) -> Iterator[None]:
        """Make the steps of the block permanent, or undo them, even if this process is killed."""
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

    def _not_undone(self, intents: Sequence[JournalStep], failed: Sequence[Exception]) -> Broken:
        """Set aside the files that could not be put back, for their owner, and return the error.

        If that fails, too, they stay in the stage for the next process that opens the files.
        """
        message = "%d changes of a workspace could not be undone, the first of them:"
        # One line, because code inside decides how many there are.
        _log.error(message, len(failed), exc_info=failed[0])
        hint = "look at the files; the service's log has the first error"
        try:
            if kept := not_put_back(self.stage, intents):
                self._set_aside = True
                place = set_aside(self.stage, self._parent, self._record.stage, kept)
                hint = f"{hint}; the files that could not be put back are in '{place}'"
                self._entry.forget()
        except OSError as error:
            _log.error("the files of the failed undo could not be set aside: %s", error)
        return Broken(
            "only some of the changes were made, and undoing them failed, too",
            code="commit_not_undone",
            hint=hint,
        )

    def end(self) -> None:
        """Remove the stage and then its journal entry, unless the stage was set aside.

        The next process that opens the files removes the rest if this fails.
        """
        if not self._set_aside:
            remove_held(self.stage.fd, self._parent, self._record.stage, _REMOVE_S)
            with suppress(OSError):
                self._entry.forget()


@contextmanager
def begin_commit(target: Tree, journal: Journal) -> Iterator[StagedCommit]:
    """Create the journal entry and the stage of a commit, and remove both at the end.

    Raise the errors of `errors.translate`.
    """
    parent = target.fd if journal.in_tree else journal.directory
    record = JournalHeader(
        stage=new_name(),
        in_tree=journal.in_tree,
        inode=os.fstat(target.fd).st_ino,
        host=None if journal.host is None else str(journal.host),
        owner=target.owner,
    )
    with translated(target.view):
        entry = JournalFile.begin(journal, record)
        try:
            os.mkdir(record.stage, 0o700, dir_fd=parent)
        except OSError:
            entry.forget()
            raise
        fd = os.open(record.stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    current = StagedCommit(Stage(target, fd), parent, record, entry)
    try:
        yield current
    finally:
        current.end()
        os.close(fd)


def undo(stage: Stage, intents: Sequence[JournalStep]) -> list[Exception]:
    """Undo the steps, the last first, and return the errors. No file is lost by an error."""
    failed: list[Exception] = []
    for intent in sorted(intents, key=lambda intent: intent.change.relative):
        if intent.is_directory:
            _lift(stage, intent)
    for action, intent in reversed(in_order(intents)):
        if (back := _BACK.get(action)) is not None:
            try:
                back(stage, intent)
            except (OSError, SbxError) as error:
                failed.append(error)
    return failed


def not_put_back(stage: Stage, intents: Sequence[JournalStep]) -> list[bytes]:
    """Return the names in the stage that must not be deleted after the undo.

    These are old nodes, and new nodes that another process has written since.
    """
    kept = [intent.aside for intent in intents if stage.staged(intent.aside) is not None]
    for intent in intents:
        status = stage.staged(intent.new_name)
        if status is not None and not _is_unchanged(status, intent):
            kept.append(intent.new_name)
    return kept


def _lift(stage: Stage, intent: JournalStep) -> None:
    """Make an existing directory writable. If that fails, a later step reports the error."""
    with suppress(OSError, Denied):
        stage.chmod(intent.change, 0o700, keep=0o777)


def _mode_back(stage: Stage, intent: JournalStep) -> None:
    status = _current(stage, intent)
    made_again = intent.change.after is None and status is not None and stat.S_ISDIR(status.st_mode)
    if made_again or _has_inode(status, intent.old):
        stage.chmod(intent.change, intent.mode)


def _put_back(stage: Stage, intent: JournalStep) -> None:
    if stage.staged(intent.aside) is not None:
        stage.put(intent.aside, intent.change)


def _make_again(stage: Stage, intent: JournalStep) -> None:
    if _current(stage, intent) is None:
        stage.make_directory(intent.again)
        stage.put(intent.again, intent.change)


def _take_back(stage: Stage, intent: JournalStep) -> None:
    if stage.staged(intent.new_name) is not None or not _has_inode(
        _current(stage, intent), intent.new
    ):
        return
    if not intent.is_directory:
        stage.take(intent.change, intent.new_name)
        return
    with stage.above(intent.change) as (parent, last):
        os.rmdir(last, dir_fd=parent)


def _change_back(stage: Stage, intent: JournalStep) -> None:
    if stage.staged(intent.aside) is not None:  # the file system cannot exchange names
        _take_back(stage, intent)
        stage.put(intent.aside, intent.change)
        return
    staged = stage.staged(intent.new_name)
    status = _current(stage, intent)
    if staged is None or _has_inode(staged, intent.new) or _has_inode(status, intent.old):
        return  # not exchanged, even if code inside put another inode into a stage in the tree
    if not _has_inode(status, intent.new):
        path = stage.target.shown(intent.change.relative)
        raise Conflict(f"another process replaced '{path}'", code="workspace_changed")
    with stage.above(intent.change) as (parent, last):
        exchange(stage.fd, intent.new_name, parent, last)


def _stamp_back(stage: Stage, intent: JournalStep) -> None:
    before, after = intent.change.before, intent.change.after
    assert before is not None
    assert after is not None
    if not _has_inode(_current(stage, intent), intent.old):
        return
    with stage.open_target(intent.change) as fd:
        now = os.fstat(fd)
        is_same = (now.st_ino, now.st_size) == (intent.old, before.size)
        if is_same and now.st_mtime_ns in (before.mtime_ns, after.mtime_ns):
            stamp(fd, before)


_BACK: Mapping[str, Callable[[Stage, JournalStep], None]] = {
    "lift": _mode_back,
    "take away": _put_back,
    "remove": _make_again,
    "put": _take_back,
    "replace": _change_back,
    "stamp": _stamp_back,
}


def _current(stage: Stage, intent: JournalStep) -> os.stat_result | None:
    """Return the status of the current node at the path, or None."""
    try:
        with stage.above(intent.change) as (parent, last):
            return status_of(parent, last)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _has_inode(status: os.stat_result | None, inode: int) -> bool:
    """Compare inode numbers.

    A file system may give the number of a deleted file to a new file. Such a file is then treated
    as a file of the commit and moved to the stage, where `not_put_back` keeps it.
    """
    return status is not None and status.st_ino == inode


def _is_unchanged(status: os.stat_result, intent: JournalStep) -> bool:
    after = intent.change.after
    if after is None or not _has_inode(status, intent.new):
        return False
    return after.kind != "file" or (status.st_size, status.st_mtime_ns) == (
        after.size,
        after.mtime_ns,
    )


def recover(staging: int, files: int) -> bool:
    """Undo every interrupted commit in a conversation that no process uses.

    Return whether all of them are undone. A commit whose host directory is missing waits until the
    directory is back. `staging` and `files` are the fds of directories (O_PATH suffices). This
    function can be killed and called again. Raises OSError if the journal cannot be read.
    """
    remaining = False
    for entry in unfinished(staging):
        try:
            if entry.is_empty():
                entry.forget()
                continue
            record = entry.read()
            with _tree(files, record) as tree:
                _roll_back(tree, tree.fd if record.in_tree else staging, entry, record)
        except (OSError, SbxError, ValueError, TypeError, LookupError) as error:
            _log.error("an interrupted commit cannot be undone yet: %s", error)
            remaining = True
    return not remaining


def new_name() -> str:
    """Return a name for a stage, which the code inside may see."""
    return f".sbx-{secrets.token_hex(16)}"


def set_aside(stage: Stage, beside: int, name: str, kept: Sequence[bytes]) -> str:
    """Move the stage with the `kept` files into the tree, for their owner, and return its path.

    `beside` is the directory fd that contains the stage under the name `name`. It may be the tree
    itself. Raises OSError.
    """
    for entry in os.listdir(stage.fd):
        if os.fsencode(entry) not in kept:
            remove_tree(stage.fd, entry, _REMOVE_S)
    if stage.target.owner is not None:
        os.fchown(stage.fd, *stage.target.owner)
    place = new_name()
    rename_new(beside, name.encode(), stage.target.fd, place.encode())
    return stage.target.shown((place,))


def _roll_back(tree: Tree, beside: int, entry: JournalFile, record: JournalHeader) -> None:
    """Undo one commit. Raises an error if that fails now, but may succeed later."""
    fd = _open_stage(beside, record.stage)
    if fd is None:
        entry.forget()
        return
    with closing(fd):
        place = None
        if record.intents:
            place = _undo(Stage(tree, fd), beside, record)
            syncfs(fd)
        if place is None:
            remove_held(fd, beside, record.stage, _REMOVE_S)
        entry.forget()


def _open_stage(beside: int, name: str) -> int | None:
    """Open the stage. Return None if it does not exist, or if another directory has its name.

    If the stage is in the tree, code inside may have put its own directory there, so that sbx would
    change the owner of the content.
    """
    try:
        fd = opener()(beside, (name,), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in NOT_AS_IT_WAS:
            return None
        raise
    if os.fstat(fd).st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def _undo(stage: Stage, beside: int, record: JournalHeader) -> str | None:
    """Undo the steps, and return the path of the files that could not be put back, or None."""
    failed = undo(stage, record.intents)
    for error in failed:
        if not _is_final(error):
            raise error
    kept = not_put_back(stage, record.intents)
    if not kept:
        _log.warning("an interrupted commit of %d changes is undone", len(record.intents))
        return None
    place = set_aside(stage, beside, record.stage, kept)
    _log.warning("an interrupted commit is undone, except for the files in '%s'", place)
    return place


def _is_final(error: Exception) -> bool:
    """Return whether a change of another process is the reason, so that a retry fails, too."""
    if isinstance(error, OSError):
        return error.errno in NOT_AS_IT_WAS
    return isinstance(error, Conflict | Denied)


@contextmanager
def _tree(files: int, record: JournalHeader) -> Iterator[Tree]:
    """Open the tree of the commit. Raises OSError, Conflict."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.dup(files) if record.host is None else os.open(record.host, flags)
    with Tree(fd, view=WORKSPACE, owner=record.owner) as tree:
        if os.fstat(tree.fd).st_ino != record.inode:
            raise Conflict(f"'{record.host or WORKSPACE}' is now another directory")
        yield tree
