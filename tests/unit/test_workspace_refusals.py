"""What linux says about a file comes out as the error that tells a caller what to do."""

import errno

import pytest

from sbx.errors import Conflict, Denied, InvalidPath, NotFound, SbxError, TooLarge, Unavailable
from sbx.workspace.errors import translate, translated


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOENT, NotFound, "file_not_found"),
        (errno.ENOSPC, Unavailable, "no_space"),
        (errno.EDQUOT, Unavailable, "no_space"),
        (errno.EFBIG, TooLarge, "file_too_large"),
        (errno.EAGAIN, Conflict, "file_busy"),
        (errno.EACCES, Denied, "file_not_permitted"),
        (errno.EMFILE, Unavailable, "too_many_open_files"),
        (errno.EIO, Unavailable, "io_error"),
        (errno.ELOOP, InvalidPath, "invalid_path"),
    ],
)
def test_errno_becomes_an_error_with_a_stable_code(
    number: int, kind: type[SbxError], code: str
) -> None:
    error = translate(OSError(number, "x"), "/workspace/a")
    assert type(error) is kind
    assert error.code == code
    assert "/workspace/a" in error.message or code == "too_many_open_files"


def test_the_cause_stays_attached() -> None:
    cause = OSError(errno.EIO, "x")
    with pytest.raises(Unavailable) as raised, translated("/workspace/a"):
        raise cause
    assert raised.value.__cause__ is cause
