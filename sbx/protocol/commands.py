"""Background commands: how each of them is, and pieces of what it wrote.

A log is the UTF-8 text of both streams in the order in which it came; an offset is a number of its
bytes since the beginning. Only the latest part is kept: `log_begin` says from where on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sbx.protocol.events import text_from_json, text_to_json

T = TypeVar("T")

STDIN_MAX = 1 << 20  # bytes that wait to be read by a command
LOG_PIECE_MAX = 1 << 20  # bytes of one answer
LOG_PIECE = 1 << 18  # … where nothing is said, and of one event of a log that is followed
WAIT_MAX_S = 50.0  # of one request; a client asks again


class CommandState(StrEnum):
    """How a background command is, or how it ended; a closed list."""

    RUNNING = "running"
    EXITED = "exited"  # by itself; `exit_code` says how
    STOPPED = "stopped"  # by `stop`
    KILLED = "killed"  # by a limit, or with its kernel's jail; `cause` and `reason` say why
    FAILED = "failed"  # it could not be started; `reason` says why


class CommandCause(StrEnum):
    """What ended a command that was killed; a closed list. `memory` to `disk` are limits."""

    MEMORY = "memory"
    PIDS = "pids"
    CPU = "cpu"
    DISK = "disk"
    OUTPUT = "output"
    TRIPWIRE = "tripwire"  # a planted credential was used in its sandbox
    DESCRIPTORS = "descriptors"  # its jail held more pipes or epoll instances than one may
    CRASHED = "crashed"  # the kernel whose jail it ran in died by itself
    INTERRUPTED = "interrupted"  # a cell that did not end was killed, and its kernel with it
    STOPPED = "stopped"  # the kernel was stopped or restarted on request
    EVICTED = "evicted"  # the kernel made room for others
    CLOSED = "closed"  # the conversation, the sandbox or the service ended, or was idle


@dataclass(frozen=True, slots=True)
class CommandStatus:
    """One background command. Times in seconds of the epoch; a long `command` is cut.

    `exit_code` is 128 + N for signal N, as in a shell, and None while it runs and where nobody
    knows. The log holds the bytes from `log_begin` to `log_end`. `stdin_open`: it may be written
    to. `state_lost` says that variables of the conversation were gone when it was started.
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
    """Text of a log from `offset` to `next_offset`. An `offset` beyond the one that was asked for
    says that what lies between them is kept no more."""

    offset: int
    next_offset: int
    text: str


def status_to_json(status: CommandStatus) -> dict[str, Any]:
    """Every field by its own name."""
    return {
        "id": status.id,
        "command": text_to_json(status.command),
        "state": status.state.value,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "exit_code": status.exit_code,
        "cause": status.cause and status.cause.value,
        "reason": text_to_json(status.reason),
        "log_begin": status.log_begin,
        "log_end": status.log_end,
        "stdin_open": status.stdin_open,
        "state_lost": status.state_lost,
    }


def status_from_json(told: Mapping[str, Any]) -> CommandStatus:
    """Raises ValueError for what is none; fields that are unknown here are left aside."""
    return _read(
        "a command",
        lambda: CommandStatus(
            id=_is(told["id"], str),
            command=text_from_json(told["command"]),
            state=CommandState(told["state"]),
            started_at=_is(told["started_at"], int, float),
            ended_at=_is(told["ended_at"], int, float, type(None)),
            exit_code=_is(told["exit_code"], int, type(None)),
            cause=None if told["cause"] is None else CommandCause(told["cause"]),
            reason=text_from_json(told["reason"]),
            log_begin=_is(told["log_begin"], int),
            log_end=_is(told["log_end"], int),
            stdin_open=_is(told["stdin_open"], bool),
            state_lost=_is(told["state_lost"], bool),
        ),
    )


def piece_to_json(piece: LogPiece) -> dict[str, Any]:
    return {
        "offset": piece.offset,
        "next_offset": piece.next_offset,
        "text": text_to_json(piece.text),
    }


def piece_from_json(told: Mapping[str, Any]) -> LogPiece:
    """Raises ValueError."""
    return _read(
        "a piece of a log",
        lambda: LogPiece(
            _is(told["offset"], int), _is(told["next_offset"], int), text_from_json(told["text"])
        ),
    )


def _is(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{str(value)[:80]!r}")
    return value


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what} lacks or garbles {error}") from None
