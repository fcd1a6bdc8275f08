"""Show the events of an agent's run while it runs, for people or programs.

Telling   text to stdout; tool calls with their arguments and output to stderr
Lines     --json: one line of JSON for each event
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx.agent.tools.plan import plan_steps
from sbx.cli import output
from sbx.cli.terminal import STDERR, STDOUT, OutputStream, colours, lines_of, one_line, scrub, write
from sbx.protocol.agent import (
    AgentEvent,
    AgentRunEnd,
    AgentTextDelta,
    StepEnd,
    ToolApproval,
    ToolEnd,
    ToolOutput,
    ToolPending,
    ToolStart,
    to_json,
)
from sbx.protocol.approvals import AS_GRANT

_BLOCKS = {"code": " ", "command": " ", "content": " ", "old_string": "-", "new_string": "+"}
_BLOCK_MAX = 40  # lines of an argument of a tool call
_WORDS_MAX = 500  # characters of the short arguments
_RESULT_MAX = 8  # lines of a result that was not streamed
_MARGIN = "  | "
_MARKS = {"active": ">", "done": "x", "failed": "!"}  # of the steps of a plan
_BOLD, _DIM, _RED, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_ENDS: dict[str, tuple[str, str | None]] = {
    "max_steps": ("the agent reached its step limit", "allow more with --max-steps"),
    "budget": ("the agent used up its budget of tokens or time", None),
    "aborted": ("aborted", None),
}


class AgentLinePrinter:
    def show(self, event: AgentEvent) -> None:
        write(STDOUT, json.dumps(to_json(event)) + "\n")


@dataclass(slots=True)
class _Call:
    name: str
    streamed: str = ""  # the output that was shown already


class AgentPrinter:
    """Print the model's text as it arrives, and its tool calls in between."""

    def __init__(self) -> None:
        self._out = OutputStream(STDOUT)
        self._err = OutputStream(STDERR)
        self._calls: dict[str, _Call] = {}
        self._last_start = ""  # the id of the call
        self._within = False  # the last line of a tool's output has no newline yet

    def show(self, event: AgentEvent) -> None:
        match event:
            case AgentTextDelta(text):
                self._text(text)
            case ToolStart():
                self._start(event)
            case ToolPending():
                if self._last_start != event.tool_call_id or not _are_short(event.tool_args):
                    self.head(event.tool_name)
                    self._all_arguments(event.tool_args)
            case ToolOutput(call_id, _, text):
                self._output(call_id, text)
            case ToolApproval():
                self._approval(event)
            case ToolEnd():
                self._tool_end(event)
            case StepEnd():
                self._out.fresh_line()
            case AgentRunEnd():
                self._end(event)

    def head(self, title: str, rest: str = "", *, failed: bool = False) -> None:
        """Write a headline of sbx to stderr."""
        self._apart()
        self._err.end()  # reset the colours of the text before
        self._err.write(f"{_RED if failed else _BOLD}{one_line(title)}{_RESET}")
        self._err.write(f" {_DIM}{one_line(rest)}{_RESET}\n" if rest else "\n")

    def block(
        self,
        text: str,
        *,
        mark: str = " ",
        most: int = _BLOCK_MAX,
        last: bool = False,
        language: str | None = None,
    ) -> None:
        """Write the first lines of a text, or with `last` the last lines.

        Each line is marked, so that it cannot imitate a line of sbx. With a language, the text is
        highlighted if stderr shows colours.
        """
        self._apart()
        lines = lines_of(text)
        if language is not None and colours(STDERR):
            lines = _in_colours(lines, language)
        if cut := max(0, len(lines) - most):
            more = f"… {cut} more lines"
            lines = [more, *lines[cut:]] if last else [*lines[:most], more]
        for line in lines:
            self._err.write(f"  {_DIM}{mark}{_RESET} {line}\n")

    def has_streamed(self, call_id: str) -> bool:
        """Return whether output of this call was shown already."""
        return call_id in self._calls and bool(self._calls[call_id].streamed)

    # -- events ---------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if self._out.tty and self._err.tty:
            self._fresh_line()
        self._out.write(text)

    def _start(self, event: ToolStart) -> None:
        self._calls[event.tool_call_id] = _Call(event.tool_name)
        self._last_start = event.tool_call_id
        where = "" if event.sandboxed else " on this host, without a sandbox"
        if event.approval_required:
            self.head(event.tool_name + where)
            self._all_arguments(event.tool_args)
            return
        plan = plan_steps(event.tool_name, event.tool_args)
        self.head(event.tool_name + where, "" if plan else _words(event.tool_args))
        for step in plan or ():
            self.block(step["text"], mark=_MARKS.get(step["state"], " "))
        for name, mark in _BLOCKS.items():
            if isinstance(value := event.tool_args.get(name), str) and value:
                self.block(value, mark=mark, language=_language(name, event.tool_args))

    def _all_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Write each argument to its end, whatever its name is: the user approves all of them."""
        for name, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines = lines_of(text)
            mark = "" if len(lines) > 1 or name in _BLOCKS else f" {lines[0]}"
            self.block(f"{one_line(name)}:{mark}")
            if not mark:
                mark, language = _BLOCKS.get(name, " "), _language(name, arguments)
                self.block(text, mark=f"  {mark}", most=sys.maxsize, language=language)

    def _output(self, call_id: str, text: str) -> None:
        self._apart(fresh_line=False)
        if (call := self._calls.get(call_id)) is not None:
            call.streamed += text
        for line in text.splitlines(keepends=True):
            self._err.write(line if self._within else _MARGIN + line)
            self._within = not line.endswith("\n")

    def _approval(self, event: ToolApproval) -> None:
        always = f", and from now on ({event.remembered})" if event.remembered else ""
        if event.remembered in AS_GRANT:
            always = ", for an hour" if event.remembered == "hour" else ", for the conversation"
        word = "allowed" if event.approved else "denied"
        self.head(f"{word} by {event.by}{always}", failed=not event.approved)

    def _tool_end(self, event: ToolEnd) -> None:
        call = self._calls.pop(event.tool_call_id, _Call("the tool"))
        result = event.result
        if call.streamed:  # show only what the live output did not have, such as a traceback
            result = _without(result, call.streamed) if event.is_error else ""
        if result:
            self.block(scrub(result), mark="|", most=_RESULT_MAX, last=event.is_error)
        how = "failed" if event.is_error else "done"
        took = "from the cache" if event.cached else f"{event.duration_ms / 1000:.2f} s"
        self.head(f"{call.name} {how}", took, failed=event.is_error)

    def _end(self, event: AgentRunEnd) -> None:
        self._out.fresh_line()
        self._out.end()
        self._fresh_line()
        self._err.end()
        if event.reason == "error":
            error = event.error or {}
            output.failure(str(error.get("message", "the agent failed")), error.get("hint"))
        elif event.reason != "done":
            output.failure(*_ENDS[event.reason])

    def _apart(self, *, fresh_line: bool = True) -> None:
        """Begin a new line. On a terminal both streams share a line, and tools need their own."""
        if self._out.tty and self._err.tty:
            self._out.fresh_line()
        if fresh_line:
            self._fresh_line()

    def _fresh_line(self) -> None:
        self._err.fresh_line()
        self._within = False


def _words(arguments: Mapping[str, Any]) -> str:
    """Return the short arguments as one line."""
    short = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in arguments.items()
        if name not in _BLOCKS
    )
    return "  ".join(short)[:_WORDS_MAX]


def _are_short(arguments: Mapping[str, Any]) -> bool:
    """Return whether the start of a call shows these arguments to their ends."""
    blocks = [value for name, value in arguments.items() if name in _BLOCKS]
    return len(_words(arguments)) < _WORDS_MAX and all(
        isinstance(value, str) and len(lines_of(value)) <= _BLOCK_MAX for value in blocks
    )


def _language(name: str, arguments: Mapping[str, Any]) -> str | None:
    match name:
        case "code":
            return str(arguments.get("language", "python"))
        case "command":
            return "bash"
    return None


def _in_colours(lines: list[str], language: str) -> list[str]:
    """Return the same lines with syntax colours. The input has no colours."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(color_system="standard", force_terminal=True, highlight=False)
    text = Syntax("", language, theme="ansi_dark").highlight("\n".join(lines))
    with console.capture() as caught:
        console.print(text, soft_wrap=True, end="")
    return caught.get().rstrip("\n").split("\n")


def _without(result: str, streamed: str) -> str:
    """Return the lines of a result that are not among those that were streamed."""
    seen = {*streamed.splitlines(), "[stdout]", "[stderr]"}
    return "\n".join(line for line in result.splitlines() if line not in seen)
