"""The tools of agents: their definitions in the format of each provider, and calls by a program."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from sbx.agent.chats import ChatRun
from sbx.agent.external.registry import SourceStatus
from sbx.agent.external.source import ToolSource
from sbx.agent.messages import ToolCall
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.schema_formats import DIALECTS
from sbx.agent.tools.tool import ToolResult
from sbx.api import sse
from sbx.api.agent_v1.dependencies import AgentsDep
from sbx.api.agent_v1.models import Invocation, Invoked, Name
from sbx.api.auth import CallerDep, OperatorDep, ServiceDep
from sbx.api.bodies import RequestBody, body_of, documented_body
from sbx.api.encoding import encoded_form
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import BadRequest, Broken, Denied
from sbx.service.agent_runs import Invoke
from sbx.service.agents import Agents, no_conversation, undoing
from sbx.service.caller import Caller
from sbx.service.external_tools import find_tool, scope_of
from sbx.service.ids import check_id
from sbx.service.sessions import Sessions

router = APIRouter(prefix="/api/v1/tools", tags=["tools"])
_STREAM: dict[str, Any] = {"content": sse.DOCUMENTED}
_OF_CALL = ("tool_start", "tool_pending", "tool_output", "tool_approval", "tool_end")


class ToolList(BaseModel):
    items: list[dict[str, Any]]


class NewSource(RequestBody):
    name: Name
    source: ToolSource


class SourceBody(BaseModel):
    """A source of external tools. `state`: `ready`, `starting` or `failed`, then with a `problem`.
    `source` is null for a file that is not valid. `tools`: their names."""

    name: str
    state: Literal["ready", "starting", "failed"]
    problem: str | None
    tools: list[str]
    source: ToolSource | None

    @classmethod
    def of(cls, status: SourceStatus) -> "SourceBody":
        return cls(
            name=status.name,
            state=status.state,
            problem=status.problem,
            tools=[tool.name for tool in status.tools],
            source=status.source,
        )


class SourceList(BaseModel):
    items: list[SourceBody]


@router.get("", responses=documented())
async def list_(
    caller: CallerDep,
    agents: AgentsDep,
    format: Literal["openai", "anthropic", "mcp"] = "openai",
) -> ToolList:
    """Return the definitions of the tools: those of sbx, and the external ones. A caller sees
    those of its owner, and a token those that its user and agent may call."""
    external = [
        tool.definition
        for status in await agents.external.status()
        if status.source is not None and _may_call(caller, status.source)
        for tool in status.tools
    ]
    return ToolList(items=list(DIALECTS[format]((*agents.tools.definitions(), *external))))


def _may_call(caller: Caller, source: ToolSource) -> bool:
    if caller.via == "token":
        return source.allows(caller.owner, caller.user_id, caller.agent_id)
    return source.owners is None or caller.owner in source.owners


@router.get("/sources", responses=documented())
async def list_sources(_: OperatorDep, agents: AgentsDep) -> SourceList:
    """List the sources of external tools, with their states. For the operator."""
    return SourceList(items=[SourceBody.of(each) for each in await agents.external.status()])


@router.post("", status_code=201, responses=documented(409))
async def add(
    new: NewSource, caller: OperatorDep, agents: AgentsDep, service: ServiceDep
) -> SourceBody:
    """Register a source of external tools, as a file of the operator. For the operator: the command
    of an MCP server and a Python function run with all rights of the service."""
    status = await agents.external.add(new.name, new.source)
    await service.recording.record(caller, "tool.add", new.name, kind=status.kind)
    return SourceBody.of(status)


@router.delete("/{name}", status_code=204, responses=documented())
async def remove(name: str, caller: OperatorDep, agents: AgentsDep, service: ServiceDep) -> None:
    """Remove a source of external tools and end its server; a second time does nothing. For the
    operator."""
    await agents.external.remove(name)
    await service.recording.record(caller, "tool.remove", name)


@router.post(
    "/{name}/invoke",
    response_model=Invoked,
    responses={**documented(404, 409, 429), 200: _STREAM},
    openapi_extra=documented_body(Invocation),
)
async def invoke_tool(
    name: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> Response:
    """Call a tool as a model would, with the same permission and approval. A call that fails is a
    success of this request: `is_error` is true."""
    call = await body_of(request, Invocation)
    conversation = check_id("conversation_id", call.conversation_id)
    if sse.accepts_events(request):
        sse.reserve(request)
    invoke = await _request(agents, sessions, caller, name, call, conversation)
    async with undoing(service, invoke.chat):
        run = await agents.chats.start(invoke)
    await service.recording.record(
        caller, "tool.invoke", name, conversation=conversation, sandbox=invoke.session.id
    )
    if sse.accepts_events(request):
        return await sse.stream(_events(run), request=request)
    async with aclosing(run.events()) as events:
        async for _, event in events:
            if event["type"] == "tool_end":
                return await _reply(event)
    raise _unfinished(run)


async def _request(
    agents: Agents,
    sessions: Sessions,
    caller: Caller,
    name: str,
    invocation: Invocation,
    conversation: str,
) -> Invoke:
    """Raise NotFound, and Denied `forbidden` without the scope for the effect of the call."""
    session = await sessions.get(caller, invocation.sandbox_session_id)
    if not caller.sees(session.user_id, session.agent_id, conversation):
        raise no_conversation(conversation)
    tool = await find_tool(name, agents.tools, agents.external, caller, session)
    text = await encoded_form(invocation.arguments)  # it may have 16 MiB
    call = ToolCall(f"call-{secrets.token_hex(8)}", tool.name, text.decode("ascii"))
    arguments = await asyncio.to_thread(Tools([tool]).parse, call)
    if isinstance(arguments, ToolResult):
        raise BadRequest(arguments.text, code="invalid_arguments", details={"field": "arguments"})
    scope = scope_of(tool, arguments)
    if not caller.may(scope):
        raise Denied(
            f"this call of {tool.name} takes the scope {scope}",
            code="forbidden",
            hint="use a token that has it",
            details={"scope": scope},
        )
    row, project = await agents.ensure_chat(caller, session, conversation)
    return Invoke(
        caller.owner,
        conversation,
        f"Call {tool.name}.",
        max_steps=1,
        caller=caller,
        session=session,
        chat=row,
        project=project,
        scope=scope,
        tool=tool,
        call=call,
    )


async def _events(run: ChatRun) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Yield only the events of the call, not those of the run around it."""
    async with aclosing(run.events()) as events:
        async for number, event in events:
            if event["type"] in _OF_CALL:
                yield number, event
    if run.end is not None and run.end.reason == "error":
        raise _unfinished(run)


async def _reply(event: dict[str, Any]) -> Response:
    body = {name: event[name] for name in Invoked.model_fields}
    return Response(await encoded_form(body), media_type="application/json")


def _unfinished(run: ChatRun) -> Broken:
    return Broken(f"the call of {run.run_id} did not end", code="call_not_made")
