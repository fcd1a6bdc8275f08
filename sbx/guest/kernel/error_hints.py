"""Explain which wall refused a call, for the reader of a cell's error: Linux only gives a number.

This is help for the user, like the import rules. It names the alternatives that the policy allows.
The policy was probably the reason, but not certainly: a file may also lack a permission bit.
"""

import errno
import os
from collections.abc import Iterator

_READ_ONLY = (
    "Only /workspace and /tmp can be written to; files that the user uploaded are read-only and"
    " stay unchanged: work on a copy."
)
_COMPUTING_ONLY = (
    "The policy of this sandbox allows no processes, no new sockets, no shared memory or message"
    " queues of System V or POSIX, and no links or devices; threads are fine, and files can be"
    " written in /workspace and /tmp."
)
_DENIED = frozenset((errno.EPERM, errno.EACCES, errno.ENOSYS))
_OF_AN_UPLOAD = frozenset((errno.EPERM, errno.EACCES, errno.EXDEV))
_UPLOADS = ("/workspace/uploads/temparea", "/uploads")
_CHAIN_MAX = 8


def reason(error: BaseException, *, processes: bool) -> str | None:
    """Return the explanation of an error by which Linux refused a call; None for any other error.

    `processes`: whether the policy lets a cell start processes.
    """
    for cause in _chain(error):
        if not isinstance(cause, OSError):
            continue
        if cause.errno == errno.EROFS or (cause.errno in _OF_AN_UPLOAD and _names_an_upload(cause)):
            return _READ_ONLY
        if cause.errno in _DENIED and not processes:
            return _COMPUTING_ONLY
    return None


def _names_an_upload(error: OSError) -> bool:
    paths = (error.filename, error.filename2)
    return any(
        os.path.abspath(path).startswith(_UPLOADS) for path in paths if isinstance(path, str)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: a library wraps the PermissionError in its own error."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return
        yield error
        wrapped = getattr(error, "reason", None)  # used by urllib
        if isinstance(wrapped, BaseException):
            error = wrapped
        else:
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
