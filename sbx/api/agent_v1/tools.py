"""What a model may call: told in the words of each provider, and called by a program."""

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from sbx.agent.chats import ChatRun
from sbx.agent.messages import ToolCall
from sbx.agent.tools.schema_formats import DIALECTS
from sbx.agent.tools.tool import Tool, ToolResult
from sbx.api import sse
from sbx.api.agent_v1.dependencies import AgentsDep
from sbx.api.agent_v1.models import Invocation, Invoked
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import BadRequest, Broken, Denied
from sbx.service.agent_runs import SCOPE_OF, Invoke
from sbx.service.agents import Agents, no_conversation
from sbx.service.auth import Caller
from sbx.service.sessions import Sessions, check_id

router = APIRouter(prefix="/api/v1/tools", tags=["tools"])
_STREAM: dict[str, Any] = {"content": sse.DOCUMENTED}
_OF_CALL = ("tool_start", "tool_output", "tool_approval", "tool_end")


class ToolList(BaseModel):
    items: list[dict[str, Any]]


@router.get("", responses=documented())
async def list_(
    agents: AgentsDep, format: Literal["openai", "anthropic", "mcp"] = "openai"
) -> ToolList:
    """The definitions."""
    return ToolList(items=list(DIALECTS[format](agents.tools.definitions())))


@router.post(
    "/{name}/invoke",
    response_model=Invoked,
    responses={**documented(404, 409, 429), 200: _STREAM},
)
async def invoke(
    name: str,
    asked: Invocation,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> Response:
    """Call a tool as a model would, with the permission and the approval that takes. A call that
    fails is a success of this request: `is_error` tells."""
    tool = agents.tools.get(name)
    conversation = check_id("conversation_id", asked.conversation_id)
    talk = await _request(agents, sessions, caller, tool, asked, conversation)
    run = await agents.chats.start(talk)
    await service.recording.record(
        caller, "tool.invoke", name, conversation=conversation, sandbox=talk.session.id
    )
    if sse.wanted(request):
        return await sse.stream(_told(run), request=request)
    async with aclosing(run.events()) as events:
        async for _, event in events:
            if event["type"] == "tool_end":
                return _reply(event)
    raise _not_made(run)


async def _request(
    agents: Agents,
    sessions: Sessions,
    caller: Caller,
    tool: Tool,
    asked: Invocation,
    conversation: str,
) -> Invoke:
    """Raises NotFound, Denied `forbidden` without the scope for what the call would do."""
    session = await sessions.get(caller, asked.sandbox_session_id)
    if not caller.sees(session.user_id, session.agent_id, conversation):
        raise no_conversation(conversation)
    call = ToolCall(f"call-{secrets.token_hex(8)}", tool.name, json.dumps(asked.arguments))
    arguments = agents.tools.parse(call)
    if isinstance(arguments, ToolResult):
        raise BadRequest(arguments.text, code="invalid_arguments", details={"field": "arguments"})
    scope = SCOPE_OF[tool.effect(arguments)]
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
        call=call,
    )


async def _told(run: ChatRun) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Only what is of the call: a program knows what it asked."""
    async with aclosing(run.events()) as events:
        async for number, event in events:
            if event["type"] in _OF_CALL:
                yield number, event
    if run.end is not None and run.end.reason == "error":
        raise _not_made(run)


def _reply(event: dict[str, Any]) -> Response:
    told = {name: event[name] for name in Invoked.model_fields}
    return Response(json.dumps(told).encode("ascii"), media_type="application/json")


def _not_made(run: ChatRun) -> Broken:
    return Broken(f"the call of {run.run_id} came to no end", code="call_not_made")
