"""The stream of the events of a sandbox ends with its deletion, whenever that is recorded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory

from sbx.store import events


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        async with live(directory) as served:
            yield served


async def test_a_deletion_during_a_read_is_still_the_last_event(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page was read before the deletion was recorded, and is looked at after it."""
    service = served.service
    caller = service.access.service_caller()
    view = await service.sandboxes.create(caller)
    sandbox = service.sandboxes.index.get(caller, view.id)
    real = events.list_for_sandbox
    deleting: list[asyncio.Task[None]] = []

    async def late(*args: Any, **options: Any) -> Sequence[Any]:
        page = await real(*args, **options)
        if not page and not deleting:
            deleting.append(asyncio.create_task(service.sandboxes.delete(caller, view.id)))
            while sandbox.row.deleted_at is None:  # noqa: ASYNC110  # it is told by no event
                await asyncio.sleep(0)
        return page

    monkeypatch.setattr(events, "list_for_sandbox", late)
    async with asyncio.timeout(60):
        kinds = [event.type async for event in service.events.follow(caller, view.id)]
        await asyncio.gather(*deleting)
    assert kinds == ["created", "deleted"]
