"""Calls of an MCP client that the user of the client may have to approve, by elicitation: changes
and commands in a project, and requests for access.

A connection of an older protocol gets a separate request for each question. In the protocol of
2026-07-28 the question is the reply to the call: the client repeats the call with the answer and
with `request_state`, which names the call that waits here.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.call_events import EmitEvent
from sbx.agent.calls import AT_ONCE, HERE, AgentToolCalls
from sbx.agent.changing import ReadSetting, ask_always
from sbx.agent.messages import ToolCall, carried
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools import access
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import cut
from sbx.agent.tools.tool import Emit, ToolResult
from sbx.errors import Conflict, NotFound, needs_extra
from sbx.protocol.agent import AgentEvent, ToolOutput, ToolPending, question_of
from sbx.protocol.approvals import ApprovalScope
from sbx.protocol.invisible import escaped

with needs_extra("sbx mcp", "mcp"):
    import anyio
    import mcp_types as types
    from mcp import MCPError
    from mcp.server.session import ServerSession
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

OpenedSandbox = Callable[[], AbstractAsyncContextManager[ToolSandbox]]
PROJECT = Permissions("project")
_ENDING_S = 5.0  # for a cancelled call
_KEY = "approval"
_QUESTION_MAX = 100_000  # characters
_ARGUMENT_MIN = 1000  # characters of an argument that are shown, so that a long one hides no other
_MARKS = {"added": "+", "changed": "~", "removed": "-"}
_ELICITS = types.ClientCapabilities(elicitation=types.ElicitationCapability())
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Allow this", "default": False}},
    "required": ["approve"],
}


class McpApprovals(Struct, frozen=True):
    """The approvals of one client. `changes` reads the setting for changes of files in a
    project."""

    approvals: Approvals
    in_project: bool = False
    place: AgentContext = HERE
    changes: ReadSetting = ask_always


@dataclass(slots=True)
class _Waiting:
    """A call in progress. `questions` are those about it, and `question` is the one that the client
    has been asked."""

    name: str
    arguments: Mapping[str, Any]
    emit: Emit
    questions: "asyncio.Queue[ToolPending]"
    calling: "asyncio.Task[ToolResult]" = field(init=False)
    question: ToolPending | None = None


class McpCalls:
    """The calls of one client. In a project they are made one after another, so that each sees the
    changes of the previous one."""

    def __init__(self, opened: OpenedSandbox, tools: Tools, asks: McpApprovals) -> None:
        """Create the calls. `opened` returns a context with the sandbox, which is open during each
        call."""
        self._opened, self._tools, self._asks = opened, tools, asks
        self._turns = asyncio.Semaphore(1 if asks.in_project else AT_ONCE)
        self._waiting: dict[str, _Waiting] = {}  # by `request_state`

    async def call(
        self,
        session: ServerSession,
        params: types.CallToolRequestParams,
        call: ToolCall,
        emit: Emit,
    ) -> ToolResult | types.InputRequiredResult:
        """Make a call, or continue one with the answer of the user. Cancelling this ends it."""
        if params.request_state is None:
            waiting = self._begin(session, params, call, emit)
        else:
            waiting = self._continued(params.request_state, params)
            waiting.emit = emit
            await self._decide(waiting.question, (params.input_responses or {}).get(_KEY))
        try:
            return await self._followed(session, waiting)
        except asyncio.CancelledError:
            await _end(waiting.calling)
            raise

    def _begin(
        self,
        session: ServerSession,
        params: types.CallToolRequestParams,
        call: ToolCall,
        emit: Emit,
    ) -> _Waiting:
        waiting = _Waiting(*_identity(params), emit, asyncio.Queue())

        def on_event(event: AgentEvent) -> None:
            if isinstance(event, ToolOutput):
                waiting.emit(event.stream, event.text)
            elif (question := question_of(event)) is not None:
                waiting.questions.put_nowait(question)

        can_ask = session.check_client_capability(_ELICITS)
        waiting.calling = asyncio.create_task(self._make(call, on_event, can_ask=can_ask))
        return waiting

    def _continued(self, state: str, params: types.CallToolRequestParams) -> _Waiting:
        waiting = self._waiting.get(state)
        if waiting is None or (waiting.name, waiting.arguments) != _identity(params):
            raise MCPError(types.INVALID_PARAMS, "this call does not wait for an answer")
        return self._waiting.pop(state)

    async def _make(self, call: ToolCall, emit: EmitEvent, *, can_ask: bool) -> ToolResult:
        asks = self._asks
        async with self._turns, self._opened() as sandbox:
            calls = AgentToolCalls(
                sandbox,
                self._tools,
                emit=emit,
                run_id=f"mcp-{secrets.token_hex(8)}",
                permissions=PROJECT if asks.in_project else None,
                approvals=asks.approvals if can_ask else None,
                place=asks.place,
                changes=asks.changes,
            )
            (result,) = await calls.make_all([call])
            return result

    async def close(self) -> None:
        """End the calls that wait for an answer."""
        for waiting in self._waiting.values():
            await _end(waiting.calling)

    async def _followed(
        self, session: ServerSession, waiting: _Waiting
    ) -> ToolResult | types.InputRequiredResult:
        """Return the result of a call, or the question of a modern connection."""
        while True:
            asking = asyncio.create_task(waiting.questions.get())
            try:
                await asyncio.wait({waiting.calling, asking}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.calling.done():
                    return waiting.calling.result()
                question = asking.result()
            finally:
                asking.cancel()
            if session.protocol_version in MODERN_PROTOCOL_VERSIONS:
                return self._required(waiting, question)
            await self._decide(question, await _elicited(session, question))

    def _required(self, waiting: _Waiting, question: ToolPending) -> types.InputRequiredResult:
        """Keep a call until the client repeats it with the answer of the user. A call that no
        client continues is denied when its approval expires."""
        self._waiting = {
            state: each for state, each in self._waiting.items() if not each.calling.done()
        }
        state = secrets.token_hex(16)
        waiting.question = question
        self._waiting[state] = waiting
        form = types.ElicitRequestFormParams(message=_text(question), requested_schema=_FORM)
        return types.InputRequiredResult(
            input_requests={_KEY: types.ElicitRequest(params=form)}, request_state=state
        )

    async def _decide(self, question: ToolPending | None, answer: Any) -> None:
        """Pass the answer of the user on. Everything but a clear yes is a no."""
        is_yes = (
            isinstance(answer, types.ElicitResult)
            and answer.action == "accept"
            and (answer.content or {}).get("approve") is True
        )
        if question is not None:
            scope = ApprovalScope(self._asks.place.owner)
            with suppress(Conflict, NotFound):  # it is decided, by its time-out or its end
                await self._asks.approvals.decide(scope, question.tool_call_id, is_yes, by="you")


async def _end(calling: "asyncio.Task[ToolResult]") -> None:
    """End a call in its own task. A cancelled scope of anyio cancels every wait of a task again,
    including the waits in which the call interrupts its run."""
    if not calling.done():
        calling.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([calling], timeout=_ENDING_S)


async def _elicited(session: ServerSession, question: ToolPending) -> types.ElicitResult | None:
    try:
        return await session.elicit_form(_text(question), _FORM)
    except MCPError:  # the client cannot show it
        return None


def _identity(params: types.CallToolRequestParams) -> tuple[str, Mapping[str, Any]]:
    return params.name, params.arguments or {}


def _text(question: ToolPending) -> str:
    """Return the question: all arguments of the call, and the changes that it would make. A long
    argument states how much of it is left out. No character is invisible, and no text of a model
    or a file looks like a line of the question."""
    arguments = question.tool_args
    if question.tool_name == access.NAME:
        return carried(escaped(access.words(arguments), keep=" \n"))
    lines = [f"Allow {question.tool_name}?"]
    most = max(_ARGUMENT_MIN, _QUESTION_MAX // (2 * len(arguments) or 1))
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = cut(text, most, "; a yes allows them, too")
        text = f"\n{text}".replace("\n", "\n  | ") if "\n" in text else f" {text}"
        lines.append(f"{escaped(name)}:{text}")
    if (dry_run := question.dry_run) is not None:
        changes: list[Mapping[str, Any]] = dry_run["changes"]
        lines.append("It would change:" if changes else "It would change no file.")
        for change in changes:
            lines.append(f"{_MARKS[change['kind']]} {escaped(change['path'])}")
            if change["diff"]:
                lines.append(change["diff"])
        lines += [
            f"! {escaped(entry['path'])}: {escaped(entry['program'])} would obey it on this host"
            for entry in dry_run.get("host_executables", ())
        ]
        if dry_run["truncated"]:
            lines.append("… and more changes that are not shown: a yes applies them, too")
        lines += [f"! {escaped(path)}: not in the copy" for path in dry_run.get("left_out", ())]
    else:
        lines.append("It was not tried on a copy: a yes applies it to the files directly.")
    text = carried(escaped("\n".join(lines), keep=" \n\t"))
    return cut(text, _QUESTION_MAX, "; a yes allows them, too")
