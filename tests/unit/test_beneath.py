"""A path that does not hold still is tried again, and not without end."""

import errno
import os
import stat
from pathlib import Path

import pytest

from sbx.linux import openat2
from sbx.workspace import safe_open


def test_refusals_for_a_moment_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux answers EAGAIN where `..` races with a rename, or a lease has to be broken."""
    (tmp_path / "file").touch()
    left = 3
    real = openat2.openat2

    def moving(*args: int, **named: int) -> int:
        nonlocal left
        if left:
            left -= 1
            raise BlockingIOError(errno.EAGAIN, "again")
        return real(*args, **named)  # type: ignore[arg-type]

    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        monkeypatch.setattr(openat2, "openat2", moving)
        os.close(safe_open.by_openat2(root, ("file",), os.O_RDONLY))
        assert left == 0
        left = 1 << 30
        with pytest.raises(OSError, match="keeps changing") as raised:
            safe_open.by_openat2(root, ("file",), os.O_RDONLY)
        assert raised.value.errno == errno.EAGAIN
    finally:
        os.close(root)


@pytest.mark.parametrize("opener", [safe_open.by_openat2, safe_open.by_walk])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH, os.O_PATH | os.O_DIRECTORY])
def test_link_is_opened_only_by_name_and_never_followed(
    tmp_path: Path, opener: safe_open.Opener, flags: int
) -> None:
    (tmp_path / "link").symlink_to("/etc")
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match=r"symlink|symbolic") as raised:
            opener(root, ("link",), flags)
        assert raised.value.errno == errno.ELOOP
        link = opener(root, ("link",), os.O_PATH | os.O_NOFOLLOW)
        assert stat.S_ISLNK(os.fstat(link).st_mode)
        os.close(link)
    finally:
        os.close(root)
