"""A person at the terminal is asked whether a call may be made."""

import asyncio
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sbx.agent.approvals import Approvals
from sbx.cli import report
from sbx.cli.telling import Telling
from sbx.cli.terminal import END_OF_INPUT, STDERR, STDIN, one_line, write
from sbx.errors import BadRequest, Conflict
from sbx.protocol.agent import ToolStart
from sbx.protocol.approvals import Reach, Remember

_OUTPUT_LINES = 20
_MARKS = {"added": "+", "changed": "~", "removed": "-"}

Read = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    approved: bool
    remember: Remember | None = None
    prefix: str | None = None


class Questions:
    """The calls of one chat that wait for a person, who is asked about one after the other."""

    def __init__(
        self, approvals: Approvals, reach: Reach, telling: Telling, read: Read | None
    ) -> None:
        """`read` gives what is typed; None where nobody can be asked, and all is denied."""
        self._approvals = approvals
        self._reach = reach
        self._telling = telling
        self._read = read
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def add(self, event: ToolStart) -> None:
        """Ask, now or in its turn."""
        self._tasks[event.tool_call_id] = asyncio.create_task(self._ask(event))

    def drop(self, tool_call_id: str) -> None:
        """It is decided."""
        if (task := self._tasks.pop(tool_call_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        left, self._tasks = list(self._tasks.values()), {}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _ask(self, event: ToolStart) -> None:
        async with self._turn:
            show_rehearsal(event, self._telling)
            if self._read is None:
                report.note("stdin is no terminal, so nobody can be asked")
                await self._decide(event, Answer(False), by="nobody")
                return
            while True:
                answer = await ask(event, self._read)
                try:
                    await self._decide(event, answer, by="you")
                    return
                except BadRequest as error:  # of the words that are to be remembered
                    report.error(error, as_json=False)

    async def _decide(self, event: ToolStart, answer: Answer, *, by: str) -> None:
        with suppress(Conflict):  # it was decided meanwhile, by its time or by Ctrl-C
            await self._approvals.decide(
                self._reach,
                event.tool_call_id,
                answer.approved,
                remember=answer.remember,
                prefix=answer.prefix,
                by=by,
            )


def show_rehearsal(event: ToolStart, telling: Telling) -> None:
    """What a call did on a copy of the workspace, as a person decides by it."""
    told = event.rehearsal
    if told is None:
        telling.head(
            "this was not tried on a copy first:", "a yes makes it in the files themselves"
        )
        return
    ended = f"exit code {told['exit_code']}" if told["exit_code"] is not None else told["status"]
    if "path" not in event.tool_args:  # a tool that only writes a file shows all by its diff
        network = "" if _is_cell(event) else ", without network"
        telling.head(f"tried on a copy of the files{network}:", str(ended))
    if told["output"]:
        telling.block(told["output"], mark="|", most=_OUTPUT_LINES)
    changes: Sequence[Mapping[str, Any]] = told["changes"]
    telling.head("it would change no file" if not changes else "it would change:")
    for change in changes:
        show_change(change, telling)
    for one in told.get("host_executables", ()):
        path, program = one_line(one["path"]), one_line(one["program"])
        telling.block(f"{path}  (new, and {program} would obey it on this host)", mark="!")
    if told["truncated"]:
        telling.block("… and more than is shown here: a yes makes that, too")
    for path in told.get("left_out", ()):
        telling.block(
            f"{one_line(path)}  (not in the copy: not a file, not readable, or attached)", mark="!"
        )


def _is_cell(event: ToolStart) -> bool:
    return "code" in event.tool_args and event.tool_args.get("language", "python") == "python"


def show_change(change: Mapping[str, Any], telling: Telling, *, most: int = sys.maxsize) -> None:
    """Show one file, and the first `most` lines of its diff: all where a person decides by it."""
    sizes = (change["size_before"], change["size_after"])
    size = " -> ".join(f"{one}" for one in sizes if one is not None)
    path = one_line(change["path"])
    telling.block(f"{path}  ({size} bytes)" if size else path, mark=_MARKS[change["kind"]])
    if change["diff"]:
        telling.block(change["diff"], mark="    ", most=most)


async def ask(event: ToolStart, read: Read) -> Answer:
    """Yes, no, or always. Text typed before the question does not answer it. No rule answers for
    changes, except for those of a command."""
    forget_typed()
    question = "Make these changes?" if event.rehearsal is not None else "Allow this?"
    may_be_remembered = event.rehearsal is None or "command" in event.tool_args
    choices = "[y]es, [n]o, [a]lways" if may_be_remembered else "[y]es, [n]o"
    while True:
        write(STDERR, f"{question} {choices}: ")
        said = await read()
        match said.strip().lower():
            case "y" | "yes":
                return Answer(True)
            case "n" | "no":
                return Answer(False)
            case "a" | "always" if may_be_remembered:
                return await _always(event, read)
        if said == END_OF_INPUT:
            return Answer(False)


async def _always(event: ToolStart, read: Read) -> Answer:
    if "command" not in event.tool_args:
        return Answer(True, "exact")
    write(STDERR, "Enter for exactly this, or the words that such commands begin with: ")
    said = await read()
    if said == END_OF_INPUT:
        return Answer(False)
    words = said.strip()
    return Answer(True, "prefix", words) if words else Answer(True, "exact")


def forget_typed() -> None:
    with suppress(termios.error):
        termios.tcflush(STDIN, termios.TCIFLUSH)
