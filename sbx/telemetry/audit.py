"""Who did what: an append-only file of JSON lines, each bound to the one before it.

A line is `{"at":…,"who":…,"what":…,"object":…,"details":{…},"hash":"…"}`. Its hash is SHA-256 over
the hash of the line before it, in hex (64 zeros before the first), and the line's own bytes up to
`,"hash"`. So a line that is changed, added, moved or taken out breaks the chain there. What the
chain cannot show is that its end was cut off, or that somebody wrote a whole new one: against that
compare `Verified.head` with one noted elsewhere.

With a key each line also has `"sig":"…"` before its hash: HMAC-SHA-256 over the hash of the line
before it and the line's own bytes up to `,"sig"`. So nobody who has not the key can write a chain
anew that holds, wherever the log was copied to. Lines from before there was a key have none; the
first line with one follows them as soon as the log is opened, and none without comes after it.

A line that a full disk or a power cut tore stays as it is. The next one is `audit.torn` and has the
SHA-256 of what was torn in its details, so that `verify` can tell the mishap from tampering.

Lines are handed to the operating system one by one and not synced: they survive the death of the
service at any instant; a power cut may take the last moments.

A line that cannot be written (a full disk) is kept in memory, and tried again until it is: the act
was done, and its caller gets the outcome of the act. What waits is bounded. A line that is lost is
logged, and counted by a line `audit.missed`. `refused` says that lines wait, so that new work can
be refused before it begins.
"""

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sbx.errors import Closed, Unavailable, is_disk_full
from sbx.telemetry import metrics

FIRST = "0" * 64
TORN = "audit.torn"
SIGNED = "audit.signed"
MISSED = "audit.missed"
_LINE_MAX = 16 * 1024  # bytes; details that would make a line longer are left out
_WORD_MAX = 256  # characters of who, what and object
_SEAM = b',"hash":"'
_END = b'"}\n'
_WINDOW = 1024 * 1024  # bytes at the end of the log in which the last whole line is looked for
_SIGNED = re.compile(rb',"sig":"([0-9a-f]{64})"$')  # no text in a line has a quote unescaped
_NOTES_MAX = 1000  # that wait to be written
_RETRY_S = 0.5
_NOTED_AFTER_S = 0.05  # so that who is just starting something does not share the CPU with it
_WHOLE = re.compile(rb'^\{.*,"hash":"([0-9a-f]{64})"\}\n', re.MULTILINE)


_log = logging.getLogger(__name__)
_Note = tuple[dict[str, Any], Callable[[], dict[str, Any]]]  # a line, and its details


class Audit:
    """An audit log that is open. One process writes to it, from one event loop."""

    def __init__(
        self,
        path: Path,
        fd: int,
        clock: Callable[[], float],
        key: bytes | None,
        on_full: Callable[[], bool] | None = None,
    ) -> None:
        self._path = path
        self._key = key
        self._on_full = on_full
        self.refused = False  # lines wait, because the last one could not be written
        self._notes: deque[_Note] = deque()
        self._waiting: deque[_Note] = deque()  # of the writer's thread
        self._missed = 0
        self._soon: asyncio.TimerHandle | None = None
        self._fd = fd
        self._clock = clock
        self._head: str | None = None  # unknown before the first line, and after one that failed
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="sbx-audit")  # so lines keep order
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        key: bytes | None = None,
        on_full: Callable[[], bool] | None = None,
    ) -> Self:
        """Open the log at `path`, or make it (mode 0600). With a `key` every line is signed.

        `on_full` is called, in any thread, when a line meets a full disk. It makes room, and
        returns whether the line is tried again. Raises Unavailable `audit_unusable`, `no_space`.
        """
        log = cls(path, await asyncio.to_thread(_opened, path), clock, key, on_full)
        if key is not None:
            try:
                await asyncio.to_thread(log._begin_to_sign)
            except BaseException:
                log._writing.shutdown(wait=False)
                os.close(log._fd)
                raise
        return log

    @property
    def waiting(self) -> int:
        """Lines that are kept in memory because they could not be written."""
        return len(self._waiting)

    async def record(self, who: str, what: str, object: str, **details: Any) -> bool:
        """Add a line, and return once Linux has it; False where it is only kept in memory yet.

        Details are data of JSON.
        """
        if self._closed:
            raise Closed("the audit log was closed")
        self._write_notes()
        entry = self._entry(who, what, object, {})
        return await self._submit(deque([(entry, lambda: details)]))

    def note(self, who: str, what: str, object: str, **details: Any) -> None:
        """Add a line in a moment, for what is done already and must not wait for it. Lines keep
        their order. Where too many wait, what is lost is logged, and counted by a line
        `audit.missed`."""
        self.note_by(who, what, object, lambda: details)

    def note_by(
        self, who: str, what: str, object: str, details: Callable[[], dict[str, Any]]
    ) -> None:
        """The same with `details` that take time to tell, which the writer's thread does."""
        if self._closed or len(self._notes) >= _NOTES_MAX:
            self._miss()
            return
        self._notes.append((self._entry(who, what, object, {}), details))
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(_NOTED_AFTER_S, self._write_notes)

    async def close(self) -> None:
        """Finish, and see that the lines are on the disk. A second call does nothing."""
        if not self._closed:
            self._write_notes()
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._writing, self._end)
            self._writing.shutdown(wait=False)

    def _entry(self, who: str, what: str, object: str, details: dict[str, Any]) -> dict[str, Any]:
        return {
            "at": round(self._clock(), 6),
            "who": _cut(who),
            "what": _cut(what),
            "object": _cut(object),
            "details": details,
        }

    def _write_notes(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._notes or self._missed or self.refused:
            notes, self._notes = self._notes, deque()
            self._submit(notes)

    def _submit(self, notes: deque[_Note]) -> "asyncio.Future[bool]":
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._writing, self._append_all, notes)
        written.add_done_callback(self._retry_if_refused)
        return written

    def _retry_if_refused(self, written: "asyncio.Future[bool]") -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            _log.error("the audit log failed", exc_info=error)
        elif (written.cancelled() or not written.result()) and not self._closed:
            loop = asyncio.get_running_loop()
            self._soon = self._soon or loop.call_later(_RETRY_S, self._write_notes)

    def _append_all(self, notes: deque[_Note]) -> bool:
        """In the writer's thread: return whether these are written, and all that waited before."""
        is_written = self._append_waiting()
        for note in notes:
            if len(self._waiting) < _NOTES_MAX:
                self._waiting.append(note)
            else:
                self._miss()
        return is_written and self._append_waiting()

    def _append_waiting(self) -> bool:
        """First the line about those that are missing."""
        waiting = self._waiting
        try:
            if missed := self._missed:
                self._append(self._entry("sbx", MISSED, "audit", {"count": missed}))
                self._missed -= missed
            while waiting:
                entry, details = waiting[0]
                self._append(entry | {"details": _data(details)})
                waiting.popleft()
        except Unavailable as error:
            if not self.refused:
                _log.error("lines of the audit log are kept in memory: %s", error)
            self.refused = True
            return False
        if self.refused:
            _log.info("the audit log is written again, with all lines that waited")
        self.refused = False
        return True

    def _miss(self) -> None:
        if not self._missed:
            _log.error("lines of the audit log are lost: too many wait")
        self._missed += 1
        metrics.record_lost()

    def _append(self, entry: dict[str, Any]) -> None:
        with _translated(self._path):
            while True:
                try:
                    self._append_once(entry)
                    return
                except OSError as error:
                    if not is_disk_full(error) or self._on_full is None or not self._on_full():
                        raise

    def _append_once(self, entry: dict[str, Any]) -> None:
        head = self._head or self._mend()
        self._head = None  # until the line is written whole
        line, made = _line(entry, head, self._key)
        _write(self._fd, line)
        self._head = made

    def _begin_to_sign(self) -> None:
        """The last line of a log that has a key is signed, also when nothing was done since."""
        with _translated(self._path):
            last = self._last_whole()
            if last is None or not _is_signed(last[0]):
                self._append(self._entry("sbx", SIGNED, "audit", {}))

    def _last_whole(self) -> re.Match[bytes] | None:
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _WINDOW, max(0, size - _WINDOW))
        whole = list(_WHOLE.finditer(tail))
        return whole[-1] if whole else None

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
        line, head = _line(entry | {"details": details}, head, self._key)
        _write(self._fd, line)
        return head

    def _end(self) -> None:
        if lost := len(self._waiting) + self._missed:
            metrics.record_lost(len(self._waiting))
            _log.error("%d lines of the audit log are lost: it could not be written", lost)
        try:
            with _translated(self._path):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Verified:
    """`count` whole lines up to the end, or up to `broken_at`: the first line, from 1, where the
    chain does not hold. `head` is the hash of the last line that does; `torn` counts the lines that
    a full disk or a power cut tore, each told of by the next; `signed` those with a signature, all
    of which were held against the key where there was one."""

    count: int
    ok: bool
    broken_at: int | None
    head: str
    torn: int
    signed: int = 0


def verify(path: Path, key: bytes | None = None) -> Verified:
    """Go through the whole chain; in bounded memory, and safe while the service writes. With the
    `key` of the log, signatures too: where there is one, the last line has it.

    Raises Unavailable `audit_unusable` when the log cannot be read.
    """
    chain = _Chain(key)
    with _translated(path), path.open("rb") as log:
        while chain.broken_at is None and (piece := log.readline(2 * _LINE_MAX)):
            chain.add(piece)
    return chain.ended()


class _Chain:
    """What `verify` knows after the lines so far."""

    def __init__(self, key: bytes | None) -> None:
        self.broken_at: int | None = None
        self._key = key
        self._signed = 0
        self._last_whole_at = 0
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
        if (
            made != whole[1].decode()
            or not self._tells_of_the_rest(body)
            or not self._is_signed_as_it_must(body)
        ):
            self.broken_at = self._rest_from or self._lines
            return
        self._head = made
        self._count += 1
        self._last_whole_at = self._lines
        if self._rest_from is not None:
            self._torn += 1
            self._rest_from, self._rest = None, hashlib.sha256()

    def _is_signed_as_it_must(self, body: bytes) -> bool:
        """Once there is a signature, all lines that follow have one."""
        found = _SIGNED.search(body)
        if found is None:
            return not self._signed
        self._signed += 1
        if self._key is None:
            return True
        made = _signature(self._key, self._head, body[: found.start()])
        return hmac.compare_digest(made, found[1].decode())

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
        if self._key is not None and self._count and not self._signed and self.broken_at is None:
            self.broken_at = self._last_whole_at
        ok = self.broken_at is None
        return Verified(self._count, ok, self.broken_at, self._head, self._torn, self._signed)


def _line(entry: dict[str, Any], head: str, key: bytes | None) -> tuple[bytes, str]:
    """The line for an entry, and its hash. Details that are too long are left out."""
    text = _json(entry)
    if len(text) > _LINE_MAX:
        text = _json(entry | {"details": {"left_out": len(text)}})
    body = text[:-1].encode()
    if key is not None:
        body += b',"sig":"' + _signature(key, head, body).encode() + b'"'
    made = _chained(head, body)
    return body + _SEAM + made.encode() + _END, made


def _data(details: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was told, if it can be written: those that wait behind it have to be in any case."""
    try:
        told = details()
        _json(told)
    except Exception:  # noqa: BLE001  # whatever somebody else's telling comes to
        _log.exception("the details of a line of the audit log cannot be told")
        return {"untold": True}
    return told


def _json(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), default=str)  # ASCII: one character, one byte


def _signature(key: bytes, head: str, body: bytes) -> str:
    return hmac.new(key, head.encode() + body, hashlib.sha256).hexdigest()


def _is_signed(line: bytes) -> bool:
    return _SIGNED.search(line.rpartition(_SEAM)[0]) is not None


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
        raise Unavailable(
            f"the audit log {path} cannot be used: {error.strerror or error}",
            code="no_space" if is_disk_full(error) else "audit_unusable",
        ) from error
