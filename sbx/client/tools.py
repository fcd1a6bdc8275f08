"""The tools of a service's agents, called by a program."""

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from sbx import errors
from sbx.client.chat import Requests
from sbx.client.errors import failure
from sbx.client.http import connection_lost, target
from sbx.client.http_connection import ConnectionLost

Json = dict[str, Any]


class ToolCalls:
    """A part of Client."""

    async def tools(
        self: Requests, format: Literal["openai", "anthropic", "mcp"] = "openai"
    ) -> list[Json]:
        """Their definitions, in the words of one provider."""
        told = await self.request("GET", "/api/v1/tools", params={"format": format})
        items: list[Json] = told["items"]
        return items

    async def invoke(
        self: Requests,
        name: str,
        arguments: Mapping[str, Any],
        *,
        session_id: str,
        conversation_id: str,
    ) -> Json:
        """Call a tool as a model would, and wait for its result, which may take a person's yes:
        `tool_call_id`, `result`, `is_error`. Raises NotFound, BadRequest, Denied."""
        body = {
            "sandbox_session_id": session_id,
            "conversation_id": conversation_id,
            "arguments": dict(arguments),
        }
        path = target("api", "v1", "tools", name, "invoke")
        events = self._wire.events("POST", path, body=json.dumps(body).encode("ascii"))
        try:
            async with aclosing(events):
                async for _, kind, data in events:
                    if kind == "failure":
                        raise failure(data)
                    if kind == "tool_end":
                        told = json.loads(data)
                        return {key: told[key] for key in ("tool_call_id", "result", "is_error")}
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, str(lost)) from lost
        raise errors.Broken("the call has no result", code="foreign_reply")
