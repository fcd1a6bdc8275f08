"""What becomes of a commit that a kill cut off: it is undone before the files are used again.

Nobody was told that it was done, so it was not. In a directory of the host its owner may have gone
on meanwhile: what is theirs by now stays, and what it kept out lies beside it, in a directory whose
name is `.sbx-` and 32 hex digits.
"""

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sbx.errors import Conflict, Denied, SbxError
from sbx.linux.renameat2 import rename_new
from sbx.linux.syncfs import syncfs
from sbx.workspace.beneath import opener
from sbx.workspace.journal import Entry, Record, unforgotten
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.removal import remove_held, remove_tree
from sbx.workspace.stage import NOT_AS_IT_WAS, Stage
from sbx.workspace.tree import Tree
from sbx.workspace.undoing import not_put_back, undo

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0


def roll_back(staging: int, files: int) -> bool:
    """Undo every commit that was cut off in a conversation that nobody uses, and say whether none
    is left; one whose directory of the host is not there waits for it.

    `staging` and `files` are its directories, by fds (O_PATH will do). It may itself be killed, and
    begun anew. Raises OSError where nothing can be looked at.
    """
    left = False
    for entry in unforgotten(staging):
        try:
            if entry.is_empty():
                entry.forget()
                continue
            record = entry.read()
            with _tree(files, record) as tree:
                _roll_back(tree, tree.fd if record.in_tree else staging, entry, record)
        except (OSError, SbxError, ValueError, TypeError, LookupError) as error:
            _log.error("a commit that was cut off cannot be undone yet: %s", error)
            left = True
    return not left


def new_name() -> str:
    """For a stage, which the code inside may see."""
    return f".sbx-{secrets.token_hex(16)}"


def set_aside(stage: Stage, beside: int, name: str, kept: Sequence[bytes]) -> str:
    """Leave what is `kept` of the stage in the tree, for whom it belongs to; where that is. Raises
    OSError.

    `beside`: the directory fd in which the stage has the name; it may be the tree itself.
    """
    for one in os.listdir(stage.fd):
        if os.fsencode(one) not in kept:
            remove_tree(stage.fd, one, _REMOVE_S)
    if stage.target.owner is not None:
        os.fchown(stage.fd, *stage.target.owner)
    place = new_name()
    rename_new(beside, name.encode(), stage.target.fd, place.encode())
    return stage.target.shown((place,))


def _roll_back(tree: Tree, beside: int, entry: Entry, record: Record) -> None:
    """Raises what is in the way, and perhaps not the next time."""
    fd = _held(beside, record.stage)
    if fd is None:
        entry.forget()
        return
    try:
        place = None
        if record.intents:
            place = _undone(Stage(tree, fd), beside, record)
            syncfs(fd)
        if place is None:
            remove_held(fd, beside, record.stage, _REMOVE_S)
        entry.forget()
    finally:
        os.close(fd)


def _held(beside: int, name: str) -> int | None:
    """The stage, None where it is not made yet, or away already, or another one lies in its place:
    in a tree code inside may have put one there, for us to give away what lies in it."""
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


def _undone(stage: Stage, beside: int, record: Record) -> str | None:
    """Where it lies what could not be put back."""
    failed = undo(stage, record.intents)
    for error in failed:
        if not _is_final(error):
            raise error
    kept = not_put_back(stage, record.intents)
    if not kept:
        _log.warning("a commit of %d changes was cut off, and is undone", len(record.intents))
        return None
    place = set_aside(stage, beside, record.stage, kept)
    _log.warning("a commit was cut off, and is undone but for what is now in '%s'", place)
    return place


def _is_final(error: Exception) -> bool:
    """Whether somebody else's doing is in the way, which another try would find there again."""
    if isinstance(error, OSError):
        return error.errno in NOT_AS_IT_WAS
    return isinstance(error, Conflict | Denied)


@contextmanager
def _tree(files: int, record: Record) -> Iterator[Tree]:
    """The tree that it was. Raises OSError, Conflict."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.dup(files) if record.host is None else os.open(record.host, flags)
    with Tree(fd, view=WORKSPACE, owner=record.owner) as tree:
        if os.fstat(tree.fd).st_ino != record.inode:
            raise Conflict(f"'{record.host or WORKSPACE}' is another directory by now")
        yield tree
