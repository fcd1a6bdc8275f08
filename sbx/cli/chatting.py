"""A chat that goes on: lines that a person types, answers of an agent, commands in between."""

import asyncio
import os
import select
import shlex
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from sbx.agent.agent import Agent
from sbx.agent.messages import Message
from sbx.agent.models import Model
from sbx.agent.tools.permissions import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Permission
from sbx.cli import asking, report, terminal
from sbx.cli.ending import Ending
from sbx.cli.exits import ReaderGone
from sbx.cli.talk import Talk, Wanted
from sbx.cli.talks import opened
from sbx.cli.telling import Telling
from sbx.cli.terminal import END_OF_INPUT, STDERR, STDIN, STDOUT, write
from sbx.cli.undo import Undo, Watched
from sbx.errors import BadRequest, SbxError
from sbx.protocol.agent import AgentEvent, Reason, RunEnd, ToolApproval, ToolStart
from sbx.protocol.approvals import Reach
from sbx.protocol.changes import ChangesSetting

_PROMPT = "> "
_FILES_DEPTH = 4
_FILES_MAX = 200
_TOLD_MAX = 20  # files that were put back, by name
_DIFF_LINES = 12  # of each file that was taken back
_UNDONE = "(I took back the file changes of your last step. These are as before: "
_HELP = """\
/upload FILE…   give files to the agent, which it cannot change
/files          the files of the conversation
/undo           take back what the last step changed in files
/continue       go on where an answer was broken off
/allow          in a project: ask no more about commands and changes in this chat
/help  /quit    Ctrl-C aborts an answer, Ctrl-D ends
"""


@runtime_checkable
class _Asking(Protocol):
    """A sandbox in which commands must be allowed."""

    async def allow_commands(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """`last`: how the last answer ended; None at a terminal, or without one. `asks_to_restore`: the
    policy demands a question about the files in the quarantine."""

    last: Reason | None
    asks_to_restore: bool


async def converse(wanted: Wanted, model: Model, max_steps: int) -> Ended:
    """Talk to the end.

    Raises as `talks.opened`, Stopped for a signal, and ReaderGone.
    """
    with Ending() as ending:
        try:
            async with opened(wanted) as talk:
                chat = _Chat(talk, model, max_steps, ending)
                try:
                    await chat.greet(resumed=wanted.resume is not None)
                    await chat.converse()
                finally:
                    await chat.close()
        finally:
            await model.close()
    return Ended(None if chat.typed else chat.last, talk.asks_to_restore)


class _Chat:
    def __init__(self, talk: Talk, model: Model, max_steps: int, ending: Ending) -> None:
        self.typed = os.isatty(STDIN)
        self.last: Reason | None = None
        self._talk = talk
        self._ending = ending
        self._max_steps = max_steps
        self._model = model.name
        self._telling = Telling()
        self._read = terminal.read_line if self.typed else terminal.InputLines().read_line
        self._tools = tools = Tools()
        self._undo = Undo(talk.sandbox, tools)
        self._overrides: dict[str, Permission] = {}
        asks = talk.in_project and talk.sandboxed
        self._agent = Agent(
            talk.sandbox,
            Watched(model, self._undo),
            tools=tools,
            approvals=talk.approvals,
            history=talk.history,
            permissions=Permissions("project" if asks else "free", overrides=self._overrides),
            place=talk.place,
            changes=self._changes,
        )
        reach, read = Reach(talk.row.owner), self._read if self.typed else None
        self._questions = asking.Questions(talk.approvals, reach, self._telling, read)
        self._commands: dict[str, Callable[[list[str]], Awaitable[None]]] = {
            "/upload": self._upload,
            "/files": self._files,
            "/undo": self._take_back,
            "/continue": self._continue,
            "/allow": self._allow,
            "/help": self._help,
        }

    async def greet(self, *, resumed: bool) -> None:
        if not self._talk.sandboxed:
            report.note("the sandbox is off: what the agent does, it does on this host, as you")
        if resumed:
            await self._remind()
        if self.typed:
            report.note(f"talking with {self._model}; Ctrl-D ends, /help tells of more")

    async def converse(self) -> None:
        while (said := await self._next()) != END_OF_INPUT:
            words = said.strip()
            if words in ("/quit", "/exit"):
                return
            try:
                if words.startswith("/"):
                    await self._command(words)
                elif words:
                    await self._answer(said)
            except SbxError as error:
                if not self.typed or isinstance(error, ReaderGone):
                    raise
                report.error(error, as_json=False)

    async def close(self) -> None:
        """Say how to go on, where anything was said."""
        with suppress(SbxError):
            await self._undo.close()
            if await self._talk.history.messages(limit=1):
                if (box := self._talk.elsewhere) is not None:
                    report.note(f"its files stay in the service, in {box}")
                report.note(f"to go on: sbx chat --resume {self._talk.id}")

    # -- what is typed --------------------------------------------------------------------------

    async def _next(self) -> str:
        """The next message or command; lines that were pasted together are one."""
        if not self.typed:
            return await self._read()
        while True:
            write(STDERR, _PROMPT)
            reading = asyncio.ensure_future(self._read())
            self._ending.on_interrupt = reading.cancel
            try:
                said = await reading
            except asyncio.CancelledError:
                if self._ending.received:
                    raise
                write(STDERR, "\n")
                report.note("Ctrl-D ends")
                continue
            finally:
                self._ending.on_interrupt = None
                reading.cancel()
            lines = [said]
            while said != END_OF_INPUT and select.select([STDIN], [], [], 0)[0]:
                said = await self._read()
                lines += [said] if said != END_OF_INPUT else []
            if lines == [END_OF_INPUT]:
                write(STDERR, "\n")
            return "\n".join(lines)

    # -- an answer ------------------------------------------------------------------------------

    async def _answer(self, message: str | None) -> None:
        self._ending.on_interrupt = self._agent.abort
        try:
            events = self._agent.stream(message, max_steps=self._max_steps)
            async with aclosing(events):
                async for event in events:
                    await self._tell(event)
        finally:
            self._ending.on_interrupt = None
            await self._questions.close()

    async def _tell(self, event: AgentEvent) -> None:
        """In a thread, so that a slow terminal delays no deadline and no Ctrl-C."""
        if isinstance(event, ToolApproval):
            self._questions.drop(event.tool_call_id)
        await asyncio.to_thread(self._telling.show, event)
        if isinstance(event, ToolStart) and event.approval_required:
            self._questions.add(event)
        elif isinstance(event, RunEnd):
            self.last = event.reason

    # -- commands -------------------------------------------------------------------------------

    async def _command(self, words: str) -> None:
        try:
            name, *rest = shlex.split(words)
        except ValueError as error:
            raise BadRequest(f"{words}: {error}", hint="close the quotation") from None
        if (act := self._commands.get(name)) is None:
            raise BadRequest(f"there is no command {name}", hint="/help lists them")
        await act(rest)

    async def _upload(self, names: list[str]) -> None:
        if not names:
            raise BadRequest("/upload: which file?", hint="/upload FILE")
        for name in names:
            put = await self._talk.sandbox.uploads.put(_here(name))
            report.note(f"uploaded: {put.path} ({put.size} bytes)")

    async def _files(self, _: list[str]) -> None:
        files = self._talk.sandbox.files
        listing = await files.list(".", max_depth=_FILES_DEPTH)
        shown = {entry.path: entry.size for entry in listing if entry.kind == "file"}
        shown |= {put.path: put.size for put in await self._talk.sandbox.uploads.list()}
        for path in sorted(shown)[:_FILES_MAX]:
            write(STDOUT, f"{shown[path] or 0:>10}  {terminal.one_line(path)}\n")
        if not listing.complete or len(shown) > _FILES_MAX:
            report.note("there are more than are listed")

    async def _take_back(self, _: list[str]) -> None:
        changes = await self._undo.back()
        self._telling.head("taken back:")
        for change in changes:
            asking.show_change(asdict(change), self._telling, most=_DIFF_LINES)
        paths = ", ".join(change.path for change in changes[:_TOLD_MAX])
        more = ", …" if len(changes) > _TOLD_MAX else ""
        await self._talk.history.append([Message("user", f"{_UNDONE}{paths}{more})")])

    async def _continue(self, _: list[str]) -> None:
        await self._answer(None)

    async def _allow(self, _: list[str]) -> None:
        sandbox = self._talk.sandbox
        if not isinstance(sandbox, _Asking):
            raise BadRequest("commands are asked for in a project only; here they are allowed")
        await sandbox.allow_commands()
        self._overrides |= {one.name: "allow" for one in self._tools}
        report.note("commands and changes of files are allowed in this chat, until it ends")

    async def _changes(self) -> ChangesSetting:
        return self._talk.changes

    async def _help(self, _: list[str]) -> None:
        write(STDOUT, _HELP)

    async def _remind(self) -> None:
        """What was said last."""
        kept = [one.message for one in await self._talk.history.messages()]
        report.note(f"going on with {self._talk.id}: {len(kept)} messages")
        for role, title in (("user", "you:"), ("assistant", "the agent:")):
            said = next((one.content for one in reversed(kept) if one.role == role), "")
            if said and self.typed:
                self._telling.head(title)
                self._telling.block(said, most=10)
        if kept and kept[-1].role != "assistant" and not kept[-1].content.startswith(_UNDONE):
            report.note("the last answer was broken off; /continue goes on with it")


def _here(name: str) -> Path:
    return Path(name).expanduser()
