"""Undo what was done of a commit, however far it came, also after who did it was killed.

Each step is undone where the tree and the stage show that it was done: so it may be undone by
halves, by several one after the other, and again, to the same end. What somebody else has put into
the place of something that was taken away stays, and what was taken away stays in the stage.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sbx.errors import Conflict, Denied, SbxError
from sbx.linux.renameat2 import exchange
from sbx.workspace.intents import Intent, in_order
from sbx.workspace.stage import Stage, found, stamp


def undo(stage: Stage, intents: Sequence[Intent]) -> list[Exception]:
    """Make it what it was, last first; what failed of that, of which nothing is thrown away."""
    failed: list[Exception] = []
    for one in sorted(intents, key=lambda one: one.change.relative):
        if one.is_directory:
            _lift(stage, one)
    for act, one in reversed(in_order(intents)):
        if (back := _BACK.get(act)) is not None:
            try:
                back(stage, one)
            except (OSError, SbxError) as error:
                failed.append(error)
    return failed


def not_put_back(stage: Stage, intents: Sequence[Intent]) -> list[bytes]:
    """The names in the stage of what is not ours to throw away, once all is undone: what was there
    before, and what was made and then written by somebody else."""
    kept = [one.aside for one in intents if stage.staged(one.aside) is not None]
    for one in intents:
        there = stage.staged(one.made)
        if there is not None and not _as_made(there, one):
            kept.append(one.made)
    return kept


def _lift(stage: Stage, one: Intent) -> None:
    """Let us write into it, where it is there; what needed the right says where that failed."""
    with suppress(OSError, Denied):
        stage.chmod(one.change, 0o700, keep=0o777)


def _mode_back(stage: Stage, one: Intent) -> None:
    there = _there(stage, one)
    made_again = one.change.after is None and there is not None and stat.S_ISDIR(there.st_mode)
    if made_again or _is(there, one.old):
        stage.chmod(one.change, one.mode)


def _put_back(stage: Stage, one: Intent) -> None:
    if stage.staged(one.aside) is not None:
        stage.put(one.aside, one.change)


def _make_again(stage: Stage, one: Intent) -> None:
    if _there(stage, one) is None:
        stage.make_directory(one.again)
        stage.put(one.again, one.change)


def _take_back(stage: Stage, one: Intent) -> None:
    if stage.staged(one.made) is not None or not _is(_there(stage, one), one.new):
        return
    if not one.is_directory:
        stage.take(one.change, one.made)
        return
    with stage.above(one.change) as (parent, last):
        os.rmdir(last, dir_fd=parent)


def _change_back(stage: Stage, one: Intent) -> None:
    if stage.staged(one.aside) is not None:  # a file system that cannot exchange
        _take_back(stage, one)
        stage.put(one.aside, one.change)
        return
    staged = stage.staged(one.made)
    there = _there(stage, one)
    if staged is None or _is(staged, one.new) or _is(there, one.old):
        return  # not exchanged, even if code inside put another inode into a stage in the tree
    if not _is(there, one.new):
        path = stage.target.shown(one.change.relative)
        raise Conflict(f"'{path}' was replaced by somebody else", code="workspace_changed")
    with stage.above(one.change) as (parent, last):
        exchange(stage.fd, one.made, parent, last)


def _stamp_back(stage: Stage, one: Intent) -> None:
    before, after = one.change.before, one.change.after
    assert before is not None
    assert after is not None
    if not _is(_there(stage, one), one.old):
        return
    with stage.held(one.change) as fd:
        now = os.fstat(fd)
        ours = (now.st_ino, now.st_size) == (one.old, before.size)
        if ours and now.st_mtime_ns in (before.mtime_ns, after.mtime_ns):
            stamp(fd, before)


_BACK: Mapping[str, Callable[[Stage, Intent], None]] = {
    "lift": _mode_back,
    "take away": _put_back,
    "remove": _make_again,
    "put": _take_back,
    "replace": _change_back,
    "stamp": _stamp_back,
}


def _there(stage: Stage, one: Intent) -> os.stat_result | None:
    """What has the name now."""
    try:
        with stage.above(one.change) as (parent, last):
            return found(parent, last)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is(there: os.stat_result | None, inode: int) -> bool:
    """Compare inode numbers. A file system may give the number of a deleted file to a new one: such
    a file is then taken for ours and moved to the stage, where `not_put_back` keeps it."""
    return there is not None and there.st_ino == inode


def _as_made(there: os.stat_result, one: Intent) -> bool:
    after = one.change.after
    if after is None or not _is(there, one.new):
        return False
    return after.kind != "file" or (there.st_size, there.st_mtime_ns) == (
        after.size,
        after.mtime_ns,
    )
