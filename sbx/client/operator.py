"""The calls of a service's operator: keys, tokens, clean-up; and the state of the service."""

from collections.abc import Sequence

from sbx.client.http import target
from sbx.client.requests import Json, ServiceRequests


class OperatorCalls(ServiceRequests):
    """A part of `Client`."""

    async def keys(self) -> list[Json]:
        """Every key, without its text."""
        told: list[Json] = (await self._json("GET", "/v1/admin/keys"))["items"]
        return told

    async def make_key(
        self, owner: str, name: str | None = None, *, operator: bool = False
    ) -> Json:
        """A new key; its `key` is the clear text, told this once."""
        body = {"owner": owner, "name": name, "operator": operator}
        return await self._json("POST", "/v1/admin/keys", body)

    async def revoke_key(self, key_id: str) -> None:
        """It opens nothing any more."""
        await self.request("DELETE", target("v1", "admin", "keys", key_id))

    async def tokens(self) -> list[Json]:
        """Every token, without its text."""
        told: list[Json] = (await self._json("GET", "/v1/admin/tokens"))["items"]
        return told

    async def make_token(
        self,
        *,
        user_id: str,
        agent_id: str | None = None,
        conversation_id: str | None = None,
        scopes: Sequence[str] | None = None,
        ttl_s: float = 3600,
        owner: str | None = None,
    ) -> Json:
        """A new token; its `token` is the clear text, told this once."""
        body = {
            "owner": owner,
            "user_id": user_id,
            "agent_id": agent_id,
            "conversation_id": conversation_id,
            "scopes": None if scopes is None else list(scopes),
            "ttl_s": ttl_s,
        }
        return await self._json("POST", "/v1/admin/tokens", body)

    async def revoke_token(self, token_id: str) -> None:
        """It opens nothing any more."""
        await self.request("DELETE", target("v1", "admin", "tokens", token_id))

    async def unfreeze(self, sandbox_id: str) -> bool:
        """Let a sandbox run again whose honeytoken was sprung, whoever owns it; False where none
        was."""
        path = target("v1", "admin", "sandboxes", sandbox_id, "unfreeze")
        return bool((await self._json("POST", path))["unfrozen"])

    async def collect(self, tasks: Sequence[str] | None = None) -> Json:
        """Collect now what is idle, expired or left over."""
        body = {"tasks": None if tasks is None else list(tasks)}
        return await self._json("POST", "/v1/admin/gc/run", body)

    async def profiles(self, *, detail: bool = False) -> list[Json]:
        """The policies that a sandbox can be made with."""
        told = await self.request("GET", "/v1/profiles", params={"detail": detail})
        items: list[Json] = told["items"]
        return items

    async def health(self) -> Json:
        """Whether the service answers, and its version."""
        return await self._json("GET", "/health")
