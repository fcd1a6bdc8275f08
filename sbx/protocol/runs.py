"""A run: one cell, one shell command or one script. It yields events, then exactly one `Run`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

MimeBundle = Mapping[str, Any]
_NOTICE_MAX, _IDS_MAX = 20, 4
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
CODE_MAX = 8 << 20  # bytes of a cell, and of the input of a command
STDIN_MAX = 64 << 20  # bytes of the input of a file of Python


class Status(StrEnum):
    """The way in which a run ended; a closed list. User code that fails gives a result, not an
    exception."""

    OK = "ok"
    ERROR = "error"  # the code raised, or the command's exit code is not 0
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"
    KILLED = "killed"  # `cause` is the limit


class Cause(StrEnum):
    """The limit that a run exceeded; a closed list.

    It is always set for `killed`. `pids` is also used for `error` and `timeout`, when Linux refused
    another process to the run.
    """

    MEMORY = "memory"
    PIDS = "pids"
    CPU = "cpu"
    DISK = "disk"
    OUTPUT = "output"
    CRASHED = "crashed"
    HONEYTOKEN = "honeytoken"  # it used a planted credential
    DESCRIPTORS = "descriptors"  # it had more pipes or epoll instances than a jail may have


def strip_escapes(text: str) -> str:
    """Return the text without the colours and cursor movements of terminals."""
    return _ESCAPES.sub("", text)


@dataclass(frozen=True, slots=True)
class RunError:
    """The exception of the code. `traceback_ansi` is as in Jupyter: lines joined, with colours.
    `exit_text`: for SystemExit with a value that is not a number, the text that Python prints."""

    name: str
    value: str
    traceback_ansi: str
    exit_text: str | None = None

    @property
    def traceback(self) -> str:
        """The traceback as plain text."""
        return strip_escapes(self.traceback_ansi)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A new file or directory in a host directory that a program of the host would obey.

    `path` is relative to the directory. `name` is the matching entry of the table, `why` the
    program, and `id` the item for `sbx quarantine`.
    """

    path: str
    name: str
    why: str
    id: str


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run.

    A run can be ok and have an `error`: it was shown, and the code continued, as after `display(x)`
    if the repr of `x` raises.

    `text` is the output as a reader sees it: all prints and displays in order. `outputs` are the
    MIME bundles of displays and of the result, in order. `state_lost` is True if variables of the
    conversation are lost, because its kernel ended. `exit_code` is that of a command, a script, a
    file of Python, or SystemExit. `truncated` is True if the output exceeded the
    limit and was cut. `quarantined` lists host executables that code inside created since the last
    run. They are kept outside the directory. Durations are in seconds.
    """

    run_id: str
    status: Status
    cause: Cause | None = None
    stdout: str = ""
    stderr: str = ""
    text: str = ""
    result: str | None = None
    outputs: tuple[MimeBundle, ...] = ()
    error: RunError | None = None
    exit_code: int | None = None
    execution_count: int | None = None
    duration_s: float = 0.0
    state_lost: bool = False
    truncated: bool = False
    quarantined: tuple[Quarantined, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


def quarantine_notice(items: Sequence[Quarantined]) -> str:
    """Return a line for each quarantined item, and a hint how to restore it; "" for no items.

    No character of a path can end a line or control a terminal.
    """
    if not items:
        return ""
    named = items[:_NOTICE_MAX]
    lines = [f"quarantined: {item.path} ({item.why})" for item in named]
    if more := len(items) - len(named):
        lines.append(f"quarantined: {more} more")
    ids = " ".join(item.id for item in named[:_IDS_MAX])
    lines.append(f"hint: sbx quarantine list; sbx quarantine restore {ids}")
    return "".join(f"{_printable(line)}\n" for line in lines)


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


@dataclass(frozen=True, slots=True)
class RunStart:
    run_id: str
    type: Literal["run_start"] = field(default="run_start", init=False)


@dataclass(frozen=True, slots=True)
class Stdout:
    text: str
    type: Literal["stdout"] = field(default="stdout", init=False)


@dataclass(frozen=True, slots=True)
class Stderr:
    text: str
    type: Literal["stderr"] = field(default="stderr", init=False)


@dataclass(frozen=True, slots=True)
class Display:
    """A display. With `update`, it replaces the earlier display with this `display_id`."""

    data: MimeBundle
    metadata: Mapping[str, Any]
    display_id: str | None = None
    update: bool = False
    type: Literal["display"] = field(default="display", init=False)


@dataclass(frozen=True, slots=True)
class Clear:
    """Clear the displays so far; with `wait`, only when the next output arrives."""

    wait: bool
    type: Literal["clear"] = field(default="clear", init=False)


@dataclass(frozen=True, slots=True)
class Result:
    """The value of the last expression."""

    data: MimeBundle
    metadata: Mapping[str, Any]
    execution_count: int | None
    type: Literal["result"] = field(default="result", init=False)


@dataclass(frozen=True, slots=True)
class Error:
    error: RunError
    type: Literal["error"] = field(default="error", init=False)


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The code waits for a line; with `password`, one that must not be shown."""

    prompt: str
    password: bool
    type: Literal["input_request"] = field(default="input_request", init=False)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The last event, and the only one that carries the result."""

    run: Run
    type: Literal["run_end"] = field(default="run_end", init=False)


Event = RunStart | Stdout | Stderr | Display | Clear | Result | Error | InputRequest | RunEnd
