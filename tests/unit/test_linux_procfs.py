"""/proc of a process: strings in its memory, and a process that is gone or hides."""

import builtins
import ctypes
import errno
import mmap
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from sbx.linux import mountinfo, namespaces, procfs
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
    assert procfs.unlinked(GONE, 0, time.monotonic() + 60) == {}


def test_removed_file_that_is_open_is_found_in_its_file_system(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(8192))
        file.flush()
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        soon = time.monotonic() + 60
        assert status.st_ino not in procfs.unlinked(os.getpid(), status.st_dev, soon)
        (tmp_path / "file").unlink()
        found = procfs.unlinked(os.getpid(), status.st_dev, soon)
        assert found[status.st_ino] == os.fstat(file.fileno()).st_blocks * 512
        assert status.st_ino not in procfs.unlinked(os.getpid(), status.st_dev + 1, soon)
        assert procfs.unlinked(os.getpid(), status.st_dev, 0.0) == {}


@pytest.mark.parametrize("hidden", ["fd", "map_files"])
def test_process_that_hides_its_files_is_an_error_but_not_its_mappings(
    monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Linux shows the second to root alone."""
    real = os.listdir

    def listed(path: str) -> list[str]:
        if path.endswith(hidden):
            raise PermissionError(errno.EACCES, "hidden", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    if hidden == "fd":
        with pytest.raises(PermissionError):
            procfs.unlinked(os.getpid(), 0, time.monotonic() + 60)
    else:
        assert procfs.unlinked(os.getpid(), 0, time.monotonic() + 60) == {}


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
