"""Terminals: their status, their screen, and the messages of an attached WebSocket.

On the WebSocket, binary messages are raw bytes: input to the terminal, and output from it. The
first output message draws the current screen. A client that reads too slowly misses the output in
between and gets the whole screen again in the same way. Text messages are JSON:

    → {"type": "resize", "rows": 40, "columns": 120}
    ← {"type": "ended", "exit_code": 0, "reason": ""}       the last message

The close codes are:

    1000   the command has ended, and all its output was sent; or the client left
    1003   a message of the client has an unknown form
    1009   a message of the client is longer than `MESSAGE_MAX`
    1011   the client did not answer a ping, or the service failed
    1012   the service is stopping
    4401   the key or token of the client has become invalid
    4408   the program inside does not read its input
"""

from dataclasses import dataclass

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
    """One terminal. `command` is the requested command, cut if it is long; None is a shell.

    `attached` is the number of its clients. `exit_code` is 128 + N for signal N. It is `None` while
    the terminal runs. It is also `None` if the jail of its kernel ended with it; `reason` then
    states this.
    """

    id: str
    command: str | None
    rows: int
    columns: int
    running: bool
    created_at: float
    attached: int
    exit_code: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class TerminalScreen:
    """The screen of a terminal: its lines without colours, and the cursor.

    The cursor is (row, column), counted from 0.
    """

    rows: int
    columns: int
    lines: tuple[str, ...]
    cursor: tuple[int, int]


def check_size(rows: int, columns: int) -> None:
    """Raise BadRequest `invalid_size` if a terminal cannot have this size."""
    for value, maximum in ((rows, ROWS_MAX), (columns, COLUMNS_MAX)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise BadRequest(
                f"a terminal must have 1 to {ROWS_MAX} rows and 1 to {COLUMNS_MAX} columns",
                code="invalid_size",
                details={"rows": ROWS_MAX, "columns": COLUMNS_MAX},
            )


def fitting(rows: int, columns: int) -> tuple[int, int]:
    """Return the nearest size that a terminal may have."""
    return min(max(rows, 1), ROWS_MAX), min(max(columns, 1), COLUMNS_MAX)
