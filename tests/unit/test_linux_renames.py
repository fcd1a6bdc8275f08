"""Renames with a rule, and copies that share blocks, with and without a file system for them."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbx.linux import libc, reflink, renameat2


def failing(number: int) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return act


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("rule", [True, False])
def test_new_name_takes_the_place_of_none(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    if not rule:
        monkeypatch.setattr(libc, "call", failing(errno.EINVAL))
    with pytest.raises(FileExistsError):
        renameat2.rename_new(directory, b"a", directory, b"b")
    renameat2.rename_new(directory, b"a", directory, b"c")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "b", "c": "a"}


def test_names_are_exchanged_where_the_file_system_can(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert renameat2.exchange(directory, b"a", directory, b"b")
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        renameat2.exchange(directory, b"a", directory, b"missing")
    for number in (errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(libc, "call", failing(number))
        assert not renameat2.exchange(directory, b"a", directory, b"b")
    monkeypatch.setattr(libc, "call", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        renameat2.exchange(directory, b"a", directory, b"b")
    with pytest.raises(PermissionError):
        renameat2.rename_new(directory, b"a", directory, b"c")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV])
def test_file_system_without_shared_blocks_copies_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)
    assert reflink.clone(3, 4)
    monkeypatch.setattr(fcntl, "ioctl", failing(number))
    assert not reflink.clone(3, 4)
    monkeypatch.setattr(fcntl, "ioctl", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        reflink.clone(3, 4)
