"""The conversation that the URL of a route names, and its lease for the caller."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, Query

from sbx.api.auth import CallerDep, ServiceDep
from sbx.runtime.conversation import Conversation
from sbx.service.caller import Caller
from sbx.service.leases import SandboxLease
from sbx.service.models import SandboxView
from sbx.service.service import Service

PREFIX = "/v1/sandboxes/{sandbox_id}/conversations/{conversation}"
Path = Annotated[str, Query()]


class Target:
    """A conversation for one request. `view` is its sandbox, once the request has a lease."""

    __slots__ = ("caller", "name", "sandbox_id", "service", "view")

    view: SandboxView

    def __init__(self, service: Service, caller: Caller, sandbox_id: str, name: str) -> None:
        self.service = service
        self.caller = caller
        self.sandbox_id = sandbox_id
        self.name = name

    @asynccontextmanager
    async def lease(
        self, scope: str, *, starts: bool = True, frees: bool = False, kept: bool = False
    ) -> AsyncIterator[SandboxLease]:
        """Lease the sandbox, see `Sandboxes.using`."""
        async with self.service.sandboxes.using(
            self.caller,
            self.sandbox_id,
            scope=scope,
            starts=starts,
            frees=frees,
            kept=kept,
            conversation=self.name,
        ) as use:
            self.view = await use.view()
            yield use

    @asynccontextmanager
    async def use(
        self,
        scope: str,
        *,
        creates: bool = False,
        starts: bool = True,
        frees: bool = False,
        kept: bool = False,
    ) -> AsyncIterator[Conversation]:
        """Lease the conversation. Raise NotFound if it does not exist, unless `creates`."""
        async with self.lease(scope, starts=starts, frees=frees, kept=kept) as use:
            yield use.conversation(self.name) if creates else await use.existing(self.name)

    async def record(self, action: str, **details: Any) -> None:
        """Write an audit line about an action on this conversation."""
        await self.service.recording.record(
            self.caller, action, self.view.id, conversation=self.name, **details
        )


async def _target(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> Target:
    return Target(service, caller, sandbox_id, conversation)


TargetDep = Annotated[Target, Depends(_target)]
