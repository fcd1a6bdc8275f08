"""Which wall said no, in words, for whoever reads a cell's error: linux answers by numbers.

A courtesy like the import rules. It says what the policy lets a cell do instead; that the policy
was the reason is likely, not certain: a file may also lack a permission bit.
"""

import errno
import os
from collections.abc import Iterator

_READ_ONLY = (
    "Only /workspace and /tmp can be written to; what the user uploaded is read-only and stays as"
    " it is: work on a copy."
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
    """The sentence that goes with an error by which linux refused; None for any other error.

    `processes`: whether the policy lets a cell start any.
    """
    for one in _chain(error):
        if not isinstance(one, OSError):
            continue
        if one.errno == errno.EROFS or (one.errno in _OF_AN_UPLOAD and _names_an_upload(one)):
            return _READ_ONLY
        if one.errno in _DENIED and not processes:
            return _COMPUTING_ONLY
    return None


def _names_an_upload(error: OSError) -> bool:
    named = (error.filename, error.filename2)
    return any(
        os.path.abspath(path).startswith(_UPLOADS) for path in named if isinstance(path, str)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what caused it: a library wraps the PermissionError in one of its own."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return
        yield error
        wrapped = getattr(error, "reason", None)  # urllib's
        if isinstance(wrapped, BaseException):
            error = wrapped
        else:
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
