"""Print the events of a run, for people or programs.

TextPrinter       stdout to stdout, stderr and tracebacks to stderr, results as text
JsonLinesPrinter  --events: one line of JSON for each event
JsonPrinter       --json: one JSON document, the `Run`
"""

import json
from dataclasses import asdict
from typing import TypeAlias

from sbx.cli.output import failure, quarantined
from sbx.cli.terminal import STDERR, STDOUT, OutputStream, write
from sbx.protocol.bundles import text_of
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

_KILLED = {
    Cause.MEMORY: (
        "it used more memory than limits.memory_max of the policy",
        "use less data at once, or a policy that allows more",
    ),
    Cause.OUTPUT: (
        "it printed more than limits.output_max of the policy",
        "print less, or write to a file of the workspace",
    ),
    Cause.PIDS: (
        "it started more processes and threads than limits.tasks_max of the policy",
        "start fewer, or use a policy that allows more",
    ),
    Cause.DISK: (
        "the workspace grew beyond limits.workspace_max or workspace_files of the policy",
        "write less, or use a policy that allows more; of a directory of the host only the growth"
        " counts",
    ),
    Cause.CPU: ("it used more CPU than the policy allows", None),
    Cause.HONEYTOKEN: (
        "a planted credential was used, and the sandbox is frozen",
        "look at the runs of the sandbox; an operator may unfreeze it, or delete it",
    ),
    Cause.DESCRIPTORS: (
        "it held more pipes or epoll instances than one sandbox may: Linux counts them per user",
        "close those that are not needed",
    ),
    Cause.CRASHED: ("the kernel process ended by itself", None),
}


class TextPrinter:
    """Show events for people. `show` blocks while the reader of the output does not read."""

    def __init__(self) -> None:
        self._out = OutputStream(STDOUT)
        self._err = OutputStream(STDERR)

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
        text: str | None = error.traceback_ansi or f"{error.name}: {error.value}"
        if error.name == "SystemExit":
            text = error.exit_text
        if text is not None:
            self._fresh_line()
            self._err.write(text.removesuffix("\n") + "\n")

    def _end(self, run: Run) -> None:
        if run.status not in (Status.OK, Status.ERROR):
            self._fresh_line()
        self._out.end()
        self._err.end()
        match run.status:
            case Status.TIMEOUT:
                failure(
                    "the run took longer than its time-out and was stopped",
                    "allow more with --timeout, up to limits.wall_time of the policy",
                )
            case Status.KILLED:
                sentence, hint = _KILLED[run.cause or Cause.CRASHED]
                failure(f"killed ({run.cause}): {sentence}", hint)
            case Status.INTERRUPTED:
                failure("interrupted")
        quarantined(run.quarantined)

    def _fresh_line(self) -> None:
        """Begin a new line. On a terminal both streams share a line, and an error needs its own."""
        if self._out.tty and self._err.tty:
            self._out.fresh_line()
        self._err.fresh_line()


class JsonLinesPrinter:
    def show(self, event: Event) -> None:
        write(STDOUT, json.dumps(asdict(event)) + "\n")


class JsonPrinter:
    def show(self, event: Event) -> None:
        if isinstance(event, RunEnd):
            write(STDOUT, json.dumps(asdict(event.run)) + "\n")


Printer: TypeAlias = TextPrinter | JsonLinesPrinter | JsonPrinter


def printer(*, as_json: bool, as_events: bool) -> Printer:
    """Return the printer that the options of a command select."""
    return JsonPrinter() if as_json else JsonLinesPrinter() if as_events else TextPrinter()


def _plain(bundle: MimeBundle) -> str:
    plain = text_of(bundle, "text/plain")
    return plain if plain is not None else f"<{', '.join(sorted(bundle))}>"
