"""Kernels that are killed while they start: the next one is started, as long as there is time."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from live_app import live
from places import short_directory

from sbx import Runtime, Settings
from sbx.errors import Broken, Unavailable
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


@pytest.mark.full_tier
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


async def test_a_bubblewrap_that_is_killed_before_it_names_pid_1_is_started_again() -> None:
    """A jail that was killed from outside in its first milliseconds failed the start of its kernel,
    although the jails that are killed a moment later are started again."""
    with short_directory() as directory:
        wrapper, orders = directory / "bwrap", directory / "orders"
        orders.mkdir()
        orders.chmod(0o777)  # the wrapper runs as the uid of a jail
        kill = f'for one in {orders}/kill-*; do [ -e "$one" ] && rm "$one" && kill -9 $$; done'
        wrapper.write_text(f'#!/bin/sh\n{kill}\nexec {shutil.which("bwrap")} "$@"\n')
        wrapper.chmod(0o755)
        settings = Settings(fast_path=False, bwrap=wrapper)
        async with Runtime(settings) as runtime, await runtime.create() as box:
            for number in range(3):
                (orders / f"kill-{number}").touch()
            assert (await box.run("1 + 1")).result == "2"
            assert runtime.starts.failed == {"cold": 3}
            assert runtime.starts.served == {"cold": 1}


async def test_a_launch_without_room_for_descriptors_names_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`[Errno 22] Invalid argument` named no call, and was a defect of sbx to the caller (500)."""
    real = BrokerClient.order

    async def cramped(self: BrokerClient, do: str, **words: Any) -> dict[str, Any]:
        with room_for_no_jail(self) if do == "launch" else nullcontext():
            return await real(self, do, **words)

    async with Runtime(Settings(fast_path=False)) as runtime, await runtime.create() as box:
        monkeypatch.setattr(BrokerClient, "order", cramped)
        with pytest.raises(Unavailable, match="too many open files") as raised:
            await box.run("1")
        assert raised.value.code == "too_many_open_files"
        assert "RLIMIT_NOFILE" in str(raised.value.hint)
        monkeypatch.undo()
        assert (await box.run("1 + 1")).result == "2"


@contextmanager
def room_for_no_jail(broker: BrokerClient) -> Iterator[None]:
    """Let the broker have fewer descriptors than the slots of a jail begin with."""
    assert broker._process is not None
    pid = broker._process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (150, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
