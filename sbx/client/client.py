"""Client: one service, for asyncio."""

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sbx import errors
from sbx.client import records, sessions
from sbx.client.address import address_of
from sbx.client.agents import AgentCalls
from sbx.client.http import HttpClient, target
from sbx.client.operator import OperatorCalls
from sbx.client.records import SandboxInfo, Session
from sbx.client.requests import Json
from sbx.client.runs import read_event
from sbx.client.sandbox import RemoteSandbox
from sbx.protocol.pages import Page
from sbx.protocol.runs import Event, RunEnd

_START_S = 120.0  # for the start of a kernel, which has a deadline of its own over there


class Client(AgentCalls, OperatorCalls):
    """A service, over its Unix socket or TCP: `async with Client() as client`.

    `connect`: the path of a socket, or `http://HOST:PORT`; None is SBX_SOCKET, else the default
    socket. `key`: a key or token; None is SBX_API_KEY, and without one the service knows you by the
    socket. `timeout` in seconds bounds each answer; a run takes as long as its policy lets it.
    `retries`: how often what is safe to repeat is tried again.

    The calls to agents, and those of the operator, are in the classes that it inherits.

    Belongs to one event loop, and to the process that made it: after a fork every call raises
    Broken `used_after_fork`. Errors are those of the embedded API, class and code; beside them
    Unavailable `service_unreachable`, `timeout` and `connection_lost`.
    """

    def __init__(
        self,
        connect: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        timeout: float = 30.0,
        retries: int = 3,
    ) -> None:
        if key is None:
            key = os.environ.get("SBX_API_KEY") or None
        super().__init__(HttpClient(address_of(connect), key, timeout, retries))

    # -- sandboxes --------------------------------------------------------------------------------

    async def create(
        self,
        policy: str = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        workspace_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> RemoteSandbox:
        """A new sandbox; nothing starts before its first use.

        Sent with an Idempotency-Key, so that a lost answer makes no second one. Raises NotFound
        `policy_not_found`, BadRequest `limit_widened`, Unavailable `too_many_sandboxes`.
        """
        if not isinstance(policy, str):
            raise errors.BadRequest(
                "a service knows policies by their names only",
                code="invalid_policy",
                hint="give it the policy by --policies, and name it here",
            )
        asked = {
            "profile": policy,
            "narrower": dict(narrower) if narrower is not None else None,
            "env": dict(env) if env is not None else None,
            "ttl": None if ttl_s is None else round(ttl_s),
            "cargo_id": workspace_id,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        try:
            told = await self._post_once("/v1/sandboxes", body, idempotency_key)
        except errors.BadRequest as error:
            if error.details.get("field") != "profile":
                raise
            # Bay calls it a wrong request; here, as in this process, what was named is not there.
            raise errors.NotFound(
                error.message, code="policy_not_found", hint=error.hint, details=error.details
            ) from None
        info = records.sandbox_info(told)
        return RemoteSandbox(self._wire, info.id, info.policy)

    def sandbox(self, sandbox_id: str) -> RemoteSandbox:
        """A sandbox that is there, by its id or a session's; the service is not asked."""
        return RemoteSandbox(self._wire, sandbox_id)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """How a sandbox is now. Raises NotFound."""
        return records.sandbox_info(await self.request("GET", _sandbox(sandbox_id)))

    async def sandboxes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        status: str | None = None,
        all_owners: bool = False,
    ) -> Page[SandboxInfo]:
        """Your sandboxes, by id; of everybody, for an operator, with `all_owners`."""
        path = "/v1/admin/sandboxes" if all_owners else "/v1/sandboxes"
        told = await self.request(
            "GET", path, params={"limit": limit, "cursor": cursor, "status": status}
        )
        return records.page(told, records.sandbox_info)

    async def inspect(self, sandbox_id: str) -> Json:
        """All that the service knows of a sandbox: policy, conversations, kernels, receipts."""
        return await self._json("GET", f"{_sandbox(sandbox_id)}/inspect")

    async def extend(
        self, sandbox_id: str, by_s: float, *, idempotency_key: str | None = None
    ) -> SandboxInfo:
        """Let it live longer by so many seconds, counted from now if it ended in the past."""
        path = f"{_sandbox(sandbox_id)}/extend_ttl"
        body = {"extend_by": round(by_s)}
        return records.sandbox_info(await self._post_once(path, body, idempotency_key))

    async def keepalive(self, sandbox_id: str) -> None:
        """Move its idle time-out; nothing starts."""
        await self.request("POST", f"{_sandbox(sandbox_id)}/keepalive")

    async def stop(self, sandbox_id: str) -> None:
        """End its kernels; files stay."""
        await self.request("POST", f"{_sandbox(sandbox_id)}/stop")

    async def resume(self, sandbox_id: str) -> Json:
        """Start it now instead of with its next use."""
        path = f"{_sandbox(sandbox_id)}/resume"
        told: Json = (await self._wire.call("POST", path, timeout_s=_START_S)).json()
        return told

    async def delete(self, sandbox_id: str) -> None:
        """End it and remove its files. Raises NotFound only for what never was."""
        await self.request("DELETE", _sandbox(sandbox_id))

    # -- what happened ----------------------------------------------------------------------------

    async def history(
        self,
        sandbox_id: str,
        *,
        kind: str | None = None,
        success_only: bool = False,
        limit: int = 100,
        offset: int = 0,
        tags: str | None = None,
    ) -> tuple[list[Json], int]:
        """Runs of a sandbox, the newest first, and how many there are in all. `kind`: only those
        that are `python`, `shell`, or scripts of this language."""
        params = {
            "exec_type": kind,
            "success_only": success_only,
            "limit": limit,
            "offset": offset,
            "tags": tags,
        }
        told = await self.request("GET", f"{_sandbox(sandbox_id)}/history", params=params)
        return told["entries"], told["total"]

    async def events(
        self, sandbox_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Json]:
        """What became of a sandbox, and why."""
        told = await self.request(
            "GET",
            f"{_sandbox(sandbox_id)}/events",
            params={"cursor": cursor, "limit": limit},
        )
        return records.page(told, dict)

    async def follow_events(
        self, sandbox_id: str, *, after: int = 0
    ) -> AsyncGenerator[tuple[int, Json], None]:
        """The same, and what comes; ends only with the sandbox, or with whoever listens."""
        path = f"{_sandbox(sandbox_id)}/events"
        async with aclosing(self.follow("GET", path, after=after)) as events:
            async for event in events:
                yield event

    async def run_events(
        self, sandbox_id: str, run_id: str, *, after: int = 0
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of a run, while it lives and for a minute after its end."""
        path = f"{_sandbox(sandbox_id)}{target('runs', run_id, 'events')}"
        async with aclosing(self._followed("GET", path, after)) as events:
            async for number, data in events:
                event = read_event(data)
                yield number, event
                if isinstance(event, RunEnd):
                    return

    async def interrupt_run(self, sandbox_id: str, run_id: str) -> bool:
        """End this run and no other, also while it waits for its turn."""
        path = f"{_sandbox(sandbox_id)}{target('runs', run_id, 'interrupt')}"
        return bool((await self._json("POST", path))["interrupted"])

    # -- workspaces -------------------------------------------------------------------------------

    async def workspaces(self, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """Workspaces that outlive a sandbox."""
        told = await self.request("GET", "/v1/cargos", params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    async def create_workspace(
        self, size_limit_mb: int = 1024, *, idempotency_key: str | None = None
    ) -> Json:
        """A workspace of its own, for `create(workspace_id=…)`."""
        body = {"size_limit_mb": size_limit_mb}
        made: Json = await self._post_once("/v1/cargos", body, idempotency_key)
        return made

    async def delete_workspace(self, workspace_id: str) -> None:
        """Raises Conflict while a sandbox uses it."""
        await self.request("DELETE", target("v1", "cargos", workspace_id))

    # -- sessions ---------------------------------------------------------------------------------

    async def ensure_session(
        self,
        user_id: str,
        agent_id: str,
        *,
        business_domain_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_retries: int = 30,
        retry_interval: float = 0.5,
    ) -> Session:
        """The one session of this user with this agent, made or woken where that is needed, and
        running when this returns. `client.sandbox(session.session_id)` works in it.

        Asks at most `max_retries` times, `retry_interval` seconds apart. Raises
        SessionCreateFailed, SessionNotReady.
        """
        return await sessions.ensure(
            self._wire,
            sessions.Identity(user_id, agent_id, business_domain_id),
            config=config,
            max_retries=max_retries,
            retry_interval=retry_interval,
        )


def _sandbox(sandbox_id: str) -> str:
    return target("v1", "sandboxes", sandbox_id)
