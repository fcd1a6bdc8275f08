"""Which sentence goes with which error; most get none."""

import errno
import os

import pytest

from sbx.guest.kernel.errors import reason


def refused(number: int, *names: str) -> OSError:
    first, second = (*names, None, None)[:2]
    return OSError(number, os.strerror(number), first, None, second)


def wrapped(by: BaseException, cause: BaseException) -> BaseException:
    by.__cause__ = cause
    return by


UPLOAD = "/workspace/uploads/temparea/a.csv"
EITHER_WAY = [
    (refused(errno.EROFS, "/etc/x"), True),
    (refused(errno.EACCES, UPLOAD), True),
    (refused(errno.EXDEV, UPLOAD, "mine.csv"), True),
    (refused(errno.EXDEV, "mine.csv", UPLOAD), True),
    (refused(errno.EACCES, "/uploads/a.csv"), True),
    (wrapped(RuntimeError("cannot save"), refused(errno.EROFS)), True),
    (refused(errno.ENOENT, UPLOAD), False),
    (refused(errno.EXDEV, "a", "/tmp/b"), False),
    (refused(errno.ENOSPC), False),
    (ValueError("Read-only file system"), False),
]


@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.parametrize(("error", "explained"), EITHER_WAY)
def test_what_is_read_only_is_told_under_every_policy(
    error: BaseException, explained: bool, processes: bool
) -> None:
    said = reason(error, processes=processes)
    assert (said is not None and said.startswith("Only /workspace")) == explained


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_what_is_not_permitted_is_told_where_only_computing_is(number: int) -> None:
    said = reason(refused(number), processes=False)
    assert said is not None
    assert said.startswith("The policy of this sandbox allows no processes")
    assert reason(refused(number), processes=True) is None


def test_an_error_in_a_circle_of_causes_is_an_error() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert reason(one, processes=False) is None
