"""The logs of background commands on the disk of the host: a ring of text and a record for each.

    {conversation}/commands/{id}.log     the latest part of its output
    {conversation}/commands/{id}.json    its record, written in one step

The logs are in no view of a jail. sbx chooses the names, and only such names are accepted. One
thread writes a ring. Other threads read it with their own descriptors. The owner of the writer
reports the offset from which on their data is valid.
"""

import os
import re
import struct
from contextlib import suppress

from sbx.errors import Broken, NotFound
from sbx.linux.descriptors import OwnedDescriptor, closing
from sbx.workspace.errors import translated

_NAME = re.compile(r"cmd-[0-9a-f]{12}")
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"sbx-ring"
_RECORD_MAX = 1 << 16
_LISTED_MAX = 10_000
_SIZE_MAX = 1 << 32
_END_MAX = 1 << 62


class RingFile:
    """The latest `size` bytes of a text that only grows, in a file of that size plus a header.

    `begin` and `end` are offsets from the first byte of the text. `begin` moves *before* the bytes
    that it passes are overwritten.
    """

    def __init__(self, fd: int, size: int, begin: int = 0, end: int = 0) -> None:
        self._fd = fd
        self.size = size
        self.begin = begin
        self.end = end

    @classmethod
    def read_from(cls, fd: int) -> "RingFile":
        """Return the ring in this file. It owns the fd from now on. Raises ValueError."""
        head = os.pread(fd, _HEADER.size, 0)
        if len(head) != _HEADER.size:
            raise ValueError("the log has no complete header")
        magic, size, begin, end = _HEADER.unpack(head)
        if magic != _MAGIC or not 0 < size <= _SIZE_MAX:
            raise ValueError("the log has an invalid header")
        if not begin <= end <= begin + size or end > _END_MAX:
            raise ValueError("the offsets in the header of the log are invalid")
        return cls(fd, size, begin, end)

    @property
    def kept(self) -> int:
        """Return the number of bytes in the ring."""
        return self.end - self.begin

    def make_room(self, size: int) -> None:
        """Move `begin` for `size` more bytes. Call it before `append`."""
        self.begin = max(self.begin, min(self.end, self.end + size - self.size))

    def append(self, data: bytes) -> int:
        """Write the bytes for which `make_room` was called, and return the new `end`.

        The caller sets `end`. If `data` is larger than the ring, the caller sets `begin`, too.
        """
        end = self.end + len(data)
        self._write(self.end, data)
        self._write_head(max(self.begin, end - self.size), end)
        return end

    def _write(self, at: int, data: bytes) -> None:
        remaining = memoryview(data)[-self.size :]
        at += len(data) - len(remaining)
        while remaining:
            place = at % self.size
            written = os.pwrite(self._fd, remaining[: self.size - place], _HEADER.size + place)
            remaining, at = remaining[written:], at + written

    def empty(self) -> None:
        """Free the disk space of the text. The caller has moved `begin` to `end` before."""
        os.ftruncate(self._fd, 0)
        self._write_head(self.end, self.end)

    def read(self, offset: int, most: int, end: int) -> bytes:
        """Return at most `most` bytes between `offset` and `end`."""
        most = min(most, end - offset, self.size)
        content = bytearray()
        while len(content) < most:
            place = (offset + len(content)) % self.size
            size = min(most - len(content), self.size - place)
            piece = os.pread(self._fd, size, _HEADER.size + place)
            if not piece:
                break
            content += piece
        return bytes(content)

    def _write_head(self, begin: int, end: int) -> None:
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self.size, begin, end), 0)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class CommandLogs(OwnedDescriptor):
    """The log directory of one conversation, open by an fd for a few calls."""

    def make(self, name: str, size: int) -> RingFile:
        """Create a ring, which the caller closes. Raises Unavailable `no_space`."""
        with translated("the log of a command"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            ring = RingFile(os.open(f"{_checked(name)}.log", flags, 0o600, dir_fd=self.fd), size)
            try:
                ring.empty()
            except OSError:
                ring.close()
                self.remove(name)
                raise
            return ring

    def open(self, name: str) -> RingFile:
        """Open the ring of this name for reading. Raises NotFound if it was removed."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(f"{_checked(name)}.log", flags, dir_fd=self.fd)
        except FileNotFoundError:
            raise NotFound(f"the log of {name} no longer exists") from None
        try:
            return RingFile.read_from(fd)
        except (OSError, ValueError):
            os.close(fd)
            raise NotFound(f"the log of {name} no longer exists") from None

    def write_record(self, name: str, content: bytes) -> None:
        """Write the record in one step: a crash leaves the old or the new. Raises Unavailable."""
        target, new = f"{_checked(name)}.json", f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with translated("the record of a command"):
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=self.fd), "wb") as file:
                file.write(content)
            os.rename(new, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def records(self) -> dict[str, bytes]:
        """Return every record by the name of its command, and remove all files without a record.

        Such a file is incomplete because of a crash.
        """
        with closing(
            os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        ) as fd:
            listed = sorted(os.listdir(fd))[:_LISTED_MAX]
        records_by_name = {}
        for file in listed:
            name, _, kind = file.partition(".")
            if kind == "json" and _NAME.fullmatch(name):
                with suppress(OSError):
                    records_by_name[name] = self._content(file)
        for file in listed:
            if file.partition(".")[0] not in records_by_name:
                with suppress(OSError):
                    os.unlink(file, dir_fd=self.fd)
        return records_by_name

    def _content(self, file: str) -> bytes:
        with closing(
            os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        ) as fd:
            return os.read(fd, _RECORD_MAX)

    def remove(self, name: str, *, log_only: bool = False) -> None:
        """Remove the files of a command, or only its log. Missing files are ignored."""
        for kind in ("log",) if log_only else ("log", "json", "new"):
            with suppress(OSError):
                os.unlink(f"{_checked(name)}.{kind}", dir_fd=self.fd)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Broken(f"{name[:80]!r} is not the name of a log; ids of callers never reach the disk")
    return name
