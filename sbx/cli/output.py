"""Print messages, results, tables and times, for people or programs. See also run_output.py."""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sbx.cli.terminal import STDERR, STDOUT, OutputStream, colours, one_line, write
from sbx.errors import SbxError

if TYPE_CHECKING:
    from msgspec import Struct

    from sbx.protocol.runs import Quarantined

_RED, _CYAN, _RESET = "\x1b[31m", "\x1b[36m", "\x1b[0m"
_WIDTH_OF_A_FILE = 160
_STYLES = {"found": "green", "yes": "green", "missing": "red", "no": "red", "weaker": "yellow"}
_DURATIONS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def document(value: Mapping[str, Any]) -> None:
    """Print a JSON document as a line on stdout; a struct is an object of its fields. The document
    is ASCII, so it has no control characters."""
    write(STDOUT, json.dumps(value, default=_fields) + "\n")


def _fields(record: "Struct") -> dict[str, Any]:
    from msgspec.structs import asdict  # most commands print no structs

    return asdict(record)


def text(hostile: str) -> None:
    """Print a text of others, with its control characters escaped."""
    stream = OutputStream(STDOUT)
    stream.write(hostile)
    stream.fresh_line()
    stream.end()


def outcome(value: Mapping[str, Any], line: str, *, as_json: bool) -> None:
    """Print the result of a command: the document, or one line that another command can read."""
    if as_json:
        document(value)
    else:
        write(STDOUT, f"{line}\n")


def error(problem: SbxError, *, as_json: bool) -> None:
    """Print an error. All commands report their failure this way."""
    if as_json:
        with suppress(SbxError):  # stdout itself may be what failed
            document({"error": problem.to_dict()})
        return
    failure(problem.message, problem.hint)


def failure(message: str, hint: str | None = None) -> None:
    _print("error", _RED, message)
    if hint:
        _print("hint", _CYAN, hint)


def advice(message: str) -> None:
    """Print a hint for a failure of the user's code."""
    _print("hint", _CYAN, message)


def note(message: str) -> None:
    _print("note", _CYAN, message)


def quarantined(items: "Sequence[Quarantined]") -> None:
    """List the quarantined host executables of a run, and how to restore them."""
    from sbx.protocol.runs import quarantine_notice  # most commands run no code

    for line in quarantine_notice(items).splitlines():
        word, _, message = line.partition(": ")
        _print(word, _CYAN, message)


def _print(word: str, colour: str, message: str) -> None:
    head = f"{colour}{word}:{_RESET}" if colours(STDERR) else f"{word}:"
    with suppress(SbxError):  # the reader of stderr is gone
        write(STDERR, f"{head} {one_line(message)}\n")


# -- tables, times and sizes -----------------------------------------------------------------------


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str | None = None
) -> int:
    """Print a table: readable without colour, and with a fixed width outside a terminal. Return the
    number of its lines. `empty` is a note in place of a table without rows.

    On a terminal, the words found, missing, yes, no and weaker are coloured.
    """
    if empty is not None and not rows:
        note(empty)
        return 0
    from rich.box import SIMPLE_HEAD  # a lazy import keeps `sbx --help` fast
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column, head in enumerate(heads):
        # An id in the first column can be copied only if it is not wrapped.
        table.add_column(head, overflow="fold", no_wrap=column == 0)
    for row in rows:
        table.add_row(*(Text(one_line(cell), _STYLES.get(cell, "")) for cell in row))
    coloured = colours(STDOUT)
    page = io.StringIO()
    console = Console(
        file=page,
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        width=None if coloured else _WIDTH_OF_A_FILE,
    )
    console.print(table)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    write(STDOUT, "\n".join(lines) + "\n")
    return len(lines)


class LiveTable:
    """A table that is redrawn in place on a terminal; elsewhere it is printed again."""

    def __init__(self, heads: Sequence[str]) -> None:
        self._heads = heads
        self._lines = 0
        self._terminal = os.isatty(STDOUT) and os.environ.get("TERM") != "dumb"

    def show(self, rows: Sequence[Sequence[str]]) -> None:
        if self._terminal and self._lines:
            write(STDOUT, f"\x1b[{self._lines}A\x1b[J")
        self._lines = print_table(self._heads, rows)


def moment(value: object) -> datetime | None:
    """Parse a time of the service: ISO 8601 with `Z`, or seconds since the epoch."""
    if isinstance(value, (int, float)):
        return datetime.fromtimestamp(value, UTC)
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def since(value: object, now: datetime | None = None) -> str:
    """Return `3 min ago` or `in 2 h`, or an empty text without a time."""
    if (at := moment(value)) is None:
        return ""
    elapsed_s = ((now or datetime.now(UTC)) - at).total_seconds()
    return f"{span(elapsed_s)} ago" if elapsed_s >= 0 else f"in {span(-elapsed_s)}"


def clock(value: object) -> str:
    """Return the time to the second, in the time zone of the user."""
    at = moment(value)
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def span(length_s: float) -> str:
    """Return a duration in the largest unit that fits twice, to limit the rounding error."""
    for unit_s, unit in _DURATIONS:
        if length_s >= 2 * unit_s:
            return f"{round(length_s / unit_s)} {unit}"
    return f"{round(length_s)} s"


def milliseconds(value: object) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def size(count: float | None) -> str:
    """Return a number of bytes in the largest unit that fits, or `-` without a number."""
    if count is None:
        return "-"
    step = min(4, int(math.log(count, 1024))) if count >= 1 else 0
    amount = count / 1024**step
    shown = f"{amount:.0f}" if amount >= 10 or amount == int(amount) else f"{amount:.1f}"
    return f"{shown} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"
