"""/proc of a process: strings in its memory, and a process that is gone or hides."""

import builtins
import ctypes
import errno
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sbx.linux import hidden_files, mountinfo, namespaces, procfs
from tests.unit.in_child import in_child

GONE = 1 << 23  # beyond all numbers of processes
PAGE = mmap.PAGESIZE


def test_string_is_read_up_to_its_zero_and_to_the_limit() -> None:
    with mmap.mmap(-1, 2 * PAGE) as memory:
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(memory))
        memory[PAGE - 2 : PAGE + 3] = b"abcde"  # across the border of a page
        own = os.getpid()
        assert procfs.read_string(own, address + PAGE - 2, 4096) == b"abcde"
        memory[:] = b"x" * (2 * PAGE)
        with pytest.raises(OSError, match="too long") as raised:
            procfs.read_string(own, address, PAGE)
        assert raised.value.errno == errno.ENAMETOOLONG
        del start


@pytest.mark.parametrize("address", [0, 8, (1 << 63) - 1, (1 << 64) - 1])
def test_address_that_is_not_mapped_is_a_fault(address: int) -> None:
    with pytest.raises(OSError, match="Bad address") as raised:
        procfs.read_string(os.getpid(), address, 4096)
    assert raised.value.errno == errno.EFAULT


def test_process_that_is_gone_uses_nothing() -> None:
    assert procfs.activity(GONE) == ()
    assert procfs.resident(GONE) == procfs.proportional(GONE) == procfs.shared(GONE) == 0
    assert procfs.tmpfs_used(GONE, "/tmp") == 0
    assert hidden_files.unlinked(GONE, 0, time.monotonic() + 60) == ({}, 0)


def test_removed_file_that_is_open_is_found_in_its_file_system(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(8192))
        file.flush()
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        soon = time.monotonic() + 60
        assert status.st_ino not in hidden_files.unlinked(os.getpid(), status.st_dev, soon)[0]
        (tmp_path / "file").unlink()
        found, _ = hidden_files.unlinked(os.getpid(), status.st_dev, soon)
        assert found[status.st_ino] == os.fstat(file.fileno()).st_blocks * 512
        assert status.st_ino not in hidden_files.unlinked(os.getpid(), status.st_dev + 1, soon)[0]
        assert hidden_files.unlinked(os.getpid(), status.st_dev, 0.0) == ({}, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="Linux shows map_files to root alone")
def test_removed_file_that_is_mapped_and_not_open_is_found_by_root(tmp_path: Path) -> None:
    path = tmp_path / "a (deleted)"
    path.write_bytes(bytes(8192))
    status = path.stat()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with path.open("rb") as file:
        address = libc.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    try:
        soon = time.monotonic() + 60
        assert status.st_ino not in hidden_files.unlinked(os.getpid(), status.st_dev, soon)[0]
        path.unlink()
        found, _ = hidden_files.unlinked(os.getpid(), status.st_dev, soon)
        assert found[status.st_ino] == 8192
        assert hidden_files.unlinked(os.getpid(), status.st_dev, 0.0) == ({}, 0)
    finally:
        libc.munmap(address, PAGE)


def test_descriptors_in_flight_count_as_hiding_places(tmp_path: Path) -> None:
    """Files in flight through a socket were nobody's: 480 MiB passed a limit of 64 MiB."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(tmp_path / "file", "wb") as file:
        device, soon = os.fstat(file.fileno()).st_dev, time.monotonic() + 60
        before = hidden_files.unlinked(os.getpid(), device, soon)[1]
        socket.send_fds(ours, [b"x"], [file.fileno(), file.fileno()])
        assert hidden_files.unlinked(os.getpid(), device, soon)[1] == before + 2
        assert procfs.descriptors(os.getpid()).in_flight >= 2
        for fd in socket.recv_fds(theirs, 1, 2)[1]:
            os.close(fd)
        assert hidden_files.unlinked(os.getpid(), device, soon)[1] == before


def test_file_of_another_unnamed_device_may_be_in_a_subvolume() -> None:
    """Each subvolume of btrfs has a device of its own: 300 MiB passed a limit of 64 MiB."""
    soon, unnamed = time.monotonic() + 60, os.makedev(0, 1 << 18)
    before = hidden_files.unlinked(os.getpid(), unnamed, soon)[1]
    fd = os.memfd_create("as in a subvolume")
    assert hidden_files.unlinked(os.getpid(), unnamed, soon)[1] == before + 1
    assert hidden_files.unlinked(os.getpid(), os.makedev(254, 0), soon)[1] < before + 1
    os.close(fd)


def test_process_that_hides_its_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "hidden", path)

    monkeypatch.setattr(os, "listdir", hidden)
    with pytest.raises(PermissionError):
        hidden_files.unlinked(os.getpid(), 0, time.monotonic() + 60)


def test_process_that_hides_its_mappings_has_no_mapped_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.open

    def opened(path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith("maps"):
            raise PermissionError(errno.EACCES, "hidden", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    assert hidden_files.unlinked(os.getpid(), 0, time.monotonic() + 60) == ({}, 0)


def test_path_above_all_mounts_has_no_source() -> None:
    mounts = mountinfo.parse(["22 1 254:0 / /data rw - ext4 /dev/vda rw"])
    assert mountinfo.source_of("/data/a", mounts) == ("254:0", "/a")
    assert mountinfo.source_of("/elsewhere", mounts) is None


def test_mounts_that_cannot_be_read_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/proc" in [mount.point for mount in mountinfo.read()]

    def hidden(path: str, **_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "hidden", path)

    monkeypatch.setattr(builtins, "open", hidden)
    assert mountinfo.read() == ()


@pytest.mark.needs("root")
def test_namespace_without_all_uids_has_one_that_stands_for_the_rest() -> None:
    def act(report: int) -> int | None:
        namespaces.unshare(namespaces.Namespace.USER)
        return namespaces.unmapped_uid()

    assert in_child(act) == Path("/proc/sys/kernel/overflowuid").read_text().strip()
