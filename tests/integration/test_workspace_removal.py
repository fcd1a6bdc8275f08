"""`remove_tree` against trees that were built to outlast it."""

import fcntl
import os
import resource
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbx.linux import libc
from sbx.workspace.rmtree import empty_directory, remove_tree
from tests import disks

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


def _ioctl(path: str, number: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, number, bytearray(data))
    finally:
        os.close(fd)


def _subvolume(parent: str, name: str, *, of: str | None = None) -> None:
    """BTRFS_IOC_SUBVOL_CREATE, or BTRFS_IOC_SNAP_CREATE of a subvolume."""
    if of is None:
        _ioctl(parent, 0x5000940E, struct.pack("=q4088s", 0, name.encode()))
        return
    source = os.open(of, os.O_RDONLY)
    try:
        _ioctl(parent, 0x50009401, struct.pack("=q4088s", source, name.encode()))
    finally:
        os.close(source)


def _plant_read_only_subvolumes(top: Path) -> bool:
    """A subvolume in a subvolume, snapshots of them, all read-only, with directories in each."""
    os.makedirs(f"{top}/a/b")
    _subvolume(f"{top}/a/b", "volume")
    os.makedirs(f"{top}/a/b/volume/x/y/z")
    _subvolume(f"{top}/a/b/volume/x/y", "inner")
    os.makedirs(f"{top}/a/b/volume/x/y/inner/u/v")
    Path(f"{top}/a/b/volume/x/y/inner/u/file").write_text("x")
    _subvolume(str(top), "snapshot", of=f"{top}/a/b/volume")
    for path in ("a/b/volume/x/y/inner", "snapshot", "a/b/volume"):
        _ioctl(f"{top}/{path}", 0x4008941A, struct.pack("=Q", 2))  # BTRFS_IOC_SUBVOL_SETFLAGS
    return True


@pytest.mark.needs("root", "btrfs")
@pytest.mark.parametrize("as_root", [True, False])
def test_removes_read_only_subvolumes(own_temporary_directory: Path, as_root: bool) -> None:
    """One call of code inside made a workspace that sbx could never remove (holes 10). A directory
    cannot be moved out of a subvolume either."""
    with disks.mounted("btrfs", own_temporary_directory) as disk:

        def removed() -> bool:
            fd = os.open(disk, os.O_RDONLY)
            try:
                return _plant_read_only_subvolumes(disk / "t") and remove_tree(fd, "t", 30)
            finally:
                os.close(fd)

        if as_root:
            assert removed()
        else:
            as_nobody(removed)
        assert os.listdir(disk) == []


@pytest.mark.needs("root", "ext4")
def test_removes_immutable_and_append_only_files(own_temporary_directory: Path) -> None:
    with disks.mounted("ext4", own_temporary_directory) as disk:
        deep = disk / "t" / "a" / "b"
        deep.mkdir(parents=True)
        for name, flag in (("file", 0x80010), ("log", 0x80020)):  # extents, and immutable or append
            (deep / name).write_text("x")
            _ioctl(f"{deep}/{name}", 0x40086602, struct.pack("=Q", flag))  # FS_IOC_SETFLAGS
        for directory in (deep, deep.parent, disk / "t"):
            _ioctl(str(directory), 0x40086602, struct.pack("=Q", 0x80010))
        fd = os.open(disk, os.O_RDONLY)
        try:
            assert remove_tree(fd, "t", 30)
        finally:
            os.close(fd)
        assert os.listdir(disk) == ["lost+found"]
