"""What background commands printed, on the host's disk and in no view: a ring of text for each, and
a record of what became of it.

    {conversation}/commands/{id}.log     the latest part of what it wrote
    {conversation}/commands/{id}.json    its record, written in one step

Names are ours, and only such are taken. One thread writes a ring; others read by descriptors of
their own, and are told by the writer's owner from which offset on they may believe what they read.
"""

import os
import re
import struct
from contextlib import suppress
from typing import Self

from sbx.errors import Broken, NotFound
from sbx.workspace.refusals import translated

_NAME = re.compile(r"cmd-[0-9a-f]{12}")
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"sbx-ring"
_RECORD_MAX = 1 << 16
_LISTED_MAX = 10_000
_SIZE_MAX = 1 << 32
_END_MAX = 1 << 62


class Ring:
    """The latest `size` bytes of a text that only grows, in a file of that size and a header.

    `begin` and `end` count its bytes from the first that ever came. `begin` moves *before* what it
    leaves behind is written over.
    """

    def __init__(self, fd: int, size: int, begin: int = 0, end: int = 0) -> None:
        self._fd = fd
        self.size = size
        self.begin = begin
        self.end = end

    @classmethod
    def read_from(cls, fd: int) -> "Ring":
        """The ring in this file, whose fd is its own from now on. Raises ValueError."""
        head = os.pread(fd, _HEADER.size, 0)
        if len(head) != _HEADER.size:
            raise ValueError("the log has no head")
        magic, size, begin, end = _HEADER.unpack(head)
        if magic != _MAGIC or not 0 < size <= _SIZE_MAX:
            raise ValueError("the log is none of ours")
        if not begin <= end <= begin + size or end > _END_MAX:
            raise ValueError("the log has no head that fits")
        return cls(fd, size, begin, end)

    @property
    def kept(self) -> int:
        """Bytes of text that it holds."""
        return self.end - self.begin

    def make_room(self, size: int) -> None:
        """`begin` as it will be once so many bytes were added: before `append`."""
        self.begin = max(self.begin, min(self.end, self.end + size - self.size))

    def append(self, data: bytes) -> int:
        """Write what `make_room` made room for, and where `end` is then; the caller moves it, and
        `begin`, where more came at once than there is room for."""
        end = self.end + len(data)
        self._write(self.end, data)
        self._write_head(max(self.begin, end - self.size), end)
        return end

    def _write(self, at: int, data: bytes) -> None:
        left = memoryview(data)[-self.size :]
        at += len(data) - len(left)
        while left:
            place = at % self.size
            written = os.pwrite(self._fd, left[: self.size - place], _HEADER.size + place)
            left, at = left[written:], at + written

    def empty(self) -> None:
        """Give the disk back what it holds; `begin` has moved to `end` before."""
        os.ftruncate(self._fd, 0)
        self._write_head(self.end, self.end)

    def read(self, offset: int, most: int, end: int) -> bytes:
        """Bytes from `offset` on, up to `end`."""
        most = min(most, end - offset, self.size)
        found = bytearray()
        while len(found) < most:
            place = (offset + len(found)) % self.size
            size = min(most - len(found), self.size - place)
            piece = os.pread(self._fd, size, _HEADER.size + place)
            if not piece:
                break
            found += piece
        return bytes(found)

    def _write_head(self, begin: int, end: int) -> None:
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self.size, begin, end), 0)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class CommandLogs:
    """The directory of one conversation, held by an fd for the time of some calls."""

    def __init__(self, fd: int) -> None:
        """`fd` is its own from now on."""
        self._fd = fd

    def make(self, name: str, size: int) -> Ring:
        """A new ring; the caller closes it. Raises Unavailable `no_space`."""
        with translated("the log of a command"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            ring = Ring(os.open(f"{_checked(name)}.log", flags, 0o600, dir_fd=self._fd), size)
            try:
                ring.empty()
            except OSError:
                ring.close()
                self.remove(name)
                raise
            return ring

    def open(self, name: str) -> Ring:
        """The ring of this name, to be read. Raises NotFound where there is none any more."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(f"{_checked(name)}.log", flags, dir_fd=self._fd)
        except FileNotFoundError:
            raise NotFound(f"the log of {name} is kept no more") from None
        try:
            return Ring.read_from(fd)
        except (OSError, ValueError):
            os.close(fd)
            raise NotFound(f"the log of {name} is kept no more") from None

    def write_record(self, name: str, content: bytes) -> None:
        """In one step: a crash leaves the earlier one, or this one. Raises Unavailable."""
        target, new = f"{_checked(name)}.json", f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with translated("the record of a command"):
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=self._fd), "wb") as file:
                file.write(content)
            os.rename(new, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def records(self) -> dict[str, bytes]:
        """Every record by the name of its command. What has a name of ours and no record goes:
        it was left half made by a crash."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            listed = sorted(os.listdir(fd))[:_LISTED_MAX]
        finally:
            os.close(fd)
        found = {}
        for file in listed:
            name, _, kind = file.partition(".")
            if kind == "json" and _NAME.fullmatch(name):
                with suppress(OSError):
                    found[name] = self._content(file)
        for file in listed:
            if file.partition(".")[0] not in found:
                with suppress(OSError):
                    os.unlink(file, dir_fd=self._fd)
        return found

    def _content(self, file: str) -> bytes:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.read(fd, _RECORD_MAX)
        finally:
            os.close(fd)

    def remove(self, name: str, *, log_only: bool = False) -> None:
        """Forget a command, or only what it wrote; what is not there is nothing."""
        for kind in ("log",) if log_only else ("log", "json", "new"):
            with suppress(OSError):
                os.unlink(f"{_checked(name)}.{kind}", dir_fd=self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Broken(f"{name[:80]!r} is no name of ours; ids of callers never reach the disk")
    return name
