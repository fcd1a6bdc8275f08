"""`remove_tree` against trees that were built to outlast it."""

import os
import resource
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbx.linux import libc
from sbx.workspace.rmtree import empty_directory, remove_tree

PR_SET_DUMPABLE = 4
NOBODY = 65534


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest's own removal recurses, and fails


def as_nobody(action: Callable[[], object]) -> None:
    """Run `action` in a child that is nobody; it must not raise and must give something true."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                libc.call("prctl", PR_SET_DUMPABLE, 1)  # its /proc/self is its own again
            code = 0 if action() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def build_deep(parent: int, name: str, levels: int) -> None:
    fd = os.dup(parent)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


@pytest.mark.full_tier
@pytest.mark.timeout(400)
def test_removes_ten_thousand_levels(parent: int, tmp_path: Path) -> None:
    """Beyond recursion (1,000), PATH_MAX (2,048 levels) and open files; 100,000 were tried."""
    build_deep(parent, "d", 10_000)
    assert remove_tree(parent, "d", 300)  # a second, but a disk under load has taken over 20
    assert os.listdir(tmp_path) == []


@pytest.mark.full_tier
def test_removes_deep_and_wide_with_few_fds(parent: int, tmp_path: Path) -> None:
    for number in range(30):
        build_deep(parent, str(number), 50)
        os.rename(tmp_path / str(number), tmp_path / f"{number}.full")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        assert empty_directory(parent, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_removes_every_kind_of_file_and_odd_names(parent: int, tmp_path: Path) -> None:
    top = tmp_path / "d"
    top.mkdir()
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(top / "socket"))
    (top / "link").symlink_to("/etc")
    (top / "dangling").symlink_to("nowhere")
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b" ", b"\x1b[2J", b"x" * 255):
        (top / os.fsdecode(name)).mkdir()
        (top / os.fsdecode(name) / os.fsdecode(name)).touch()
    assert remove_tree(parent, "d", 10)
    assert os.listdir(tmp_path) == []


def test_removes_directories_without_any_permission_as_their_owner(tmp_path: Path) -> None:
    top = tmp_path / "mine"
    top.mkdir()
    if os.geteuid() == 0:
        os.chown(top, NOBODY, NOBODY)
    fd = os.open(top, os.O_RDONLY)

    def build_and_remove() -> bool:
        build_deep(fd, "d", 5)
        for depth in range(5, 0, -1):
            os.chmod("/".join(["d"] * depth), 0, dir_fd=fd)
        os.mkdir("e", mode=0, dir_fd=fd)
        return remove_tree(fd, "d", 10) and remove_tree(fd, "e", 10) and not os.listdir(fd)

    as_nobody(build_and_remove)
    os.close(fd)


@pytest.mark.full_tier
def test_removes_many_names_in_bounded_memory(parent: int, tmp_path: Path) -> None:
    for directory in ("d", "d/e"):
        (tmp_path / directory).mkdir()
        for number in range(15_000):
            (tmp_path / directory / str(number)).touch()
    assert remove_tree(parent, "d", 60)
    assert os.listdir(tmp_path) == []


def test_removes_more_full_directories_than_it_remembers(
    parent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbx.workspace.rmtree._REMEMBERED", 3)
    for number in range(20):
        (tmp_path / f"d/e/{number}/x/y").mkdir(parents=True)
    assert remove_tree(parent, "d", 30)
    assert os.listdir(tmp_path) == []


def test_time_that_is_up_leaves_the_rest_out_of_reach_for_a_later_call(
    parent: int, tmp_path: Path
) -> None:
    (tmp_path / "trash").mkdir()
    trash = os.open(tmp_path / "trash", os.O_RDONLY)
    (tmp_path / "d/e/f").mkdir(parents=True)
    assert not remove_tree(parent, "d", 0, trash=trash)
    assert os.listdir(tmp_path) == ["trash"]
    assert len(os.listdir(trash)) == 1
    assert empty_directory(trash, 10)
    os.close(trash)


def test_a_racing_writer_costs_the_deadline_and_no_more(parent: int, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    held = os.open(tmp_path / "d", os.O_RDONLY)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            try:
                os.mkdir(f"{number}", dir_fd=held)
                os.mkdir(f"{number}/x", dir_fd=held)
            except OSError:
                pass  # removed in between, or the top is gone
            number = (number + 1) % 1000  # a slow disk takes seconds for tens of thousands

    writer = threading.Thread(target=write)
    writer.start()
    remove_tree(parent, "d", 0.5)  # and not for as long as somebody writes
    stop.set()
    writer.join()
    os.close(held)
    assert not (tmp_path / "d").exists()
    assert empty_directory(parent, 60)


def test_a_plain_file_and_a_symlink_are_removed_and_nothing_behind_it(
    parent: int, tmp_path: Path
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "plain").touch()
    assert remove_tree(parent, "link", 1)
    assert remove_tree(parent, "plain", 1)
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept/file").exists()


def test_what_is_missing_is_removed_already(parent: int) -> None:
    assert remove_tree(parent, "nothing", 1)


def test_symlinks_below_are_not_followed(parent: int, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/link").symlink_to(outside)
    assert remove_tree(parent, "d", 5)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500
