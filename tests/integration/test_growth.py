"""No kind of call leaves objects in the service: see bench/growth.py, which measures its memory.

Each kind is called a few times more, and then no type of sbx may have as many more objects. The
buffers of BUFFERED keep objects up to a limit.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory
from pydantic import SecretStr

from bench.growth import World
from bench.torture import model
from sbx.agent.settings import AgentSettings

CALLS = 10
_WITHIN_S = 30.0
BUFFERED = {
    "command": {"CommandRecord", "CommandLog", "CommandStatus", "ChangeSignal"},  # 256 that ended
    "opensandbox_command": {"CommandRecord", "CommandLog", "CommandStatus", "ChangeSignal"},
    "e2b_process": {"LiveProcess", "Command"},  # 64 that ended
    "port": {"Frame"},  # output between two runs, until its window is full
    "port_link": {"Frame", "Link", "Caller"},  # 1,024 links
    "tunnel": {"Frame"},
    "key": {"Caller"},  # 1,024 callers
    "login": {"Caller"},
    "token": {"Caller"},
}
KINDS = [name.removeprefix("call_") for name in vars(World) if name.startswith("call_")]
SLOW = {"e2b_watched_and_deleted", "run_large_output"}

pytestmark = pytest.mark.timeout(180)


@pytest_asyncio.fixture(scope="module")
async def world() -> AsyncIterator[tuple[Served, World]]:
    with short_directory() as directory:
        async with model.serving() as url:
            agent = AgentSettings(base_url=url, api_key=SecretStr(model.KEY), model_name="scripted")
            async with live(directory, agent=agent) as served:
                key = await served.key_of("growing", operator=True)
                async with served.client(key) as http:
                    e2b = f"e2b_{key.removeprefix('sk-sbx-')}"
                    http.headers.update({"x-api-key": e2b, "open-sandbox-api-key": key})
                    calls = World(http, served.socket, key)
                    await calls.prepare()
                    yield served, calls


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full_tier] * (kind in SLOW)) for kind in KINDS]
)
async def test_calls_leave_no_objects(world: tuple[Served, World], kind: str) -> None:
    served, calls = world
    act = calls.kinds[kind]
    for _ in range(3):
        await calls.call(act)
    before = await _settled(served, Counter())
    for _ in range(CALLS):
        await calls.call(act)
    after = await _settled(served, before)
    more = {name for name, count in (after - before).items() if count >= CALLS}
    assert not more - BUFFERED.get(kind, set())


async def _settled(served: Served, before: Counter[str]) -> Counter[str]:
    """Return the number of objects by type, when no more of them go: jails end a moment after their
    sandbox."""
    deadline = time.monotonic() + _WITHIN_S
    last = _objects(served)
    while time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        now = _objects(served)
        grown = [count for count in (now - before).values() if count >= CALLS]
        if (before and not grown) or now.total() >= last.total():
            return now
        last = now
    return last


def _objects(served: Served) -> Counter[str]:
    served.service.runs._ended.clear()  # the replay of a minute
    if (agents := getattr(served.app.state, "agents", None)) is not None:
        agents.chats._ended.clear()
    gc.collect()
    types = map(type, gc.get_objects())
    return Counter(each.__name__ for each in types if each.__module__.startswith("sbx."))
