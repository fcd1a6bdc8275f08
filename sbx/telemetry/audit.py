"""The audit log: an append-only file of JSON lines, each bound to the line before it.

`audit_chain` defines the lines and checks them; this module writes them.

A line that a full disk or a power cut tore stays as it is. The next line is `audit.torn` and has
the SHA-256 of the torn bytes in its details, so that `verify` can distinguish the accident from
tampering.

Lines are written to the operating system one by one and not synced. They survive a crash of the
service at any time; a power cut may lose the last moments.

A line that cannot be written (a full disk) is kept in memory and retried until it is written. The
audited action has already happened, and its caller gets the result of the action. The number of
waiting lines is bounded. A lost line is logged, and counted by a line `audit.missed`. `refused` is
True while lines wait, so that new work can be refused before it begins.

A log that is due for rotation is renamed to `audit-NUMBER-DAY.jsonl`, and a new file continues its
chain.
"""

import asyncio
import errno
import hashlib
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from sbx.errors import Closed, Unavailable, is_disk_full
from sbx.telemetry import metrics
from sbx.telemetry.audit_chain import (
    FIRST,
    SIGNED,
    TORN,
    WHOLE_LINE,
    format_line,
    is_signed,
    to_json,
    translate_errors,
)
from sbx.telemetry.audit_rotation import (
    ROTATED,
    Rotation,
    count_lines,
    first_entry,
    next_file,
    rotated_files,
)

MISSED = "audit.missed"
_WORD_MAX = 256  # characters of each of `who`, `what` and `object`
_WINDOW = 1024 * 1024  # bytes at the end of the log in which the last whole line is looked for
_NOTES_MAX = 1000  # notes that wait to be written
_RETRY_S = 0.5
_ROTATE_AGAIN_S = 60.0
_NOTED_AFTER_S = 0.05  # so that notes do not compete for the CPU with work that just started


_log = logging.getLogger(__name__)
_Note = tuple[dict[str, Any], Callable[[], dict[str, Any]]]  # a line, and its details


class Audit:
    """An open audit log. One process writes to it, from one event loop."""

    def __init__(
        self,
        path: Path,
        fd: int,
        clock: Callable[[], float],
        key: bytes | None,
        on_full: Callable[[], bool] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        self._path = path
        self._rotation = rotation
        self._began_at: float | None = None  # the time of the first line of the file
        self._rotate_from = 0.0  # not before this time.monotonic, after a failure
        self._key = key
        self._on_full = on_full
        self.refused = False  # lines wait, because the last one could not be written
        self._notes: deque[_Note] = deque()
        self._waiting: deque[_Note] = deque()  # used only by the writer's thread
        self._missed = 0
        self._soon: asyncio.TimerHandle | None = None
        self._fd = fd
        self._clock = clock
        self._head: str | None = None  # unknown before the first line, and after a failed one
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="sbx-audit")  # keeps the order
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        key: bytes | None = None,
        on_full: Callable[[], bool] | None = None,
        rotation: Rotation | None = None,
    ) -> Self:
        """Open the log at `path`, or create it (mode 0600). With a `key` every line is signed.
        Without a `rotation` it stays one file.

        `on_full` is called, in any thread, when a line meets a full disk. It frees space and
        returns whether to try the line again. Raise Unavailable `audit_unusable`, `no_space`.
        """
        fd = await asyncio.to_thread(_opened, path)
        log = cls(path, fd, clock, key, on_full, rotation)
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
        return len(self._waiting)

    async def record(self, who: str, what: str, object: str, **details: Any) -> bool:
        """Add a line and return True once Linux has it; return False if it is only kept in memory.

        Details are JSON data.
        """
        if self._closed:
            raise Closed("the audit log was closed")
        self._write_notes()
        entry = self._entry(who, what, object, {})
        return await self._submit(deque([(entry, lambda: details)]))

    def note(self, who: str, what: str, object: str, **details: Any) -> None:
        """Add a line soon, for an action that is already done and must not wait for the line.

        Lines keep their order. If too many wait, the lost ones are logged and counted by a line
        `audit.missed`.
        """
        self.note_by(who, what, object, lambda: details)

    def note_by(
        self, who: str, what: str, object: str, details: Callable[[], dict[str, Any]]
    ) -> None:
        """Like `note`, with a function for the details. The writer's thread calls it, as it may be
        slow."""
        if self._closed or len(self._notes) >= _NOTES_MAX:
            self._miss()
            return
        self._notes.append((self._entry(who, what, object, {}), details))
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(_NOTED_AFTER_S, self._write_notes)

    async def close(self) -> None:
        """Write the waiting lines and sync the file to the disk. A second call does nothing."""
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
        """Append the notes, in the writer's thread. Return whether these and all waiting lines are
        written."""
        is_written = self._append_waiting()
        for note in notes:
            if len(self._waiting) < _NOTES_MAX:
                self._waiting.append(note)
            else:
                self._miss()
        return is_written and self._append_waiting()

    def _append_waiting(self) -> bool:
        """Append the waiting lines, and before them a line with the number of missed ones."""
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
            _log.info("the audit log is writable again, and all waiting lines are written")
        self.refused = False
        return True

    def _miss(self) -> None:
        if not self._missed:
            _log.error("lines of the audit log are lost: too many are waiting")
        self._missed += 1
        metrics.record_lost()

    def _append(self, entry: dict[str, Any]) -> None:
        with translate_errors(self._path):
            while True:
                try:
                    self._append_once(entry)
                    return
                except OSError as error:
                    if not is_disk_full(error) or self._on_full is None or not self._on_full():
                        raise

    def _append_once(self, entry: dict[str, Any]) -> None:
        head = self._head or self._mend()
        if self._rotation is not None and self._rotation.is_due(
            os.fstat(self._fd).st_size, self._first_at(), entry["at"]
        ):
            head = self._rotate(head)
        self._head = None  # until the whole line is written
        line, new_head = format_line(entry, head, self._key)
        _write(self._fd, line)
        self._head = new_head

    def _first_at(self) -> float | None:
        """Return the time of the first line of the file, or None for an empty one."""
        if self._began_at is None and (entry := first_entry(self._fd)) is not None:
            self._began_at = float(entry["at"])
        return self._began_at

    def _rotate(self, head: str) -> str:
        """Begin a new file, and return the hash for its next line. If that fails, the old file
        stays in use. The next start completes a rotation that was killed between the renames."""
        if time.monotonic() < self._rotate_from:
            return head
        complete = next_file(self._path, self._fd, self._clock())
        next_path = self._path.with_suffix(".next")
        fd = None
        try:
            os.fsync(self._fd)
            next_path.unlink(missing_ok=True)
            fd = _opened(next_path)
            line, next_head = self._link(complete.name, self._fd, head)
            _write(fd, line)
            os.rename(self._path, complete)
            os.rename(next_path, self._path)
        except (OSError, Unavailable) as error:
            if fd is not None:
                os.close(fd)
            _log.warning("the audit log cannot be rotated: %s", error)
            self._rotate_from = time.monotonic() + _ROTATE_AGAIN_S
            return head
        os.close(self._fd)
        self._fd, self._began_at = fd, None
        return next_head

    def _link(self, name: str, fd: int, head: str) -> tuple[bytes, str]:
        """Return the first line of the file after the file `name`, which is open as `fd`."""
        first = first_entry(fd)
        earlier = first["details"]["count"] if first and first["what"] == ROTATED else 0
        details = {"file": name, "head": head, "count": earlier + count_lines(fd)}
        entry = self._entry("sbx", ROTATED, "audit", details)
        return format_line(entry, head, self._key)

    def _begin_to_sign(self) -> None:
        """Sign the last line of a log that has a key, even if nothing has happened since."""
        with translate_errors(self._path):
            last = _last_whole(self._fd)
            if last is None or not is_signed(last[0]):
                self._append(self._entry("sbx", SIGNED, "audit", {}))

    def _mend(self) -> str:
        """Return the hash for the next line. End a torn line first, and add a line that reports
        it."""
        size = os.fstat(self._fd).st_size
        if not size and (complete := rotated_files(self._path)):
            return self._continue(complete[-1])
        tail = os.pread(self._fd, _WINDOW, max(0, size - _WINDOW))
        matches = list(WHOLE_LINE.finditer(tail if tail.endswith(b"\n") else tail + b"\n"))
        head = matches[-1][1].decode() if matches else FIRST
        torn = tail[matches[-1].end() :] if matches else tail
        if tail and not tail.endswith(b"\n"):
            _write(self._fd, b"\n")
            torn = torn and torn + b"\n"
        if not torn:
            return head
        details = {"sha256": hashlib.sha256(torn).hexdigest()}
        entry = {"at": round(self._clock(), 6), "who": "sbx", "what": TORN, "object": "audit"}
        line, head = format_line(entry | {"details": details}, head, self._key)
        _write(self._fd, line)
        return head

    def _continue(self, complete: Path) -> str:
        """Begin an empty file after the last complete one, whose rotation was interrupted."""
        fd = os.open(complete, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            last = _last_whole(fd)
            head = last[1].decode() if last is not None else FIRST
            line, next_head = self._link(complete.name, fd, head)
        finally:
            os.close(fd)
        _write(self._fd, line)
        return next_head

    def _end(self) -> None:
        if lost := len(self._waiting) + self._missed:
            metrics.record_lost(len(self._waiting))
            _log.error("%d lines of the audit log are lost: it could not be written", lost)
        try:
            with translate_errors(self._path):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def _data(details: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the details if they can be written. The lines behind this one must be written in any
    case."""
    try:
        data = details()
        to_json(data)
    except Exception:  # noqa: BLE001  # `details` is the caller's function and may raise anything
        _log.exception("the details of a line of the audit log are not available")
        return {"untold": True}
    return data


def _cut(word: str) -> str:
    return word if len(word) <= _WORD_MAX else f"{word[: _WORD_MAX - 1]}…"


def _last_whole(fd: int) -> re.Match[bytes] | None:
    """Return the last whole line of a file, or None if it has none."""
    size = os.fstat(fd).st_size
    matches = list(WHOLE_LINE.finditer(os.pread(fd, _WINDOW, max(0, size - _WINDOW))))
    return matches[-1] if matches else None


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with translate_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                os.fchmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _write(fd: int, line: bytes) -> None:
    remaining = memoryview(line)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]
