"""The sandbox that an agent of the service holds: one conversation of a session that is kept.

What it runs goes the way of all runs: queued behind others, recorded, within the owner's limits.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from sbx.agent.sandbox import ToolCheckpoint, ToolDryRun
from sbx.errors import SbxError
from sbx.protocol.languages import check_language
from sbx.protocol.runs import Event
from sbx.runtime.conversation import Conversation
from sbx.service.auth import Caller
from sbx.service.runs import RunHandle, RunRequest, Runs


class AgentRun:
    """A run that is asked for; refused, its events raise why."""

    def __init__(self, starting: "asyncio.Task[RunHandle]") -> None:
        self._starting = starting

    async def events(self) -> AsyncGenerator[Event, None]:
        handle = await asyncio.shield(self._starting)
        async with aclosing(handle.events()) as events:
            async for _, event in events:
                yield event

    async def give_up(self) -> None:
        """Interrupt it; of one that was refused, or has ended, nothing is left to do."""
        with suppress(SbxError):
            await (await asyncio.shield(self._starting)).interrupt()


class AgentSandbox:
    """See the module. `conversation` is in use (`Sandboxes.using`) for as long as this is held."""

    def __init__(
        self, runs: Runs, caller: Caller, sandbox_id: str, conversation: Conversation
    ) -> None:
        self.files = conversation.files
        self.uploads = conversation.uploads
        self._runs = runs
        self._caller = caller
        self._sandbox_id = sandbox_id
        self._conversation = conversation
        self._asked: dict[AgentRun, None] = {}

    def start_run(self, code: str, *, timeout: float | None = None) -> AgentRun:
        return self._started(RunRequest("python", code, timeout_s=timeout))

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> AgentRun:
        return self._started(RunRequest("shell", command, timeout_s=timeout, cwd=cwd))

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> AgentRun:
        return self._started(RunRequest(check_language(language), code, timeout_s=timeout))

    async def give_up(self, run: AgentRun, /) -> None:
        await run.give_up()

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ToolDryRun:
        return await self._conversation.dry_run(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> ToolCheckpoint:
        return await self._conversation.checkpoint()

    async def close(self) -> None:
        """Leave nothing behind that nobody follows any more."""
        await asyncio.gather(*(run.give_up() for run in list(self._asked)))

    def _started(self, ask: RunRequest) -> AgentRun:
        starting = asyncio.create_task(
            self._runs.start(self._caller, self._sandbox_id, self._conversation.name, ask)
        )
        run = AgentRun(starting)
        self._asked[run] = None
        starting.add_done_callback(_looked_at)
        return run


def _looked_at(starting: "asyncio.Task[RunHandle]") -> None:
    if not starting.cancelled():
        starting.exception()  # told by `events`, to whoever follows
