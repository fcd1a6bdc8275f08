"""The sandbox of one request of an SDK of another product, which knows no conversations."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from sbx.protocol.usage import SandboxUsage
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.caller import Caller
from sbx.service.run import RunHandle, RunRequest
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

_CPU_SAMPLE_S = 0.1


class SdkTarget:
    """A sandbox, with its default conversation and the caller."""

    def __init__(self, service: Service, caller: Caller, sandbox: ServiceSandbox) -> None:
        self.service = service
        self.caller = caller
        self.sandbox = sandbox

    @property
    def labels(self) -> dict[str, Any]:
        return labels_of(self.sandbox)

    async def start(self, request: RunRequest) -> RunHandle:
        """Start a run. Without a time-out it has the longest that the policy allows."""
        if request.timeout_s is None:
            _, policy = await self.sandbox.policy()
            request = replace(request, timeout_s=policy.limits.wall_time)
        return await self.service.runs.start(
            self.caller, self.sandbox.id, DEFAULT_CONVERSATION, request
        )

    @asynccontextmanager
    async def use(self, *, starts: bool = True) -> AsyncIterator[Conversation]:
        async with self.service.sandboxes.using(
            self.caller,
            self.sandbox.id,
            scope="execute",
            starts=starts,
            conversation=DEFAULT_CONVERSATION,
        ) as use:
            yield use.conversation()

    async def measure(self) -> tuple[SandboxUsage, float, float]:
        """Return the usage, the number of CPUs, and the percentage of them that is used now."""
        async with self.use(starts=False) as conversation:
            before, began = await conversation.usage(), time.monotonic()
            await asyncio.sleep(_CPU_SAMPLE_S)
            usage, seconds = await conversation.usage(), time.monotonic() - began
        cpus = usage.cpu_quota or 1.0
        worked = max(0.0, (usage.cpu_s or 0.0) - (before.cpu_s or 0.0))
        return usage, cpus, min(100.0, 100 * worked / seconds / cpus)

    async def record(self, action: str, **details: Any) -> None:
        await self.service.recording.record(
            self.caller, action, self.sandbox.id, conversation=DEFAULT_CONVERSATION, **details
        )


def labels_of(sandbox: ServiceSandbox) -> dict[str, Any]:
    return dict(sandbox.row.labels or {})
