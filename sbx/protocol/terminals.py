"""Terminals: how each is, what it shows, and the words of a WebSocket that is attached to one.

On that WebSocket binary messages are bytes as they are: typed ones to the terminal, written ones
from it. The first of them draws the screen as it is. A client that reads too slowly loses what lies
between, and is told the whole screen again in the same way. Messages of text are JSON:

    → {"type": "resize", "rows": 40, "columns": 120}
    ← {"type": "ended", "exit_code": 0, "reason": ""}       the last message

and the close codes are

    1000   the command has ended, and all that it wrote was told; or the client left
    1003   a message of the client is none of these
    1009   a message of the client is longer than `MESSAGE_MAX`
    1011   the client answered no ping, or the service failed
    1012   the service ends
    4401   the key or token that attached the client opens nothing any more
    4408   what was typed is not read inside
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx.errors import BadRequest

TERMINALS_MAX = 16  # of one conversation
CLIENTS_MAX = 16  # of one terminal
ROWS_MAX, COLUMNS_MAX = 200, 500
MESSAGE_MAX = 1 << 20  # bytes of one message, either way
TYPED_MAX = 64 << 10  # bytes of one write to a terminal; larger ones are cut in several
PING_S = 20.0  # seconds from ping to ping, and for its answer
NOT_READ = 4408
UNKNOWN = 4401
NOT_A_MESSAGE = 1003


@dataclass(frozen=True, slots=True)
class TerminalStatus:
    """One terminal. `command` is what was asked for, cut where it is long; None is a shell.

    `attached` counts its clients. `exit_code` is 128 + N for signal N, and None while it runs and
    where its kernel's jail ended with it: then `reason` says so.
    """

    id: str
    command: str | None
    rows: int
    columns: int
    running: bool
    created_at: float
    attached: int = 0
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TerminalScreen:
    """What a terminal shows: its lines without colours, and where the cursor is, as (row, column)
    counted from 0."""

    rows: int
    columns: int
    lines: tuple[str, ...]
    cursor: tuple[int, int]


def check_size(rows: int, columns: int) -> None:
    """Raises BadRequest `invalid_size`."""
    for value, most in ((rows, ROWS_MAX), (columns, COLUMNS_MAX)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise BadRequest(
                f"a terminal has 1 to {ROWS_MAX} rows and 1 to {COLUMNS_MAX} columns",
                code="invalid_size",
                details={"rows": ROWS_MAX, "columns": COLUMNS_MAX},
            )


def fitting(rows: int, columns: int) -> tuple[int, int]:
    """The nearest size that a terminal may have."""
    return min(max(rows, 1), ROWS_MAX), min(max(columns, 1), COLUMNS_MAX)


def status_from_json(told: Mapping[str, Any]) -> TerminalStatus:
    """Raises ValueError."""
    try:
        names = TerminalStatus.__dataclass_fields__
        return TerminalStatus(**{name: told[name] for name in names})
    except (KeyError, TypeError) as error:
        raise ValueError(f"a terminal lacks {error}") from None


def screen_from_json(told: Mapping[str, Any]) -> TerminalScreen:
    """Raises ValueError."""
    try:
        row, column = told["cursor"]
        lines = tuple(str(line) for line in told["lines"])
        return TerminalScreen(told["rows"], told["columns"], lines, (row, column))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a screen lacks {error}") from None
