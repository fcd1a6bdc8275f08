"""The events of a run, as a person or a program reads them while it goes on.

    Screen   stdout to stdout, stderr and tracebacks to stderr, results as text
    Lines    --events: one JSON object a line, one for each event
    Whole    --json: one JSON document, the `Run`
"""

import base64
import json
from dataclasses import asdict
from typing import Any, Protocol

from sbx.cli import report
from sbx.cli.exits import Exit, by_system_exit
from sbx.cli.terminal import STDERR, STDOUT, Channel, write
from sbx.protocol.runs import (
    Cause,
    Display,
    Error,
    Event,
    InputRequest,
    MimeBundle,
    Result,
    Run,
    RunEnd,
    RunError,
    Status,
    Stderr,
    Stdout,
)

_HINTS = {
    Cause.MEMORY: "use less data at once, or a policy with a larger limits.memory_max",
    Cause.OUTPUT: "print less, or write it to a file of the workspace",
    Cause.PIDS: "start fewer processes, or use a policy with a larger limits.tasks_max",
    Cause.DISK: "write less, or use a policy with a larger limits.workspace_max",
}


class Face(Protocol):
    """`show` blocks as long as whoever reads the output does not read."""

    def show(self, event: Event) -> None: ...


class Screen:
    def __init__(self) -> None:
        self._out = Channel(STDOUT)
        self._err = Channel(STDERR)

    def show(self, event: Event) -> None:
        match event:
            case Stdout(text):
                self._out.write(text)
            case Stderr(text):
                self._err.write(text)
            case Display(data) | Result(data):
                self._out.fresh_line()
                self._out.write(_plain(data) + "\n")
            case Error(error):
                self._explain(error)
            case InputRequest(prompt):
                self._err.write(prompt)
            case RunEnd(run):
                self._end(run)

    def _explain(self, error: RunError) -> None:
        if error.name == "SystemExit":
            wordless = error.value == "" or by_system_exit(error.value) != Exit.FAILED
            text = "" if wordless or error.value == "1" else error.value
        else:
            text = error.traceback or f"{error.name}: {error.value}"
        if text:
            self._fresh_line()
            self._err.write(text.removesuffix("\n") + "\n")

    def _end(self, run: Run) -> None:
        if run.status not in (Status.OK, Status.ERROR):
            self._fresh_line()
        self._out.end()
        self._err.end()
        explained = run.error.value if run.error is not None else ""
        match run.status:
            case Status.TIMEOUT:
                report.failure(
                    "the run took longer than its time-out and was stopped",
                    "give it more with --timeout, up to limits.wall_time of the policy",
                )
            case Status.KILLED:
                assert run.cause is not None
                report.failure(f"killed ({run.cause}): {explained}", _HINTS.get(run.cause))
            case Status.INTERRUPTED:
                report.failure("interrupted")

    def _fresh_line(self) -> None:
        """On a terminal both streams share a line, and what failed is not to hang on it."""
        if self._out.tty and self._err.tty:
            self._out.fresh_line()
        self._err.fresh_line()


class Lines:
    def show(self, event: Event) -> None:
        write(STDOUT, json.dumps(asdict(event), default=_base64) + "\n")


class Whole:
    def show(self, event: Event) -> None:
        if isinstance(event, RunEnd):
            write(STDOUT, json.dumps(asdict(event.run), default=_base64) + "\n")


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value)} is no JSON")


def _plain(bundle: MimeBundle) -> str:
    plain = bundle.get("text/plain")
    return plain if isinstance(plain, str) else f"<{', '.join(sorted(bundle))}>"
