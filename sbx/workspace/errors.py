"""Translate errors of Linux about files into errors of sbx: the only table of errno values."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sbx.errors import (
    Conflict,
    Denied,
    InvalidPath,
    NotFound,
    SbxError,
    TooLarge,
    Unavailable,
    out_of_files,
)

_WRONG_PATH = {
    errno.ELOOP: (
        "symlink",
        "is or passes through a symlink, which the host never follows",
    ),
    errno.EXDEV: ("mount_point", "lies on another mount"),
    errno.ENOTDIR: ("not_a_directory", "passes through something that is not a directory"),
    errno.EISDIR: ("is_a_directory", "is a directory"),
    errno.ENAMETOOLONG: ("name_too_long", "has a name that is too long"),
    errno.ENXIO: ("not_a_file", "is not a regular file"),
    errno.EINVAL: ("path_traversal", "is not a valid path of the workspace"),
}


_HINTS = {
    "empty_path": "name a file, for instance data.csv",
    "absolute_path": "use a path relative to /workspace, or one that begins with /workspace",
    "path_traversal": "use a path that stays below /workspace",
    "null_byte": "use a name of printable characters",
    "control_character": "use a name of printable characters",
    "not_utf8": "use a name that is UTF-8",
    "name_too_long": "use shorter names: 255 bytes each, 4095 for the whole path",
    "separator": "use the name of the file, without a directory",
    "reserved": "choose another name: uploads and shared are part of every workspace",
    "read_only": "write elsewhere below /workspace, or upload a file of that name",
    "symlink": "name the file itself; only the code inside follows links",
    "hardlink": "copy the file, so that it has only one name",
    "not_a_file": "name a regular file",
    "is_a_directory": "name a file in it, or list the directory",
    "not_a_directory": "name a directory",
    "into_itself": "choose a target outside of the directory that is copied or moved",
    "mount_point": "name a path that is in the workspace itself",
}


def invalid_path(reason: str, sentence: str) -> InvalidPath:
    """Return the error for a path. `reason` is for programs, and selects the hint."""
    return InvalidPath(
        sentence, hint=_HINTS.get(reason), details={"field": "path", "reason": reason}
    )


def wrong_path(path: str, reason: str, what: str) -> InvalidPath:
    return invalid_path(reason, f"'{path}' {what}")


def not_a_file(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.ENXIO])


def is_a_directory(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.EISDIR])


def workspace_full(path: str, limit: int, left: int) -> TooLarge:
    return TooLarge(
        f"'{path}' does not fit into the workspace: {left} of its {limit} bytes are left",
        code="file_too_large",
        hint="delete files, send less, or use a workspace with a higher limit",
        details={"limit": limit, "left": left},
    )


def too_large(path: str, limit: int) -> TooLarge:
    return TooLarge(
        f"'{path}' is larger than the limit of {limit} bytes",
        code="file_too_large",
        hint="send less, or use a policy with a higher limit",
        details={"limit": limit},
    )


def not_found(path: str) -> NotFound:
    return NotFound(
        f"'{path}' does not exist",
        code="file_not_found",
        hint="check the path, or list its directory",
        details={"path": path},
    )


def file_exists(path: str) -> Conflict:
    return Conflict(
        f"'{path}' exists already",
        code="file_exists",
        hint="choose another name, or request to overwrite the file",
        details={"path": path},
    )


def translate(error: OSError, path: str) -> SbxError:
    """Return the error of sbx for an OSError about `path`, a path as the code inside sees it."""
    if (refusal := out_of_files(error)) is not None:
        return refusal
    number = error.errno or errno.EIO
    if number in _WRONG_PATH:
        return wrong_path(path, *_WRONG_PATH[number])
    match number:
        case errno.ENOENT:
            return not_found(path)
        case errno.EEXIST:
            return file_exists(path)
        case errno.ENOSPC | errno.EDQUOT:
            return Unavailable(
                f"the disk has no space left to write '{path}'",
                code="no_space",
                hint="free space on the disk of the data directory, or delete files",
            )
        case errno.EFBIG:
            return TooLarge(
                f"'{path}' would exceed the maximum size of a file",
                code="file_too_large",
                hint="write less, or use several files",
            )
        case errno.EAGAIN:
            return Conflict(
                f"'{path}' is being moved or is locked by code inside; try again",
                code="file_busy",
                hint="try again when the code inside has finished with it",
            )
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.EBUSY | errno.ENOTEMPTY:
            return Denied(
                f"'{path}' or its directory does not permit that: {os.strerror(number)}",
                code="file_not_permitted",
                hint="have the code inside change its permissions (chmod), or choose another place",
            )
    return Unavailable(
        f"the disk failed at '{path}': {os.strerror(number)}",
        code="io_error",
        hint="check the log of the host for errors of the disk with the data directory",
    )


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn an OSError of the block into an error of sbx. `path` is for its message."""
    try:
        yield
    except OSError as error:
        raise translate(error, path) from error
