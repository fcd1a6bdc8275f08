"""A file that reserves space on the disk of a service, for records on a full disk.

Tenants can fill the file system that the store and the audit log share with them. A write of these
that meets the full disk gives up a part of the reserve, and is tried again. So a sandbox can still
be deleted, a key revoked and the end of a run recorded. While a part is missing, the service takes
no new work that needs space. The reserve is allocated again once there is room.

The reserve is given up in parts because code in a sandbox can take the space too.
"""

import logging
import os
import threading
from pathlib import Path

from sbx.errors import is_disk_full
from sbx.workspace.errors import translated

_log = logging.getLogger(__name__)
_SIZE_MAX = 16 << 20
_SHARE = 16  # of a small file system the reserve takes this fraction
_PARTS = 8


def reserve_size(file_system: int) -> int:
    """Return the size of the reserve on a file system of so many bytes."""
    return min(_SIZE_MAX, file_system // _SHARE)


def has_room(available: int, missing: int, size: int) -> bool:
    """Return whether the missing part can be allocated, and leave room for the work after it.

    Without that room the next write would meet the full disk again at once.
    """
    return available >= missing + size // 4


class Reserve:
    """The open file. `give_up` may be called from any thread; `close` ends it."""

    def __init__(self, path: Path) -> None:
        """Open the reserve of an earlier process, or make it. Raises Unavailable."""
        self._path = path
        self._lock = threading.Lock()
        self.full = False
        with translated(str(path)):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            disk = os.fstatvfs(self._fd)
            self._size = reserve_size(disk.f_blocks * disk.f_frsize)
            self._allocated = self._taken_over()
            self.allocate()

    @property
    def allocated(self) -> int:
        """In bytes."""
        return self._allocated

    def _taken_over(self) -> int:
        """Return how much an earlier process allocated. A tool that copied the data directory may
        have made a hole of it."""
        status = os.fstat(self._fd)
        if status.st_blocks * 512 < status.st_size:
            os.ftruncate(self._fd, 0)
            return 0
        return status.st_size

    def give_up(self) -> bool:
        """Return a part to the file system; False where nothing is left."""
        with self._lock:
            if not self.full:
                _log.error("the disk of %s is full: work that needs space is refused", self._path)
            self.full = True
            if self._allocated == 0 or self._fd < 0:
                return False
            left = max(0, self._allocated - max(1, self._size // _PARTS))
            try:
                os.ftruncate(self._fd, left)
                os.fsync(self._fd)  # some file systems free the blocks only then
            except OSError as error:
                _log.error("the reserve %s cannot be given up: %s", self._path, error)
                return False
            self._allocated = left
            if left == 0:
                _log.error("nothing is left of the reserve %s", self._path)
            return True

    def allocate(self) -> None:
        """Allocate the missing part, if there is room for it."""
        with self._lock:
            if self._fd < 0:
                return
            missing = self._size - self._allocated
            full = missing > 0 and not self._grow(missing)
            if full != self.full:
                if full:
                    _log.error("no room for the reserve %s: the disk is full", self._path)
                else:
                    _log.info("the disk of %s has room again", self._path)
            self.full = full

    def _grow(self, missing: int) -> bool:
        """Return whether the disk has room. If the file cannot be allocated for another reason,
        there is no reserve, and the disk may still have room."""
        disk = os.fstatvfs(self._fd)
        if not has_room(disk.f_bavail * disk.f_frsize, missing, self._size):
            return False
        try:
            os.posix_fallocate(self._fd, self._allocated, missing)
        except OSError as error:
            os.ftruncate(self._fd, self._allocated)
            if is_disk_full(error):
                return False
            _log.warning("there can be no reserve at %s: %s", self._path, error)
            self._size = self._allocated
            return True
        self._allocated = self._size
        return True

    def close(self) -> None:
        """Close the file, which stays allocated. A second call does nothing."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
