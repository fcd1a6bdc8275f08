"""What linux answered about a file, said in sbx's own errors: the one table from errno to them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sbx.errors import Conflict, Denied, InvalidPath, NotFound, SbxError, TooLarge, Unavailable

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


def wrong_path(path: str, reason: str, what: str) -> InvalidPath:
    return InvalidPath(f"'{path}' {what}", details={"field": "path", "reason": reason})


def not_a_file(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.ENXIO])


def is_a_directory(path: str) -> InvalidPath:
    return wrong_path(path, *_WRONG_PATH[errno.EISDIR])


def too_large(path: str, limit: int) -> TooLarge:
    return TooLarge(
        f"'{path}' is larger than the limit of {limit} bytes",
        code="file_too_large",
        details={"limit": limit},
    )


def not_found(path: str) -> NotFound:
    return NotFound(f"there is no '{path}'", code="file_not_found", details={"path": path})


def translate(error: OSError, path: str) -> SbxError:
    """The error of ours for what linux said about `path`, as the code inside would name it."""
    number = error.errno or errno.EIO
    if number in _WRONG_PATH:
        return wrong_path(path, *_WRONG_PATH[number])
    match number:
        case errno.ENOENT:
            return not_found(path)
        case errno.ENOSPC | errno.EDQUOT:
            return Unavailable(
                f"there is no space left to write '{path}'",
                code="no_space",
                hint="free space on the disk of the data directory, or delete files",
            )
        case errno.EFBIG:
            return TooLarge(f"'{path}' is larger than files may be here", code="file_too_large")
        case errno.EAGAIN:
            return Conflict(
                f"'{path}' is being moved or is locked by code inside; try again",
                code="file_busy",
            )
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.EBUSY | errno.ENOTEMPTY:
            return Denied(
                f"'{path}' or its directory does not permit that: {os.strerror(number)}",
                code="file_not_permitted",
            )
        case errno.EMFILE | errno.ENFILE:
            return Unavailable(
                "this process has too many open files",
                code="too_many_open_files",
                hint="raise RLIMIT_NOFILE, or close sandboxes that are not in use",
            )
    return Unavailable(
        f"the disk failed at '{path}': {os.strerror(number)}",
        code="io_error",
    )


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn an OSError of the block into the error of ours; `path` is for the sentence."""
    try:
        yield
    except OSError as error:
        raise translate(error, path) from error
