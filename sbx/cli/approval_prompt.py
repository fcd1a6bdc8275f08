"""Ask the user at the terminal to approve tool calls."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sbx.agent.approvals import Approvals
from sbx.agent.tools import access
from sbx.cli import output
from sbx.cli.agent_output import AgentPrinter
from sbx.cli.terminal import END_OF_INPUT, STDERR, forget_typed, one_line, scrub, write
from sbx.errors import BadRequest, Conflict
from sbx.protocol.agent import ToolPending
from sbx.protocol.approvals import ApprovalScope, Remember
from sbx.protocol.grants import Access

_OUTPUT_LINES = 20
_MARKS = {"added": "+", "changed": "~", "removed": "-"}

Read = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    approved: bool
    remember: Remember | None = None
    prefix: str | None = None


class ApprovalPrompts:
    """The tool calls of one chat that wait for approval. The user is asked about one at a time."""

    def __init__(
        self, approvals: Approvals, reach: ApprovalScope, telling: AgentPrinter, read: Read | None
    ) -> None:
        """`read` returns a typed line. Without it, every call is denied."""
        self._approvals = approvals
        self._reach = reach
        self._telling = telling
        self._read = read
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def add(self, event: ToolPending) -> None:
        """Ask about this call, after the calls before it."""
        self._tasks[event.tool_call_id] = asyncio.create_task(self._ask(event))

    def drop(self, tool_call_id: str) -> None:
        """Stop asking about a call that is decided."""
        if (task := self._tasks.pop(tool_call_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        pending, self._tasks = list(self._tasks.values()), {}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _ask(self, event: ToolPending) -> None:
        async with self._turn:
            show_dry_run(event, self._telling)
            if self._read is None:
                output.note("stdin is not a terminal, so the call is denied without a question")
                await self._decide(event, Answer(False), by="nobody")
                return
            while True:
                answer = await ask(event, self._read)
                try:
                    await self._decide(event, answer, by="you")
                    return
                except BadRequest as error:  # the words to remember are invalid
                    output.error(error, as_json=False)

    async def _decide(self, event: ToolPending, answer: Answer, *, by: str) -> None:
        with suppress(Conflict):  # decided meanwhile, by its time-out or by Ctrl-C
            await self._approvals.decide(
                self._reach,
                event.tool_call_id,
                answer.approved,
                remember=answer.remember,
                prefix=answer.prefix,
                by=by,
            )


def show_dry_run(event: ToolPending, telling: AgentPrinter) -> None:
    """Show the result of the dry run of a call, so that the user can decide."""
    dry_run = event.dry_run
    if event.tool_name == access.NAME:
        return
    if dry_run is None:
        telling.head("this call had no dry run:", "a yes applies it to the files directly")
        return
    outcome = (
        f"exit code {dry_run['exit_code']}"
        if dry_run["exit_code"] is not None
        else dry_run["status"]
    )
    # For a tool that only writes a file, the diff shows everything.
    if "path" not in event.tool_args:
        network = "" if _is_cell(event) else ", without network"
        telling.head(f"dry run on a copy of the files{network}:", str(outcome))
    if dry_run["output"] and not telling.has_streamed(event.tool_call_id):
        telling.block(scrub(dry_run["output"]), mark="|", most=_OUTPUT_LINES)
    changes: Sequence[Mapping[str, Any]] = dry_run["changes"]
    telling.head("it would change no file" if not changes else "it would change:")
    for change in changes:
        show_change(change, telling)
    for entry in dry_run.get("host_executables", ()):
        path, program = one_line(entry["path"]), one_line(entry["program"])
        telling.block(f"{path}  (new, and {program} would obey it on this host)", mark="!")
    if dry_run["truncated"]:
        telling.block("… and more changes that are not shown: a yes applies them, too")
    for path in dry_run.get("left_out", ()):
        telling.block(
            f"{one_line(path)}  (not in the copy: not a file, not readable, or mounted)", mark="!"
        )


def _is_cell(event: ToolPending) -> bool:
    return "code" in event.tool_args and event.tool_args.get("language", "python") == "python"


def show_change(
    change: Mapping[str, Any], telling: AgentPrinter, *, most: int = sys.maxsize
) -> None:
    """Show one file and the first `most` lines of its diff. Show all lines if the user decides."""
    sizes = (change["size_before"], change["size_after"])
    size = " -> ".join(f"{count}" for count in sizes if count is not None)
    path = one_line(change["path"])
    telling.block(f"{path}  ({size} bytes)" if size else path, mark=_MARKS[change["kind"]])
    if change["diff"]:
        telling.block(change["diff"], mark="    ", most=most)


async def ask(event: ToolPending, read: Read) -> Answer:
    """Ask for yes, no, or always; about requested access, for how long.

    Discard text typed before the question. "Always" is a choice only for a call that can be
    remembered.
    """
    forget_typed()
    if event.tool_name == access.NAME:
        return await _ask_about_access(event, read)
    question = "Make these changes?" if event.dry_run is not None else "Allow this?"
    choices = "[y]es, [n]o, [a]lways" if event.remember_as else "[y]es, [n]o"
    while True:
        write(STDERR, f"{question} {choices}: ")
        reply = await read()
        match reply.strip().lower():
            case "y" | "yes":
                return Answer(True)
            case "n" | "no":
                return Answer(False)
            case "a" | "always" if event.remember_as:
                return await _always(event, read)
        if reply == END_OF_INPUT:
            return Answer(False)


async def _ask_about_access(event: ToolPending, read: Read) -> Answer:
    answers = {"y": Answer(True), "yes": Answer(True), "n": Answer(False), "no": Answer(False)}
    choices = ["[y]es, for the next run"]
    if "hour" in event.remember_as:
        choices.append("for an [h]our")
        answers |= {"h": Answer(True, "hour"), "hour": Answer(True, "hour")}
    if "conversation" in event.remember_as:
        choices.append("for the [c]onversation")
        lasting = Answer(True, "conversation")
        answers |= {"c": lasting, "conversation": lasting}
    access_requested = Access(event.tool_args["kind"], str(event.tool_args["target"]))
    requested = one_line(str(access_requested))
    while True:
        write(STDERR, f"Grant {requested}? {', '.join(choices)}, [n]o: ")
        reply = await read()
        if reply == END_OF_INPUT:
            return Answer(False)
        if (answer := answers.get(reply.strip().lower())) is not None:
            return answer


async def _always(event: ToolPending, read: Read) -> Answer:
    if "prefix" not in event.remember_as:
        return Answer(True, "exact")
    exactly = "exact" in event.remember_as
    write(
        STDERR,
        "Press Enter to allow exactly this command, or type the first words of such commands: "
        if exactly
        else "Type the first words of such commands, or press Enter to allow this one only: ",
    )
    reply = await read()
    if reply == END_OF_INPUT:
        return Answer(False)
    words = reply.strip()
    if words:
        return Answer(True, "prefix", words)
    return Answer(True, "exact" if exactly else None)
