"""The loop of a chat: read lines from the user, run commands, and print the answers of an agent."""

import asyncio
import os
import select
import shlex
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sbx.agent.agent import Agent
from sbx.agent.messages import Message
from sbx.agent.models import Model
from sbx.agent.profile import AgentProfile
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.cli import approval_prompt, output, terminal
from sbx.cli.agent_options import external_tools, new_sandbox
from sbx.cli.agent_output import AgentPrinter
from sbx.cli.chat_store import ChatConversation, ChatSelection, opened
from sbx.cli.exits import ReaderGone
from sbx.cli.signals import CancelOnSignal
from sbx.cli.terminal import END_OF_INPUT, STDERR, STDIN, STDOUT, one_line, write
from sbx.cli.undo import Undo, Watched
from sbx.errors import BadRequest, SbxError
from sbx.protocol.agent import AgentEvent, AgentRunEnd, Reason, ToolApproval, question_of
from sbx.protocol.approvals import ApprovalScope
from sbx.protocol.changes import ChangesSetting

_PROMPT = "> "
_FILES_DEPTH = 4
_FILES_MAX = 200
_NAMED_MAX = 20  # names of restored files in the message to the model
_DIFF_LINES = 12  # of the diff of each restored file
_UNDONE = "(I undid the file changes of your last step. These files are as before: "
_HELP = """\
/upload FILE…   give files to the agent; it cannot change them
/files          list the files of the conversation
/undo           undo the file changes of the last step
/continue       continue an interrupted answer
/allow          in a project: stop asking about commands and changes in this chat
/help  /quit    Ctrl-C aborts an answer, Ctrl-D ends
"""


@dataclass(frozen=True, slots=True)
class ChatEnded:
    """How a chat ended.

    `last` is the reason of the end of the last answer, or None at a terminal or without an answer.
    `asks_to_restore`: the policy requires a question about the files in the quarantine.
    """

    last: Reason | None
    asks_to_restore: bool


async def converse(options: ChatSelection, model: Model, max_steps: int) -> ChatEnded:
    """Run a chat to its end.

    Raise the errors of `opened`, StoppedBySignal for a signal, and ReaderGone.
    """
    with CancelOnSignal() as ending:
        try:
            async with (
                opened(options) as conversation,
                external_tools(options.agent_id, options.profile) as external,
            ):
                tools = options.profile.with_delegation(
                    options.profile.select(Tools(), external),
                    model,
                    lambda: new_sandbox(
                        options.policy, options.sandbox, options.connect, options.key
                    ),
                    lambda _: Permissions(overrides=options.profile.overrides(in_project=False)),
                )
                chat = _Chat(conversation, model, max_steps, ending, options.profile, tools)
                try:
                    await chat.send_hello(resumed=options.resume is not None)
                    await chat.converse()
                finally:
                    await chat.close()
        finally:
            await model.close()
    return ChatEnded(None if chat.typed else chat.last, conversation.asks_to_restore)


class _Chat:
    def __init__(
        self,
        conversation: ChatConversation,
        model: Model,
        max_steps: int,
        ending: CancelOnSignal,
        profile: AgentProfile,
        tools: Tools,
    ) -> None:
        self.typed = os.isatty(STDIN)
        self.last: Reason | None = None
        self._conversation = conversation
        self._ending = ending
        self._max_steps = max_steps
        self._model = model.name
        self._telling = AgentPrinter()
        self._read = terminal.read_line if self.typed else terminal.InputLines().read_line
        self._welcome = profile.welcome
        self._tools = tools
        self._undo = Undo(conversation.sandbox, tools)
        mode = conversation.mode
        self._overrides = profile.overrides(in_project=mode != "free")
        self._agent = Agent(
            conversation.sandbox,
            Watched(model, self._undo),
            tools=tools,
            approvals=conversation.approvals,
            history=conversation.history,
            permissions=Permissions(mode, overrides=self._overrides),
            instructions=profile.instructions,
            budget=profile.budget,
            place=conversation.place,
            changes=self._changes,
        )
        reach, read = ApprovalScope(conversation.row.owner), self._read if self.typed else None
        self._questions = approval_prompt.ApprovalPrompts(
            conversation.approvals, reach, self._telling, read
        )
        self._commands: dict[str, Callable[[list[str]], Awaitable[None]]] = {
            "/upload": self._upload,
            "/files": self._files,
            "/undo": self._take_back,
            "/continue": self._continue,
            "/allow": self._allow,
            "/help": self._help,
        }

    async def send_hello(self, *, resumed: bool) -> None:
        if not self._conversation.sandboxed:
            output.note("the sandbox is off: the agent works on this host, as you")
        if resumed:
            await self._remind()
        elif self._welcome:
            output.note(one_line(self._welcome))
        if self.typed:
            output.note(f"talking with {self._model}; Ctrl-D ends, /help lists the commands")

    async def converse(self) -> None:
        while (text := await self._next()) != END_OF_INPUT:
            words = text.strip()
            if words in ("/quit", "/exit"):
                return
            try:
                if words.startswith("/"):
                    await self._command(words)
                elif words:
                    await self._answer(text)
            except SbxError as error:
                if not self.typed or isinstance(error, ReaderGone):
                    raise
                output.error(error, as_json=False)

    async def close(self) -> None:
        """Print how to continue the conversation, if it has a message."""
        with suppress(SbxError):
            await self._undo.close()
            if await self._conversation.history.messages(limit=1):
                if (box := self._conversation.elsewhere) is not None:
                    output.note(f"the files stay in the service, in {box}")
                output.note(f"to continue: sbx chat --resume {self._conversation.id}")

    # -- typed input ----------------------------------------------------------------------------

    async def _next(self) -> str:
        """Return the next message or command. Lines pasted together are one message."""
        if not self.typed:
            return await self._read()
        while True:
            write(STDERR, _PROMPT)
            reading = asyncio.ensure_future(self._read())
            self._ending.on_interrupt = reading.cancel
            try:
                line = await reading
            except asyncio.CancelledError:
                if self._ending.received:
                    raise
                write(STDERR, "\n")
                output.note("Ctrl-D ends")
                continue
            finally:
                self._ending.on_interrupt = None
                reading.cancel()
            lines = [line]
            while line != END_OF_INPUT and select.select([STDIN], [], [], 0)[0]:
                line = await self._read()
                lines += [line] if line != END_OF_INPUT else []
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
                    await self._print_event(event)
        finally:
            self._ending.on_interrupt = None
            await self._questions.close()

    async def _print_event(self, event: AgentEvent) -> None:
        """Print an event in a thread, so that a slow terminal delays no deadline and no Ctrl-C."""
        if isinstance(event, ToolApproval):
            self._questions.drop(event.tool_call_id)
        await asyncio.to_thread(self._telling.show, event)
        if (question := question_of(event)) is not None:
            self._questions.add(question)
        elif isinstance(event, AgentRunEnd):
            self.last = event.reason

    # -- commands -------------------------------------------------------------------------------

    async def _command(self, words: str) -> None:
        try:
            name, *rest = shlex.split(words)
        except ValueError as error:
            raise BadRequest(f"{words}: {error}", hint="close the quotation") from None
        if (command := self._commands.get(name)) is None:
            raise BadRequest(f"unknown command {name}", hint="/help lists them")
        await command(rest)

    async def _upload(self, names: list[str]) -> None:
        if not names:
            raise BadRequest("/upload needs a file", hint="/upload FILE")
        for name in names:
            upload = await self._conversation.sandbox.uploads.put(_here(name))
            output.note(f"uploaded: {upload.path} ({upload.size} bytes)")

    async def _files(self, _: list[str]) -> None:
        files = self._conversation.sandbox.files
        listing = await files.list(".", max_depth=_FILES_DEPTH)
        shown = {entry.path: entry.size for entry in listing if entry.kind == "file"}
        shown |= {
            upload.path: upload.size for upload in await self._conversation.sandbox.uploads.list()
        }
        for path in sorted(shown)[:_FILES_MAX]:
            write(STDOUT, f"{shown[path] or 0:>10}  {terminal.one_line(path)}\n")
        if not listing.complete or len(shown) > _FILES_MAX:
            output.note("there are more files than this list shows")

    async def _take_back(self, _: list[str]) -> None:
        changes = await self._undo.back()
        self._telling.head("changes undone:")
        for change in changes:
            approval_prompt.show_change(asdict(change), self._telling, most=_DIFF_LINES)
        paths = ", ".join(change.path for change in changes[:_NAMED_MAX])
        more = ", …" if len(changes) > _NAMED_MAX else ""
        await self._conversation.history.append([Message("user", f"{_UNDONE}{paths}{more})")])

    async def _continue(self, _: list[str]) -> None:
        await self._answer(None)

    async def _allow(self, _: list[str]) -> None:
        sandbox = self._conversation.sandbox
        if not hasattr(sandbox, "allow_commands"):
            raise BadRequest("commands need approval in a project only; here they are allowed")
        await sandbox.allow_commands()
        self._overrides |= {
            tool.name: "allow"
            for tool in self._tools
            if tool.source is None and self._overrides.get(tool.name) != "deny"
        }
        output.note("commands and changes of files are allowed until this chat ends")

    async def _changes(self) -> ChangesSetting:
        return self._conversation.changes

    async def _help(self, _: list[str]) -> None:
        write(STDOUT, _HELP)

    async def _remind(self) -> None:
        """Print the last messages of a resumed conversation."""
        messages = [stored.message for stored in await self._conversation.history.messages()]
        output.note(f"continuing {self._conversation.id}: {len(messages)} messages")
        for role, title in (("user", "you:"), ("assistant", "the agent:")):
            content = next(
                (message.content for message in reversed(messages) if message.role == role), ""
            )
            if content and self.typed:
                self._telling.head(title)
                self._telling.block(content, most=10)
        if (
            messages
            and messages[-1].role != "assistant"
            and not messages[-1].content.startswith(_UNDONE)
        ):
            output.note("the last answer was interrupted; /continue completes it")


def _here(name: str) -> Path:
    return Path(name).expanduser()
