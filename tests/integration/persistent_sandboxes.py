"""A service for tests: a fake clock, a policy that forks nothing ahead, and short ways to run."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sbx.protocol.runs import Run
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.run import RunHandle, RunRequest
from sbx.service.service import Service
from tests.fake_clock import FakeClock

ME = Caller("me", "key", operator=True)
OTHER = Caller("other", "key")
PATIENCE_S = 60.0


@asynccontextmanager
async def open_service(
    data: Path, clock: FakeClock | None = None, **chosen: Any
) -> AsyncIterator[Service]:
    settings = Settings(data_dir=data, gc_interval=0, memory_reserve=0, **chosen)
    async with Service(settings, clock or FakeClock()) as service:
        yield service


async def create(service: Service, content: str) -> str:
    """A sandbox of ME with a file of this content; its id."""
    sandbox = await service.sandboxes.create(ME)
    async with service.sandboxes.using(ME, sandbox.id, scope="files:write") as use:
        await use.active.files.write("kept", content)
    return sandbox.id


async def read(service: Service, sandbox_id: str) -> str:
    """The content of the file that `create` wrote."""
    async with service.sandboxes.using(ME, sandbox_id, scope="files:read") as use:
        return await use.active.files.read("kept")


async def begin(
    service: Service, sandbox_id: str, code: str, *, conversation: str = "default"
) -> RunHandle:
    return await service.runs.start(ME, sandbox_id, conversation, RunRequest("python", code))


async def run(
    service: Service, sandbox_id: str, code: str, *, conversation: str = "default"
) -> Run:
    handle = await begin(service, sandbox_id, code, conversation=conversation)
    return await handle.result()


async def printed(handle: RunHandle) -> None:
    """Wait until a run has written something: it runs."""
    async with asyncio.timeout(PATIENCE_S):
        async for _, event in handle.events():
            if event.type == "stdout":
                return


async def eventually(seen: Callable[[], bool]) -> None:
    """Wait until something that needs no clock has come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline, "it never came about"
        await asyncio.sleep(0.01)


def directories(service: Service) -> set[str]:
    """The opaque names of sandboxes with files, except prewarmed ones, which nobody owns yet."""
    return set(service.runtime.data.sandboxes()) - service.runtime.unowned_directories


async def state_events(service: Service, sandbox_id: str) -> list[tuple[str, str | None]]:
    await service.store.write(lambda on: None)
    page = await service.events.page(ME, sandbox_id)
    return [(event.type, event.cause) for event in page.items]
