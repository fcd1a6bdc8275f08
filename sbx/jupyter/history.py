"""The executed cells, for history requests. Kept on the host, so that they survive a restart.

A session is the life of one kernel; sessions are numbered from 1. The size is limited: the oldest
lines are dropped first.
"""

import fnmatch
import re
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from msgspec import Struct

from sbx.jupyter.parse import HistoryRequest as HistoryRequest

LINES_MAX = 10_000
TEXT_MAX = 8 << 20  # characters of all lines and outputs
OUTPUT_MAX = 16 << 10
_TAIL = 10


class HistoryCell(Struct):
    """One cell. `output` is the value of its last expression, as text."""

    session: int
    number: int
    code: str
    output: str | None = None

    @property
    def size(self) -> int:
        return len(self.code) + len(self.output or "")


class CellHistory:
    """See the module."""

    def __init__(self) -> None:
        self.session = 0
        self._lines: deque[HistoryCell] = deque()
        self._size = 0

    def begin_session(self) -> None:
        """Begin the session of a new kernel: its lines are numbered from 1 again."""
        self.session += 1

    def add(self, number: int, code: str, output: str | None = None) -> None:
        """Record an executed cell."""
        line = HistoryCell(
            self.session, number, code, None if output is None else output[:OUTPUT_MAX]
        )
        self._lines.append(line)
        self._size += line.size
        while self._size > TEXT_MAX or len(self._lines) > LINES_MAX:
            self._size -= self._lines.popleft().size

    def reply(self, request: HistoryRequest) -> dict[str, Any]:
        """Return the content of the reply."""
        lines = [_entry(line, with_output=request.output) for line in self._select(request)]
        return {"status": "ok", "history": lines}

    def _select(self, request: HistoryRequest) -> Iterable[HistoryCell]:
        match request.hist_access_type:
            case "tail":
                return self._last(self._lines, _TAIL if request.n is None else request.n)
            case "search":
                return self._matching(request.pattern or "*", request.n, unique=request.unique)
            case "range":
                return self._range(request.session, request.start, request.stop)

    def _range(self, session: int, start: int | None, stop: int | None) -> Iterable[HistoryCell]:
        """Yield lines from `start` up to, and without, `stop`. Sessions of 0 or less count back."""
        if session <= 0:
            session += self.session
        for line in self._lines:
            if line.session == session and (start or 0) <= line.number:
                if stop is not None and line.number >= stop:
                    return
                yield line

    def _matching(self, pattern: str, limit: int | None, *, unique: bool) -> Iterable[HistoryCell]:
        """Return the last lines that match a glob; with `unique`, only the last of each text."""
        fits = re.compile(fnmatch.translate(pattern)).match  # it scans a text only once
        matches = [line for line in self._lines if fits(line.code)]
        if unique:
            last = {line.code: line for line in matches}
            matches = [line for line in matches if last[line.code] is line]
        return matches if limit is None else self._last(matches, limit)

    @staticmethod
    def _last(lines: deque[HistoryCell] | list[HistoryCell], limit: int) -> Iterable[HistoryCell]:
        return islice(lines, max(0, len(lines) - max(0, limit)), None)


def _entry(line: HistoryCell, *, with_output: bool) -> tuple[int, int, Any]:
    entry = (line.code, line.output) if with_output else line.code
    return line.session, line.number, entry
