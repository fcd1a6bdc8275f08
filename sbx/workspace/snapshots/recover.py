"""Undo the executed steps of a commit, also after its process was killed.

A step is undone if the tree and the stage show that it was executed. So undoing is idempotent: it
can be interrupted, and continued by another process. If another process has put a file into the
place of a removed node, that file stays, and the removed node stays in the stage.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sbx.errors import Conflict, Denied, SbxError
from sbx.linux.renameat2 import exchange
from sbx.workspace.snapshots.journal_records import JournalStep, in_order
from sbx.workspace.snapshots.staging import Stage, found, stamp


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
        status = stage.staged(intent.made)
        if status is not None and not _is_unchanged(status, intent):
            kept.append(intent.made)
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
    if stage.staged(intent.made) is not None or not _has_inode(_current(stage, intent), intent.new):
        return
    if not intent.is_directory:
        stage.take(intent.change, intent.made)
        return
    with stage.above(intent.change) as (parent, last):
        os.rmdir(last, dir_fd=parent)


def _change_back(stage: Stage, intent: JournalStep) -> None:
    if stage.staged(intent.aside) is not None:  # the file system cannot exchange names
        _take_back(stage, intent)
        stage.put(intent.aside, intent.change)
        return
    staged = stage.staged(intent.made)
    status = _current(stage, intent)
    if staged is None or _has_inode(staged, intent.new) or _has_inode(status, intent.old):
        return  # not exchanged, even if code inside put another inode into a stage in the tree
    if not _has_inode(status, intent.new):
        path = stage.target.shown(intent.change.relative)
        raise Conflict(f"another process replaced '{path}'", code="workspace_changed")
    with stage.above(intent.change) as (parent, last):
        exchange(stage.fd, intent.made, parent, last)


def _stamp_back(stage: Stage, intent: JournalStep) -> None:
    before, after = intent.change.before, intent.change.after
    assert before is not None
    assert after is not None
    if not _has_inode(_current(stage, intent), intent.old):
        return
    with stage.held(intent.change) as fd:
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
            return found(parent, last)
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
