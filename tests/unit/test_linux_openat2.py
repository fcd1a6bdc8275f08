"""The syscall itself: what it opens, what it refuses, and that errors name the call."""

import errno
import os
from pathlib import Path

import pytest

from sbx.linux import libc, openat2

pytestmark = pytest.mark.skipif(not openat2.supported(), reason="this linux has no openat2")


def test_the_fd_is_close_on_exec(tmp_path: Path) -> None:
    fd = openat2.openat2(-100, bytes(tmp_path), os.O_PATH)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "resolve", "number"),
    [
        (b"..", openat2.RESOLVE_BENEATH, errno.EXDEV),
        (b"/etc", openat2.RESOLVE_BENEATH, errno.EXDEV),
        (b"link", openat2.RESOLVE_NO_SYMLINKS, errno.ELOOP),
        (b"missing", 0, errno.ENOENT),
        (b".", 1 << 60, errno.EINVAL),
    ],
)
def test_refusals_come_as_oserror_that_names_the_call(
    tmp_path: Path, path: bytes, resolve: int, number: int
) -> None:
    (tmp_path / "link").symlink_to("/etc")
    root = os.open(tmp_path, os.O_PATH)
    with pytest.raises(OSError, match="openat2") as raised:
        openat2.openat2(root, path, os.O_RDONLY, resolve=resolve)
    os.close(root)
    assert raised.value.errno == number


def test_a_function_of_libc_that_fails_is_named() -> None:
    with pytest.raises(NotADirectoryError, match="chdir"):
        libc.call("chdir", b"/dev/null")
