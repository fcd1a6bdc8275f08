"""The path guard never mistakes one file for another one that took its name."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sbx.guest import hard_links
from sbx.guest.guarded_paths import Outside, PathResolver, ResolvedPath, open_path, own_view, signed
from sbx.guest.path_rules import PathRules
from sbx.linux.seccomp_notify import SyscallNotice


@contextmanager
def held(path: Path) -> Iterator[int]:
    fd = open_path(str(path), follow=False)
    try:
        yield fd
    finally:
        os.close(fd)


def target(path: Path) -> ResolvedPath:
    return ResolvedPath(open_path(str(path.parent)), (path.name,))


def test_descriptor_leads_to_the_name_that_it_was_opened_by(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").touch()
    with held(tmp_path / "below" / "file") as fd:
        found = PathResolver(str(tmp_path)).target_of(fd)
        assert found is not None
        with found:
            assert found.parts == ("below", "file")


def test_descriptor_of_the_workspace_or_of_a_file_without_name_has_no_target(
    tmp_path: Path,
) -> None:
    resolver = PathResolver(str(tmp_path))
    with held(tmp_path) as fd:
        assert resolver.target_of(fd) is None
    (tmp_path / "file").touch()
    with held(tmp_path / "file") as fd:
        (tmp_path / "file").unlink()
        assert resolver.target_of(fd) is None


def test_descriptor_from_elsewhere_is_outside(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "file").touch()
    with held(tmp_path / "file") as fd, pytest.raises(Outside):
        PathResolver(str(tmp_path / "workspace")).target_of(fd)


@pytest.mark.parametrize("planted", [False, True])
def test_file_that_has_only_another_name_is_read_only(tmp_path: Path, planted: bool) -> None:
    """Linux shows the removed name with ` (deleted)` behind it, and a program may take that name
    for another file."""
    (tmp_path / "file").touch()
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    with held(tmp_path / "file") as fd:
        (tmp_path / "file").unlink()
        if planted:
            (tmp_path / "file (deleted)").touch()
        with pytest.raises(OSError, match="no longer") as raised:
            PathResolver(str(tmp_path)).target_of(fd)
        assert raised.value.errno == errno.EROFS


def test_file_whose_directory_was_removed_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").touch()
    (tmp_path / "other").hardlink_to(tmp_path / "below" / "file")
    with held(tmp_path / "below" / "file") as fd:
        (tmp_path / "below" / "file").unlink()
        (tmp_path / "below").rmdir()
        with pytest.raises(OSError, match="no longer") as raised:
            PathResolver(str(tmp_path)).target_of(fd)
        assert raised.value.errno == errno.EROFS


# -- further names ---------------------------------------------------------------------------------


def test_separated_file_keeps_content_and_mode_and_its_other_name_the_old_file(
    tmp_path: Path,
) -> None:
    mine, store = tmp_path / "mine", tmp_path / "store"
    store.write_text("content")
    store.chmod(0o640)
    mine.hardlink_to(store)
    with held(mine) as fd, target(mine) as name:
        os.close(hard_links.separate(fd, name))
    assert (mine.read_text(), mine.stat().st_mode & 0o777) == ("content", 0o640)
    assert not mine.samefile(store)
    with held(mine) as fd, target(mine) as name:
        os.close(hard_links.separate(fd, name, empty=True))
    assert mine.read_text() == ""


def test_file_that_the_user_saves_meanwhile_is_not_replaced_by_the_copy(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("old")
    with held(mine) as fd, target(mine) as name:
        (tmp_path / "saved").write_text("saved by the user")
        (tmp_path / "saved").rename(mine)
        with pytest.raises(BlockingIOError):
            hard_links.separate(fd, name)
    assert mine.read_text() == "saved by the user"
    assert os.listdir(tmp_path) == ["mine"]


def test_file_that_is_too_large_to_copy_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hard_links, "COPY_MAX", 3)
    mine = tmp_path / "mine"
    mine.write_text("four")
    with held(mine) as fd, target(mine) as name:
        with pytest.raises(OSError, match="further names") as raised:
            hard_links.separate(fd, name)
        assert raised.value.errno == errno.EROFS
        with pytest.raises(OSError, match="cannot be copied") as raised:
            hard_links.check_copied(fd)
        assert raised.value.errno == errno.EXDEV
    with held(tmp_path) as fd, pytest.raises(OSError, match="cannot be copied"):
        hard_links.check_copied(fd)


def test_move_takes_the_old_name_only_from_the_same_file(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.write_text("moved")
    with held(source) as fd, target(source) as old, target(destination) as new:
        hard_links.move(fd, old, new)
        assert os.listdir(tmp_path) == ["destination"]
        source.write_text("another")
        hard_links.move(fd, old, new)  # two names of one file stay
    assert (source.read_text(), destination.read_text()) == ("another", "moved")


def test_move_where_no_hard_link_can_be_made_is_left_to_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.touch()
    for number, expected in (
        (errno.EPERM, errno.EXDEV),
        (errno.EMLINK, errno.EXDEV),
        (errno.ENOSPC, errno.ENOSPC),
    ):

        def refuse(*args: object, number: int = number, **named: object) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr(os, "link", refuse)
        with held(source) as fd, target(source) as old, target(destination) as new:
            with pytest.raises(OSError, match="no") as raised:
                hard_links.move(fd, old, new)
            assert raised.value.errno == expected


# -- what a call names -----------------------------------------------------------------------------


def test_paths_of_the_caller_itself_lead_to_the_caller() -> None:
    call = SyscallNotice(1, 42, 0, (0,) * 6)
    for path, expected in (
        ("/dev/stdin", "/proc/42/fd/0"),
        ("/dev/stderr", "/proc/42/fd/2"),
        ("/dev/fd/7", "/proc/42/fd/7"),
        ("/proc/self/fd/7", "/proc/42/fd/7"),
        ("/proc/thread-self/cwd", "/proc/42/cwd"),
        ("/proc/selfish", "/proc/selfish"),
        ("fd/7", "fd/7"),
    ):
        assert own_view(call, path) == expected


def test_arguments_are_signed_as_linux_takes_them() -> None:
    assert [signed(number) for number in (0, 5, 0xFFFFFF9C, 1 << 32)] == [0, 5, -100, 0]


@pytest.mark.parametrize("depth", [10, 40, 160])
def test_the_look_ups_of_a_check_are_in_proportion_to_the_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Each look-up began at the lowest directory: 400 nested directories took 37 seconds."""
    resolved = 0

    def counted(call: Any) -> Any:
        def act(path: str, *arguments: Any, **more: Any) -> Any:
            nonlocal resolved
            resolved += path.rstrip("/").count("/") + 1
            return call(path, *arguments, **more)

        return act

    directory = tmp_path
    for _ in range(depth):
        directory /= "ü"
        directory.mkdir()
    with ResolvedPath(open_path(str(directory)), (*("ü",) * depth, "new")) as found:
        monkeypatch.setattr(os, "lstat", counted(os.lstat))
        monkeypatch.setattr(os, "open", counted(os.open))
        assert PathRules((), ()).match(found.parts, found.exists, is_directory=True) is None
    assert depth < resolved <= 5 * depth


def test_an_environment_far_above_is_seen_and_the_topmost_counts(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b" / "c" / "d"
    below.mkdir(parents=True)
    parts = ("a", "b", "c", "d", "new")
    for directory, depth in ((tmp_path / "a/b/c", 3), (tmp_path / "a", 1)):
        (directory / "pyvenv.cfg").touch()
        with ResolvedPath(open_path(str(below)), parts) as found:
            match = PathRules((), ()).match(parts, found.exists)
            assert match is not None
            assert (match.depth, match.name) == (depth, "Python environment")
            # In any order of the look-ups, also from above to below.
            assert found.exists(("a", "b", "c", "pyvenv.cfg"))
            assert not found.exists(("a", "b", "pyvenv.cfg"))
            assert found.exists(("a", "b", "c", "d"))
