"""What was executed, for those who ask: on the host, where a restart leaves it.

A session is the life of one kernel; they are numbered from 1. What is held is bounded: the oldest
lines make room.
"""

import fnmatch
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sbx.jupyter.requests import History as Asked

LINES_MAX = 10_000
TEXT_MAX = 8 << 20  # characters of all lines and outputs
OUTPUT_MAX = 16 << 10
_TAIL = 10


@dataclass(slots=True)
class Line:
    """One cell. `output` is the value of its last expression, as text."""

    session: int
    number: int
    code: str
    output: str | None = None

    @property
    def size(self) -> int:
        return len(self.code) + len(self.output or "")


class History:
    """See the module."""

    def __init__(self) -> None:
        self.session = 0
        self._lines: deque[Line] = deque()
        self._size = 0

    def begin_session(self) -> None:
        """Another kernel: its lines are numbered from 1 again."""
        self.session += 1

    def add(self, number: int, code: str, output: str | None = None) -> None:
        """A cell that was executed, and is to be remembered."""
        line = Line(self.session, number, code, None if output is None else output[:OUTPUT_MAX])
        self._lines.append(line)
        self._size += line.size
        while self._size > TEXT_MAX or len(self._lines) > LINES_MAX:
            self._size -= self._lines.popleft().size

    def asked(self, asked: Asked) -> dict[str, Any]:
        """The content of the reply."""
        lines = [_entry(line, with_output=asked.output) for line in self._found(asked)]
        return {"status": "ok", "history": lines}

    def _found(self, asked: Asked) -> Iterable[Line]:
        match asked.hist_access_type:
            case "tail":
                return self._last(self._lines, _TAIL if asked.n is None else asked.n)
            case "search":
                return self._matching(asked.pattern or "*", asked.n, unique=asked.unique)
            case "range":
                return self._range(asked.session, asked.start, asked.stop)

    def _range(self, session: int, start: int | None, stop: int | None) -> Iterable[Line]:
        """Lines from `start` up to, and without, `stop`; sessions of 0 and less count back."""
        if session <= 0:
            session += self.session
        for line in self._lines:
            if line.session == session and (start or 0) <= line.number:
                if stop is not None and line.number >= stop:
                    return
                yield line

    def _matching(self, pattern: str, most: int | None, *, unique: bool) -> Iterable[Line]:
        """The last lines that fit a glob; with `unique`, of each text the last one."""
        fits = re.compile(fnmatch.translate(pattern)).match  # it goes through a text once
        found = [line for line in self._lines if fits(line.code)]
        if unique:
            last = {line.code: line for line in found}
            found = [line for line in found if last[line.code] is line]
        return found if most is None else self._last(found, most)

    @staticmethod
    def _last(lines: deque[Line] | list[Line], most: int) -> Iterable[Line]:
        return islice(lines, max(0, len(lines) - max(0, most)), None)


def _entry(line: Line, *, with_output: bool) -> tuple[int, int, Any]:
    said = (line.code, line.output) if with_output else line.code
    return line.session, line.number, said
