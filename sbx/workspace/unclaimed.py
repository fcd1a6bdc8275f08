"""Directories of sandboxes and conversations that no row of the store names.

    {data}/unclaimed/{time}-{sandbox}/                   a sandbox
    {data}/unclaimed/{time}-{sandbox}-{conversation}/    a conversation of a sandbox that has a row

They exist if the store is older than the data directory, or was replaced. The service moves them
here, and only an operator removes them. `unclaimed` has the mode 0700 and belongs to the account of
the service. So no jail can enter it, even a jail with the host uid of the files in it.

A directory that certainly has no file of a user is not kept. A prewarmed sandbox without a user has
empty directories only. A frozen copy has the directory `copy` in it. A sandbox that ends with its
process, for example the sandbox of a project, has the directory `temporary`.
"""

import errno
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from sbx.errors import NotFound
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import rename_new
from sbx.workspace.disk_usage import measure
from sbx.workspace.errors import translated
from sbx.workspace.rmtree import remove_tree
from sbx.workspace.safe_open import opener

UNCLAIMED = "unclaimed"
COPY = "copy"
TEMPORARY = "temporary"
OPAQUE_NAME = re.compile("[0-9a-f]{32}")  # the names of directories of sandboxes and conversations
_OPAQUE = OPAQUE_NAME.pattern
_MOMENT = "([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z"
_NAME = re.compile(rf"{_MOMENT}-({_OPAQUE})(?:-({_OPAQUE}))?")
_TIME = "%Y%m%dT%H%M%SZ"
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTRIES_MAX = 200_000
_MEASURE_S = 5.0

Frame: TypeAlias = "Mapping[str, Frame]"  # directories in a directory
_CONVERSATION: Frame = {
    "staging": {},
    "files": {"uploads": {"temparea": {}, "generated": {}}, "shared": {}},
    "uploads": {},
    "commands": {},
}


class UnclaimedDirectory(Struct, frozen=True):
    """An unclaimed directory. `sandbox` and `conversation` are its former opaque names. `uid` owns
    the files on the host, if they are of one sandbox that ran as another user."""

    id: str
    sandbox: str
    conversation: str | None
    moved_at: str
    uid: int | None = None
    files: int | None = None
    bytes: int | None = None


def new_id(at: float, sandbox: str, conversation: str | None) -> str:
    moment = datetime.fromtimestamp(at, UTC).strftime(_TIME)
    return "-".join(part for part in (moment, sandbox, conversation) if part)


def move(parent: int, name: str, unclaimed: int, item_id: str) -> None:
    """Move the directory `name` of the directory fd `parent` here. Raises OSError."""
    rename_new(parent, os.fsencode(name), unclaimed, os.fsencode(item_id))


def items(data: Path) -> list[UnclaimedDirectory]:
    """Return the unclaimed directories, the oldest first, without owner and size."""
    with ExitStack() as stack, translated(str(data / UNCLAIMED)):
        try:
            top = _top(stack, data)
        except FileNotFoundError:
            return []
        return [
            _item(match) for name in sorted(os.listdir(top)) if (match := _NAME.fullmatch(name))
        ]


def measured(data: Path) -> list[UnclaimedDirectory]:
    """Return `items` with owner and size, each None if it cannot be determined in time."""
    with ExitStack() as stack, translated(str(data / UNCLAIMED)):
        directories = items(data)
        top = _top(stack, data) if directories else -1
        return [_measured(item, top) for item in directories]


def remove(data: Path, item_id: str, deadline_s: float) -> bool:
    """Remove an unclaimed directory. Raises NotFound.

    Return False if its path is gone but the service has to remove the rest, or if it could not be
    moved.
    """
    with ExitStack() as stack, translated(str(data / UNCLAIMED)):
        top = _require(stack, data, item_id)
        trash = _closing(stack, os.open(data / "removed", _LIST))
        return remove_tree(top, item_id, deadline_s, trash=trash)


def bring_back(data: Path, item: UnclaimedDirectory) -> bool:
    """Move a directory back to its former path.

    Return False if that path exists, or if its sandbox has no directory.
    """
    with ExitStack() as stack, translated(str(data / UNCLAIMED)):
        top = _require(stack, data, item.id)
        to = _closing(stack, os.open(data / "sandboxes", _LIST))
        try:
            if item.conversation is not None:
                to = _closing(stack, opener()(to, (item.sandbox,), _LIST))
            name = item.conversation or item.sandbox
            rename_new(top, os.fsencode(item.id), to, os.fsencode(name))
        except (FileExistsError, FileNotFoundError):
            return False
        return True


def has_no_files(sandboxes: int, sandbox: str, conversation: str | None = None) -> bool:
    """Return whether a sandbox, or one conversation of it, certainly has no file of a user.

    That is true if the directory is gone, is a copy or temporary, or has only directories that sbx
    creates. Return False if it cannot be read. `sandboxes` is the directory fd of all sandboxes.
    Raises OSError if this process has no descriptor or memory left. The caller can try again later.
    """
    names = (sandbox,) if conversation is None else (sandbox, conversation)
    try:
        directory = opener()(sandboxes, names, _LIST)
    except FileNotFoundError:
        return True
    except OSError as error:
        return _cannot_be_seen(error)
    try:
        if conversation is not None:
            return _is_copy_or_frame(directory)
        return TEMPORARY in os.listdir(directory) or _has_frames(directory)
    except OSError as error:
        return _cannot_be_seen(error)
    finally:
        os.close(directory)


def _cannot_be_seen(error: OSError) -> Literal[False]:
    if error.errno in _EXHAUSTED:
        raise error
    return False


def _has_frames(sandbox: int) -> bool:
    for name in os.listdir(sandbox):
        with closing(opener()(sandbox, (name,), _LIST)) as below:
            if name == "shared":
                empty = not os.listdir(below)
            else:
                empty = bool(OPAQUE_NAME.fullmatch(name)) and _is_copy_or_frame(below)
        if not empty:
            return False
    return True


def _is_copy_or_frame(conversation: int) -> bool:
    return COPY in os.listdir(conversation) or _is_frame(conversation, _CONVERSATION)


def _is_frame(directory: int, frame: Frame) -> bool:
    with os.scandir(directory) as entries:  # there may be a million
        for entry in entries:
            if entry.name not in frame:
                return False
            with closing(
                opener()(directory, (entry.name,), _LIST)
            ) as below:  # ENOTDIR if it is not a directory
                if not _is_frame(below, frame[entry.name]):
                    return False
    return True


def _item(match: re.Match[str]) -> UnclaimedDirectory:
    year, month, day, hour, minute, second, sandbox, conversation = match.groups()
    moved_at = f"{year}-{month}-{day}T{hour}:{minute}:{second}Z"
    return UnclaimedDirectory(match[0], sandbox, conversation, moved_at)


def _measured(item: UnclaimedDirectory, top: int) -> UnclaimedDirectory:
    with suppress(OSError), ExitStack() as stack:
        directory = _closing(stack, opener()(top, (item.id,), _LIST))
        usage = measure(opener(), directory, max_entries=_ENTRIES_MAX, deadline_s=_MEASURE_S)
        if usage.complete:
            item = replace(item, files=usage.files, bytes=usage.bytes)
        names = ["."] if item.conversation is not None else os.listdir(directory)
        for name in filter(re.compile(rf"\.|{_OPAQUE}").fullmatch, names):
            with suppress(FileNotFoundError):
                status = os.stat(f"{name}/files", dir_fd=directory, follow_symlinks=False)
                return replace(item, uid=status.st_uid)
    return item


def _require(stack: ExitStack, data: Path, item_id: str) -> int:
    """Return the directory fd of `unclaimed`, which has the item. Raises NotFound."""
    with suppress(FileNotFoundError):
        top = _top(stack, data)
        if _NAME.fullmatch(item_id):
            os.stat(item_id, dir_fd=top, follow_symlinks=False)
            return top
    raise NotFound(
        f"unclaimed directory {item_id!r} does not exist",
        code="directory_not_found",
        hint="list them: sbx store unclaimed",
    )


def _top(stack: ExitStack, data: Path) -> int:
    return _closing(stack, os.open(data / UNCLAIMED, _LIST))


def _closing(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd
