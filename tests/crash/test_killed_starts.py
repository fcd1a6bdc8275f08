"""Kernels that are killed while they start: the next one is started, as long as there is time."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_app import live

from sbx import Runtime, Settings
from sbx.errors import Broken
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail
from sbx.policy.load import load

pytestmark = pytest.mark.needs("namespaces")
Killing = Callable[[int], None]


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Killing:
    """Kills the first so many jails of the cold path as soon as they are there."""
    real, left = BrokerClient.launch, [0]

    async def launch(self: BrokerClient, *words: Any) -> Jail:
        jail = await real(self, *words)
        if left[0]:
            left[0] -= 1
            assert jail.pid is not None
            os.kill(jail.pid, signal.SIGKILL)
        return jail

    monkeypatch.setattr(BrokerClient, "launch", launch)

    def kill(count: int) -> None:
        left[0] = count

    return kill


async def test_a_cold_start_is_tried_again_when_its_kernel_is_killed(killing: Killing) -> None:
    async with Runtime(Settings(fast_path=False)) as runtime, await runtime.create() as box:
        killing(4)
        assert (await box.run("1 + 1")).result == "2"
        assert runtime.starts.failed == {"cold": 4}
        assert runtime.starts.served == {"cold": 1}


async def test_a_start_whose_kernels_are_all_killed_fails(killing: Killing) -> None:
    async with Runtime(Settings(fast_path=False)) as runtime, await runtime.create() as box:
        killing(5)
        with pytest.raises(Broken) as raised:
            await box.run("1")
        assert raised.value.code == "start_failed"
        assert (await box.run("1 + 1")).result == "2"


async def test_a_call_whose_kernels_are_all_killed_may_be_sent_again(
    killing: Killing, tmp_path: Path
) -> None:
    async with live(tmp_path, fast_path=False) as served, served.client() as client:
        made = (await client.post("/v1/sandboxes", json={})).json()["id"]
        url = f"/v1/sandboxes/{made}/python/exec"
        killing(5)
        refused = await client.post(url, json={"code": "1"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "session_not_ready"
        assert refused.headers["retry-after"] == "1"
        assert (await client.post(url, json={"code": "1"})).status_code == 200


@pytest.mark.needs("memory")
async def test_a_start_whose_memory_runs_out_is_not_repeated() -> None:
    """It ran out of memory five times, which took five times as long."""
    async with Runtime(Settings(fast_path=False)) as runtime:
        greedy = load("default").model_copy(update={"preload": ("numpy", "pandas")})
        limits = {"limits": {"memory_max": "32MiB"}}
        async with await runtime.create(greedy, narrower=limits) as box:
            with pytest.raises(Broken) as raised:
                await box.run("1")
        assert (raised.value.code, runtime.starts.failed) == ("start_failed", {"cold": 1})
        assert "memory" in raised.value.message
