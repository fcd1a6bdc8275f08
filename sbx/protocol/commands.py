"""Background commands: their status, and pieces of their logs.

A log is the UTF-8 text of both streams in the order of arrival. An offset counts its bytes from the
beginning. Only the latest part of a log is kept: it starts at `log_begin`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sbx.protocol.events import value_from_json, value_to_json
from sbx.protocol.fields import read_fields, write_fields

STDIN_MAX = 1 << 20  # bytes of pending input of a command
LOG_PIECE_MAX = 1 << 20  # bytes of one reply
LOG_PIECE = 1 << 18  # … the default, and the maximum of one event of a followed log
WAIT_MAX_S = 50.0  # of one request; the client repeats it


class CommandState(StrEnum):
    """The state of a background command; a closed list."""

    RUNNING = "running"
    EXITED = "exited"  # by itself, with `exit_code`
    STOPPED = "stopped"  # by `stop`
    KILLED = "killed"  # by a limit, or with its kernel's jail; `cause` and `reason` explain it
    FAILED = "failed"  # it could not be started; `reason` explains it


class CommandCause(StrEnum):
    """The reason why a command was killed; a closed list. `memory` to `disk` are limits."""

    MEMORY = "memory"
    PIDS = "pids"
    CPU = "cpu"
    DISK = "disk"
    OUTPUT = "output"
    HONEYTOKEN = "honeytoken"  # a planted credential was used in its sandbox
    DESCRIPTORS = "descriptors"  # its jail had more pipes or epoll instances than a jail may have
    CRASHED = "crashed"  # the kernel of its jail died by itself
    INTERRUPTED = "interrupted"  # a cell that did not end was killed together with its kernel
    STOPPED = "stopped"  # the kernel was stopped or restarted on request
    EVICTED = "evicted"  # the kernel made room for others
    CLOSED = "closed"  # the conversation, the sandbox or the service ended, or was idle


@dataclass(frozen=True, slots=True)
class CommandStatus:
    """One background command. Times are in seconds of the epoch; a long `command` is cut.

    `exit_code` is 128 + N for signal N, as in a shell. It is `None` while the command runs and if
    it is unknown. The log contains the bytes from `log_begin` to `log_end`. `stdin_open` is True
    while the caller may write to the command. `state_lost` is True if variables of the conversation
    were lost before it started.
    """

    id: str
    command: str
    state: CommandState
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    cause: CommandCause | None = None
    reason: str = ""
    log_begin: int = 0
    log_end: int = 0
    stdin_open: bool = False
    state_lost: bool = False

    @property
    def running(self) -> bool:
        return self.state is CommandState.RUNNING


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Text of a log from `offset` to `next_offset`.

    If `offset` is larger than the requested offset, the bytes in between have been discarded.
    """

    offset: int
    next_offset: int
    text: str


def to_json(value: CommandStatus | LogPiece) -> dict[str, Any]:
    """Return every field by its own name."""
    form: dict[str, Any] = value_to_json(write_fields(value))
    return form


def status_from_json(data: Any) -> CommandStatus:
    """Return the status. Ignore unknown fields. Raise ValueError for invalid data."""
    return read_fields(CommandStatus, value_from_json(data))


def piece_from_json(data: Any) -> LogPiece:
    """Return the piece. Raise ValueError for invalid data."""
    return read_fields(LogPiece, value_from_json(data))


def piece_of(offset: int, data: bytes, *, more: bool) -> LogPiece:
    """Return a piece of whole characters. The offset may lie within a character, and so may the end
    of the data if `more` follows."""
    skipped = 0
    while skipped < min(3, len(data)) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    data = data[skipped:]
    if more:
        data = data[: len(data) - _begun(data)]
    offset += skipped
    return LogPiece(offset, offset + len(data), data.decode("utf-8", "replace"))


def _begun(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0
