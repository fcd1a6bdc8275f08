"""The files of an audit log that is rotated: the condition for a new file, and the names.

The current file is `audit.jsonl`. Complete ones are `audit-NUMBER-DAY.jsonl`, in the order of their
names. See `audit_chain` for the line that links a file to the one before it.
"""

import glob
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROTATED = "audit.rotated"  # the first line of each file but the first
_NUMBER = re.compile(r"-([0-9]{6,18})-[0-9]{8}\.")
_FIRST_LINE = re.compile(rb'\{.*,"hash":"[0-9a-f]{64}"\}\n')
_WINDOW = 1 << 20  # bytes of one read; a line is much shorter


class Rotation(NamedTuple):
    """When a log gets a new file: before it has more than `size_max` bytes, and when the UTC day or
    month of its first line is over."""

    size_max: int = 64 << 20
    period: Literal["never", "day", "month"] = "month"

    def is_due(self, size: int, began_at: float | None, now: float) -> bool:
        """Return whether a file of `size` bytes whose first line is of `began_at` is complete."""
        if began_at is None:
            return False
        if size >= self.size_max:
            return True
        if self.period == "never":
            return False
        digits = {"day": "%Y-%m-%d", "month": "%Y-%m"}[self.period]
        begun, today = (time.strftime(digits, time.gmtime(at)) for at in (began_at, now))
        return begun < today


def rotated_files(path: Path) -> list[Path]:
    """Return the complete files of the log at `path`, the oldest first."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}-*{path.suffix}"))


def next_file(path: Path, fd: int, now: float) -> Path:
    """Return the name for the current file, open as `fd`, once it is complete. Its number is above
    those of all complete files, also of those that were moved away."""
    first = first_entry(fd)
    names = [complete.name for complete in rotated_files(path)]
    if first is not None and first["what"] == ROTATED:
        names.append(first["details"]["file"])
    numbers = [int(match[1]) for name in names if (match := _NUMBER.search(name))]
    day = time.strftime("%Y%m%d", time.gmtime(now))
    return path.with_name(f"{path.stem}-{max(numbers, default=0) + 1:06}-{day}{path.suffix}")


def first_entry(fd: int) -> dict[str, Any] | None:
    """Return the first line of a file, or None if it has none that is whole."""
    match = _FIRST_LINE.match(os.pread(fd, _WINDOW, 0))
    if match is None:
        return None
    entry: dict[str, Any] = json.loads(match[0])
    return entry


def count_lines(fd: int) -> int:
    """Return the number of lines of a file."""
    count = offset = 0
    while piece := os.pread(fd, _WINDOW, offset):
        count += piece.count(b"\n")
        offset += len(piece)
    return count
