"""Who did what: an append-only file of JSON lines, each bound to the one before it.

A line is `{"at":…,"who":…,"what":…,"object":…,"details":{…},"hash":"…"}`. Its hash is SHA-256 over
the hash of the line before it, in hex (64 zeros before the first), and the line's own bytes up to
`,"hash"`. So a line that is changed, added, moved or taken out breaks the chain there. What the
chain cannot show is that its end was cut off, or that somebody wrote a whole new one: against that
compare `Verified.head` with one noted elsewhere.

A line that a full disk or a power cut tore stays as it is. The next one is `audit.torn` and has the
SHA-256 of what was torn in its details, so that `verify` can tell the mishap from tampering.

Lines are handed to the operating system one by one and not synced: they survive the death of the
service at any instant; a power cut may take the last moments.
"""

import asyncio
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sbx.errors import Closed, Unavailable

FIRST = "0" * 64
TORN = "audit.torn"
_LINE_MAX = 16 * 1024  # bytes; details that would make a line longer are left out
_WORD_MAX = 256  # characters of who, what and object
_SEAM = b',"hash":"'
_END = b'"}\n'
_WINDOW = 1024 * 1024  # bytes at the end of the log in which the last whole line is looked for
_WHOLE = re.compile(rb'^\{.*,"hash":"([0-9a-f]{64})"\}\n', re.MULTILINE)


class Audit:
    """An audit log that is open. One process writes to it, from one event loop."""

    def __init__(self, path: Path, fd: int, clock: Callable[[], float]) -> None:
        self._path = path
        self._fd = fd
        self._clock = clock
        self._head: str | None = None  # unknown before the first line, and after one that failed
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="sbx-audit")  # so lines keep order
        self._closed = False

    @classmethod
    async def open(cls, path: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """Open the log at `path`, or make it (mode 0600). Raises Unavailable `audit_unusable`."""
        return cls(path, await asyncio.to_thread(_opened, path), clock)

    async def record(self, who: str, what: str, object: str, **details: Any) -> None:
        """Add a line, and return once linux has it. Details are data of JSON.

        Raises Unavailable `no_space` or `audit_unusable`: what could not be recorded should not be
        done.
        """
        if self._closed:
            raise Closed("the audit log was closed")
        entry = {
            "at": round(self._clock(), 6),
            "who": _cut(who),
            "what": _cut(what),
            "object": _cut(object),
            "details": details,
        }
        await asyncio.get_running_loop().run_in_executor(self._writing, self._append, entry)

    async def close(self) -> None:
        """Finish, and see that the lines are on the disk. A second call does nothing."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._writing, self._end)
            self._writing.shutdown(wait=False)

    def _append(self, entry: dict[str, Any]) -> None:
        with _translated(self._path):
            head = self._head or self._mend()
            self._head = None  # until the line is written whole
            line, made = _line(entry, head)
            _write(self._fd, line)
            self._head = made

    def _mend(self) -> str:
        """The hash to go on from. What was torn gets its end of line, and a line that says so."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _WINDOW, max(0, size - _WINDOW))
        whole = list(_WHOLE.finditer(tail if tail.endswith(b"\n") else tail + b"\n"))
        head = whole[-1][1].decode() if whole else FIRST
        rest = tail[whole[-1].end() :] if whole else tail
        if tail and not tail.endswith(b"\n"):
            _write(self._fd, b"\n")
            rest = rest and rest + b"\n"
        if not rest:
            return head
        details = {"sha256": hashlib.sha256(rest).hexdigest()}
        entry = {"at": round(self._clock(), 6), "who": "sbx", "what": TORN, "object": "audit"}
        line, head = _line(entry | {"details": details}, head)
        _write(self._fd, line)
        return head

    def _end(self) -> None:
        try:
            with _translated(self._path):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Verified:
    """`count` whole lines up to the end, or up to `broken_at`: the first line, from 1, where the
    chain does not hold. `head` is the hash of the last line that does; `torn` counts the lines that
    a full disk or a power cut tore, each told of by the next."""

    count: int
    ok: bool
    broken_at: int | None
    head: str
    torn: int


def verify(path: Path) -> Verified:
    """Go through the whole chain; in bounded memory, and safe while the service writes.

    Raises Unavailable `audit_unusable` when the log cannot be read.
    """
    chain = _Chain()
    with _translated(path), path.open("rb") as log:
        while chain.broken_at is None and (piece := log.readline(2 * _LINE_MAX)):
            chain.add(piece)
    return chain.ended()


class _Chain:
    """What `verify` knows after the lines so far."""

    def __init__(self) -> None:
        self.broken_at: int | None = None
        self._lines = 0
        self._count = 0
        self._torn = 0
        self._head = FIRST
        self._rest_from: int | None = None  # the first of the pieces that are no whole line
        self._rest = hashlib.sha256()
        self._last = b""

    def add(self, piece: bytes) -> None:
        self._lines += 1
        self._last = piece
        whole = _WHOLE.fullmatch(piece if piece.endswith(b"\n") else piece + b"\n")
        if whole is None:
            self._rest_from = self._rest_from or self._lines
            self._rest.update(piece)
            return
        body = piece[: whole.start(1) - len(_SEAM)]
        made = _chained(self._head, body)
        if made != whole[1].decode() or not self._tells_of_the_rest(body):
            self.broken_at = self._rest_from or self._lines
            return
        self._head = made
        self._count += 1
        if self._rest_from is not None:
            self._torn += 1
            self._rest_from, self._rest = None, hashlib.sha256()

    def _tells_of_the_rest(self, body: bytes) -> bool:
        """Torn pieces come before the line that names them, and nowhere else."""
        try:
            entry = json.loads(body + b"}")
            told = entry["details"]["sha256"] if entry["what"] == TORN else None
        except (ValueError, KeyError, TypeError):
            return False
        return told == (None if self._rest_from is None else self._rest.hexdigest())

    def ended(self) -> Verified:
        if self._rest_from is not None and self.broken_at is None:
            if self._rest_from == self._lines and not self._last.endswith(b"\n"):
                self._torn += 1  # nothing was written since
            else:
                self.broken_at = self._rest_from
        ok = self.broken_at is None
        return Verified(self._count, ok, self.broken_at, self._head, self._torn)


def _line(entry: dict[str, Any], head: str) -> tuple[bytes, str]:
    """The line for an entry, and its hash. Details that are too long are left out."""
    text = _json(entry)
    if len(text) > _LINE_MAX:
        text = _json(entry | {"details": {"left_out": len(text)}})
    body = text[:-1].encode()
    made = _chained(head, body)
    return body + _SEAM + made.encode() + _END, made


def _json(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), default=str)  # ASCII: one character, one byte


def _chained(head: str, body: bytes) -> str:
    return hashlib.sha256(head.encode() + body).hexdigest()


def _cut(word: str) -> str:
    return word if len(word) <= _WORD_MAX else f"{word[: _WORD_MAX - 1]}…"


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with _translated(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                os.fchmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _write(fd: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(fd, left) :]


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Unavailable(
            f"the audit log {path} cannot be used: {error.strerror or error}",
            code="no_space" if full else "audit_unusable",
        ) from error
