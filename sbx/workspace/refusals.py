"""What linux answered about a file, said in sbx's own errors: the one table from errno to them."""

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
        "is or passes through a symlink, never followed from outside",
    ),
    errno.EXDEV: ("mount_point", "lies on another mount"),
    errno.ENOTDIR: ("not_a_directory", "passes through something that is not a directory"),
    errno.EISDIR: ("is_a_directory", "is a directory"),
    errno.ENAMETOOLONG: ("name_too_long", "has a name that is too long"),
    errno.ENXIO: ("not_a_file", "is not a regular file"),
    errno.EINVAL: ("path_traversal", "is not a path the workspace can have"),
}


_HINTS = {
    "empty_path": "name a file, for instance data.csv",
    "absolute_path": "name it relative to /workspace, or with /workspace in front",
    "path_traversal": "use a path that stays below /workspace",
    "null_byte": "use a name of printable characters",
    "control_character": "use a name of printable characters",
    "not_utf8": "use a name that is UTF-8",
    "name_too_long": "use shorter names: 255 bytes each, 4095 for the whole path",
    "separator": "give the file's own name, without a directory",
    "reserved": "choose another name: uploads and shared are part of every workspace",
    "read_only": "write elsewhere below /workspace, or put an upload of that name",
    "symlink": "name the file itself; links are followed only by the code inside",
    "hardlink": "copy the file, so that it has one name only",
    "not_a_file": "name a regular file",
    "is_a_directory": "name a file in it, or list the directory",
    "not_a_directory": "name a directory",
    "into_itself": "choose a target that does not lie in what is copied or moved",
    "mount_point": "name something that lies in the workspace itself",
}


def invalid_path(reason: str, sentence: str) -> InvalidPath:
    """The refusal of a path: `reason` is for programs, and has its hint."""
    return InvalidPath(
        sentence, hint=_HINTS.get(reason), details={"field": "path", "reason": reason}
    )


def wrong_path(path: str, reason: str, what: str) -> InvalidPath:
    return invalid_path(reason, f"'{path}' {what}")


def not_a_file(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.ENXIO])


def is_a_directory(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.EISDIR])


def too_large(path: str, limit: int) -> TooLarge:
    return TooLarge(
        f"'{path}' is larger than the limit of {limit} bytes",
        code="file_too_large",
        hint="send less, or ask for a policy with a higher limit",
        details={"limit": limit},
    )


def not_found(path: str) -> NotFound:
    return NotFound(
        f"there is no '{path}'",
        code="file_not_found",
        hint="check the path, or list its directory to see what is there",
        details={"path": path},
    )


def file_exists(path: str) -> Conflict:
    return Conflict(
        f"'{path}' is there already",
        code="file_exists",
        hint="choose another name, or ask to overwrite a file",
        details={"path": path},
    )


def translate(error: OSError, path: str) -> SbxError:
    """The error of ours for what linux said about `path`, as the code inside would name it."""
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
                f"there is no space left to write '{path}'",
                code="no_space",
                hint="free space on the disk of the data directory, or delete files",
            )
        case errno.EFBIG:
            return TooLarge(
                f"'{path}' is larger than files may be here",
                code="file_too_large",
                hint="write less, or in several files",
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
        hint="see the host's own log for the disk of the data directory",
    )


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn an OSError of the block into the error of ours; `path` is for the sentence."""
    try:
        yield
    except OSError as error:
        raise translate(error, path) from error
