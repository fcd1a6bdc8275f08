"""Undo a commit that a kill interrupted, before the files are used again.

No client received a success of this commit. In a host directory, the owner may have continued to
work: the owner's files stay. The files that they displace are put next to them, in a directory
whose name is `.sbx-` and 32 hex digits.
"""

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sbx.errors import Conflict, Denied, SbxError
from sbx.linux.renameat2 import rename_new
from sbx.linux.syncfs import syncfs
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.rmtree import remove_held, remove_tree
from sbx.workspace.safe_open import opener
from sbx.workspace.snapshots.journal import JournalFile, JournalHeader, unfinished
from sbx.workspace.snapshots.recover import not_put_back, undo
from sbx.workspace.snapshots.staging import NOT_AS_IT_WAS, Stage
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0


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
    try:
        place = None
        if record.intents:
            place = _undo(Stage(tree, fd), beside, record)
            syncfs(fd)
        if place is None:
            remove_held(fd, beside, record.stage, _REMOVE_S)
        entry.forget()
    finally:
        os.close(fd)


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
