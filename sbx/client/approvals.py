"""A person's yes or no to what agents of a service would do."""

from typing import Any, Literal

from sbx.client import records
from sbx.client.chat import Requests
from sbx.client.http import target
from sbx.protocol.pages import Page

Json = dict[str, Any]
_PATH = target("api", "v1", "approvals")


class ApprovalCalls:
    """A part of Client."""

    async def approvals(
        self: Requests, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """The calls that wait for an answer, the oldest first."""
        told = await self.request("GET", _PATH, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    async def decide(
        self: Requests,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Literal["exact", "prefix"] | None = None,
        prefix: str | None = None,
    ) -> Json:
        """Say yes or no to one call. `remember`: allow this exact command from now on, or with
        `prefix` every one that begins so. Raises NotFound, Conflict `already_decided`."""
        body = {"approved": approved, "remember": remember, "prefix": prefix}
        told: Json = await self.request("POST", f"{_PATH}{target(tool_call_id)}", json=body)
        return told

    async def approval_rules(
        self: Requests,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Json]:
        """What is allowed without asking again."""
        params = {
            "conversation_id": conversation_id,
            "project_id": project_id,
            "limit": limit,
            "cursor": cursor,
        }
        told = await self.request("GET", f"{_PATH}/rules", params=params)
        return records.page(told, dict)

    async def revoke_rule(self: Requests, rule_id: str) -> None:
        """From now on it is asked again."""
        await self.request("DELETE", f"{_PATH}{target('rules', rule_id)}")
