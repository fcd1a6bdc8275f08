"""Client: one service, for asyncio, with the calls of its operator."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sbx import errors
from sbx.client import records, sessions
from sbx.client.address import address_of
from sbx.client.agents import AgentCalls
from sbx.client.console import ConsoleCalls
from sbx.client.http import HttpClient, target
from sbx.client.records import SandboxInfo, Session
from sbx.client.requests import Json, ServiceRequests, without_none
from sbx.client.runs import read_event
from sbx.client.sandbox import RemoteSandbox
from sbx.client.tasks import TaskCalls
from sbx.protocol.pages import Page
from sbx.protocol.runs import Event, RunEnd

_START_S = 120.0  # for the start of a kernel, which has its own deadline in the service


class OperatorCalls(ServiceRequests):
    """The calls of the operator of a service: keys, tokens, clean-up; and the state of the
    service."""

    async def keys(self) -> list[Json]:
        """Return every key, without its secret."""
        return await self._items("/v1/admin/keys")

    async def make_key(
        self, owner: str, name: str | None = None, *, operator: bool = False
    ) -> Json:
        """Create a key. Only this reply contains its secret, as `key`."""
        body = {"owner": owner, "name": name, "operator": operator}
        return await self._json("POST", "/v1/admin/keys", body)

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key: the service refuses it from now on."""
        await self.request("DELETE", target("v1", "admin", "keys", key_id))

    async def tokens(self) -> list[Json]:
        """Return every token, without its secret."""
        return await self._items("/v1/admin/tokens")

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
        """Create a token. Only this reply contains its secret, as `token`."""
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
        """Revoke a token: the service refuses it from now on."""
        await self.request("DELETE", target("v1", "admin", "tokens", token_id))

    async def unfreeze(self, sandbox_id: str) -> bool:
        """Permit a sandbox of any owner to run again after the use of a honeytoken froze it. Return
        False if it was not frozen."""
        path = target("v1", "admin", "sandboxes", sandbox_id, "unfreeze")
        return bool((await self._json("POST", path))["unfrozen"])

    async def collect(self, tasks: Sequence[str] | None = None) -> Json:
        """Remove idle, expired and left-over resources now."""
        body = {"tasks": None if tasks is None else list(tasks)}
        return await self._json("POST", "/v1/admin/gc/run", body)

    async def profiles(self, *, detail: bool = False) -> list[Json]:
        """Return the policies that a sandbox can have."""
        reply = await self.request("GET", "/v1/profiles", params={"detail": detail})
        items: list[Json] = reply["items"]
        return items

    async def health(self) -> Json:
        """Return the state and the version of the service."""
        return await self._json("GET", "/health")


class Client(AgentCalls, TaskCalls, ConsoleCalls, OperatorCalls):
    """A service, over its Unix socket or TCP: `async with Client() as client`.

    `connect` is the path of a socket, or `http://HOST:PORT`; None is SBX_SOCKET, else the default
    socket. `key` is a key or token; None is SBX_KEY. Without a key the service identifies the
    caller by the socket. `timeout` is the limit of each reply in seconds; a run may take as long as
    its policy permits. `retries` is the number of retries of requests that are safe to repeat.

    The classes that it inherits have the calls to agents, those of the console and those of the
    operator.

    An instance belongs to one event loop, and to the process that created it: after a fork every
    call raises Broken `used_after_fork`. Errors have the classes and codes of the embedded API. In
    addition, calls raise Unavailable `service_unreachable`, `timeout` and `connection_lost`.
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
            key = os.environ.get("SBX_KEY") or os.environ.get("SBX_API_KEY") or None
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
        """Create a sandbox. No kernel starts before its first use.

        The request has an Idempotency-Key, so that a retry after a lost reply does not create a
        second sandbox. Raise NotFound `policy_not_found`, BadRequest `limit_widened`, Unavailable
        `too_many_sandboxes`.
        """
        if not isinstance(policy, str):
            raise errors.BadRequest(
                "a service accepts policies only by their names",
                code="invalid_policy",
                hint="add the policy with sbx serve --policies, and pass its name here",
            )
        body = without_none(
            profile=policy,
            narrower=dict(narrower) if narrower is not None else None,
            env=dict(env) if env is not None else None,
            ttl=None if ttl_s is None else round(ttl_s),
            cargo_id=workspace_id,
        )
        try:
            reply = await self._post_once("/v1/sandboxes", body, idempotency_key)
        except errors.BadRequest as error:
            if error.details.get("field") != "policy":
                raise
            # Bay reports a bad request. The embedded API reports that the policy does not exist.
            raise errors.NotFound(
                error.message, code="policy_not_found", hint=error.hint, details=error.details
            ) from None
        info = records.sandbox_info(reply)
        return RemoteSandbox(self._wire, info.id, info.policy)

    def sandbox(self, sandbox_id: str) -> RemoteSandbox:
        """Return an existing sandbox, by its id or the id of a session, without a request."""
        return RemoteSandbox(self._wire, sandbox_id)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """Return the state of a sandbox. Raise NotFound."""
        return records.sandbox_info(await self.request("GET", _sandbox(sandbox_id)))

    async def sandboxes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        status: str | None = None,
        all_owners: bool = False,
    ) -> Page[SandboxInfo]:
        """Return your sandboxes, by id. `all_owners`: those of all owners, for operators."""
        path = "/v1/admin/sandboxes" if all_owners else "/v1/sandboxes"
        reply = await self.request(
            "GET", path, params={"limit": limit, "cursor": cursor, "status": status}
        )
        return records.page(reply, records.sandbox_info)

    async def inspect(self, sandbox_id: str) -> Json:
        """Return the policy, conversations, kernels and receipts of a sandbox."""
        return await self._json("GET", f"{_sandbox(sandbox_id)}/inspect")

    async def extend(
        self, sandbox_id: str, by_s: float, *, idempotency_key: str | None = None
    ) -> SandboxInfo:
        """Extend its lifetime by so many seconds, counted from now if it has expired."""
        path = f"{_sandbox(sandbox_id)}/extend_ttl"
        body = {"extend_by": round(by_s)}
        return records.sandbox_info(await self._post_once(path, body, idempotency_key))

    async def keepalive(self, sandbox_id: str) -> None:
        """Restart its idle time-out. No kernel starts."""
        await self.request("POST", f"{_sandbox(sandbox_id)}/keepalive")

    async def stop(self, sandbox_id: str) -> None:
        """Stop its kernels. Its files stay."""
        await self.request("POST", f"{_sandbox(sandbox_id)}/stop")

    async def resume(self, sandbox_id: str) -> Json:
        """Start it now instead of at its next use."""
        path = f"{_sandbox(sandbox_id)}/resume"
        reply: Json = (await self._wire.call("POST", path, timeout_s=_START_S)).json()
        return reply

    async def delete(self, sandbox_id: str) -> None:
        """Delete it with its files. Raise NotFound only if it never existed."""
        await self.request("DELETE", _sandbox(sandbox_id))

    # -- history ----------------------------------------------------------------------------------

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
        """Return runs of a sandbox, the newest first, and their total number. `kind` restricts them
        to `python`, `shell`, or scripts of this language."""
        params = {
            "exec_type": kind,
            "success_only": success_only,
            "limit": limit,
            "offset": offset,
            "tags": tags,
        }
        reply = await self.request("GET", f"{_sandbox(sandbox_id)}/history", params=params)
        return reply["entries"], reply["total"]

    async def events(
        self, sandbox_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Json]:
        """Return the changes of state of a sandbox, with their reasons."""
        reply = await self.request(
            "GET",
            f"{_sandbox(sandbox_id)}/events",
            params={"cursor": cursor, "limit": limit},
        )
        return records.page(reply, dict)

    async def follow_events(
        self, sandbox_id: str, *, after: int = 0
    ) -> AsyncGenerator[tuple[int, Json], None]:
        """Yield past and future events until the sandbox or the caller ends."""
        path = f"{_sandbox(sandbox_id)}/events"
        async with aclosing(self.follow("GET", path, after=after)) as events:
            async for event in events:
                yield event

    async def run_events(
        self, sandbox_id: str, run_id: str, *, after: int = 0
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of a run. They are available until one minute after its end."""
        path = f"{_sandbox(sandbox_id)}{target('runs', run_id, 'events')}"
        async with aclosing(self._followed("GET", path, after)) as events:
            async for number, data in events:
                event = read_event(data)
                yield number, event
                if isinstance(event, RunEnd):
                    return

    async def interrupt_run(self, sandbox_id: str, run_id: str) -> bool:
        """Interrupt only this run, also while it is queued. Return whether it was interrupted."""
        path = f"{_sandbox(sandbox_id)}{target('runs', run_id, 'interrupt')}"
        return bool((await self._json("POST", path))["interrupted"])

    # -- workspaces -------------------------------------------------------------------------------

    async def workspaces(self, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """Return the workspaces that exist independently of a sandbox."""
        reply = await self.request("GET", "/v1/cargos", params={"limit": limit, "cursor": cursor})
        return records.page(reply, dict)

    async def create_workspace(
        self, size_limit_mb: int = 1024, *, idempotency_key: str | None = None
    ) -> Json:
        """Create a workspace for `create(workspace_id=…)`."""
        body = {"size_limit_mb": size_limit_mb}
        workspace: Json = await self._post_once("/v1/cargos", body, idempotency_key)
        return workspace

    async def delete_workspace(self, workspace_id: str) -> None:
        """Delete a workspace. Raise Conflict while a sandbox uses it."""
        await self.request("DELETE", target("v1", "cargos", workspace_id))

    # -- sessions ---------------------------------------------------------------------------------

    async def ensure_session(
        self,
        user_id: str,
        agent_id: str,
        *,
        business_domain_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_retries: int | None = None,
        retry_interval: float | None = None,
    ) -> Session:
        """Return the running session of this user with this agent. Create or resume it if needed.
        `client.sandbox(session.session_id)` returns its sandbox.

        Check its state at most `max_retries` times, `retry_interval` seconds apart: by default
        SBX_SESSION_MAX_RETRIES (30) and SBX_SESSION_RETRY_INTERVAL (0.5). A check that the service
        does not answer is repeated too. Raise SessionCreateFailed, SessionNotReady.
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
