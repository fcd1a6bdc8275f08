"""New sandboxes get a kernel that is sealed in an empty workspace already. On real jails."""

import asyncio
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain import until
from manual_clock import ManualClock

from sbx import Runtime, Settings
from sbx.errors import BadRequest, Broken
from sbx.isolation.broker.client import BrokerClient
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.scaling import QUIET_S, TICK_S
from sbx.kernels.pool.warm_pool import Pool, PrewarmedKernel
from sbx.linux import memory
from sbx.policy import Policy, load
from sbx.runtime.prewarm import PrewarmedSandbox, make_prewarmed
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.runtime import _interpreter_of
from sbx.workspace.layout import DataDirectory

pytestmark = pytest.mark.needs("namespaces")


@pytest.fixture
async def runtime(own_runtime: Runtime) -> Runtime:
    """One of its own for each test: they count its kernels, kill them, and turn its clock."""
    return own_runtime


def means_of(runtime: Runtime) -> RuntimeResources:
    assert runtime._resources is not None
    return runtime._resources


def pool_of(runtime: Runtime) -> Pool:
    (pool,) = means_of(runtime).starter._pools.values()
    return pool


def prewarmed_of(runtime: Runtime) -> list[PrewarmedKernel]:
    return list(pool_of(runtime)._prewarmed)


def policy(**pool: int) -> Policy:
    default = load("default")
    return default.model_copy(update={"pool": default.pool.model_copy(update=pool)})


def narrower(than: Policy) -> Policy:
    limits = than.limits.model_copy(update={"tasks_max": 40})
    return than.model_copy(update={"limits": limits})


@pytest.mark.core
@pytest.mark.unprivileged
async def test_new_sandbox_gets_a_kernel_that_was_ready_with_every_wall_of_the_others(
    runtime: Runtime,
) -> None:
    await runtime.warm(count=1, new=True)
    (prewarmed,) = prewarmed_of(runtime)
    async with await runtime.create() as box:
        assert box.receipt is None  # it has not asked for a kernel yet
        receipt = await box.start()
        assert receipt is prewarmed.kernel.receipt
        assert (await box.run("open('kept', 'w').write('41'); 1 + 1")).result == "2"
        assert await box.files.read("kept") == "41"
        await box.stop()
        again = await box.start()
        assert (await box.run("open('kept').read()")).result == "'41'"
    one, other = (
        replace(each, path="", namespaces={}, read_at=0.0).to_dict() for each in (receipt, again)
    )
    assert one == other
    assert receipt.path == "pool"
    assert receipt.host_uid == again.host_uid


@pytest.mark.full_tier
async def test_no_two_get_the_same(runtime: Runtime) -> None:
    await runtime.warm(policy(max_idle=8), count=4, new=True)
    boxes = await asyncio.gather(*(runtime.create(policy(max_idle=8)) for _ in range(8)))
    try:
        receipts = await asyncio.gather(*(box.start() for box in boxes))
        answer = "import os, uuid; os.getpid(), uuid.uuid4().hex, len(os.listdir())"
        runs = await asyncio.gather(*(box.run(answer) for box in boxes))
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
    assert len({run.result for run in runs}) == 8
    assert len({receipt.namespaces["mnt"] for receipt in receipts}) == 8
    if os.geteuid() == 0:
        assert len({receipt.host_uid for receipt in receipts}) == 8


@pytest.mark.full_tier
async def test_a_request_that_does_not_fit_gets_no_prewarmed_kernel(
    runtime: Runtime, tmp_path: Path
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 1234, 1234)
    await runtime.warm(count=1, new=True)
    asked: dict[str, Any]
    for asked in (
        {"workspace": tmp_path},
        {"env": {"A": "b"}},
        {"narrower": {"limits": {"tasks_max": 20}}},
    ):
        async with await runtime.create(**asked) as box:
            assert box._prewarmed is None
    assert len(prewarmed_of(runtime)) == 1


@pytest.mark.full_tier
async def test_files_that_come_first_are_there_when_its_kernel_begins(runtime: Runtime) -> None:
    await runtime.warm(count=1, new=True)
    async with await runtime.create() as box:
        await box.files.write("first.txt", b"before")
        await box.uploads.put_bytes("table.csv", b"a,b")
        run = await box.run("open('first.txt').read(), open('uploads/temparea/table.csv').read()")
        assert run.result == "('before', 'a,b')"
        assert runtime.starts.served == {"pool": 1}


@pytest.mark.full_tier
async def test_sandbox_that_never_runs_anything_leaves_nothing(tmp_path: Path) -> None:
    async with Runtime(Settings(data_dir=tmp_path)) as runtime:
        await runtime.warm(count=1, new=True)
        (prewarmed,) = prewarmed_of(runtime)
        box = await runtime.create()
        assert box._prewarmed is prewarmed.slot
        await box.close()
        assert prewarmed.kernel.jail.gone
        await until(lambda: pool_of(runtime).settled)
        kept = {
            one.slot.directory
            for one in prewarmed_of(runtime)
            if isinstance(one.slot, PrewarmedSandbox)
        }
        assert set(means_of(runtime).data.sandboxes()) == kept
    with closing(DataDirectory(tmp_path)) as left:
        assert list(left.sandboxes()) == []


@pytest.mark.full_tier
async def test_a_prewarmed_kernel_that_died_is_not_given_out(runtime: Runtime) -> None:
    await runtime.warm(count=1, new=True)
    (prewarmed,) = prewarmed_of(runtime)
    assert prewarmed.kernel.jail.pid is not None
    os.kill(prewarmed.kernel.jail.pid, signal.SIGKILL)
    await until(lambda: prewarmed not in prewarmed_of(runtime))
    async with await runtime.create() as box:
        assert (await box.run("1 + 1")).result == "2"


async def test_kernel_that_died_when_it_had_an_owner_is_replaced_by_another(
    runtime: Runtime,
) -> None:
    await runtime.warm(count=1, new=True)
    (prewarmed,) = prewarmed_of(runtime)
    async with await runtime.create() as box:
        assert prewarmed.kernel.jail.pid is not None
        os.kill(prewarmed.kernel.jail.pid, signal.SIGKILL)
        await prewarmed.kernel.jail.end()
        run = await box.run("1 + 1")
        assert (run.result, run.state_lost) == ("2", False)


@pytest.mark.full_tier
async def test_home_that_cannot_be_made_is_not_tried_until_somebody_asks_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    async def fail(*words: object) -> PrewarmedSandbox:
        made.append(words)
        raise Broken("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr("sbx.runtime.prewarm.make_prewarmed", fail)
        async with await runtime.create() as box:
            await box.start()
            await until(lambda: made)
            await asyncio.sleep(0.3)
            assert len(made) == 1
            assert runtime.starts.failed == {"refill": 1}
    async with await runtime.create():
        pass
    await until(lambda: prewarmed_of(runtime))


@pytest.mark.full_tier
async def test_jail_that_cannot_move_in_leaves_no_home_and_costs_its_zygote(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise Broken("a mount went wrong")

    with monkeypatch.context() as patch:
        patch.setattr(BrokerClient, "enter", never)
        with pytest.raises(Broken, match="a mount went wrong"):
            await runtime.warm(count=1, new=True)
    assert not means_of(runtime).unowned_directories
    assert list(means_of(runtime).data.sandboxes()) == []
    async with await runtime.create() as box:
        assert (await box.start()).path == "fork" or box.receipt is not None


@pytest.mark.full_tier
async def test_cancelled_warming_leaves_nothing(runtime: Runtime) -> None:
    await runtime.warm()
    for wait_ms in (0, 1, 2, 3, 5, 8, 12):
        warming = asyncio.create_task(runtime.warm(count=1, new=True))
        await asyncio.sleep(wait_ms / 1000)
        warming.cancel()
        await asyncio.wait([warming])
        await until(lambda: not pool_of(runtime).busy)
        await pool_of(runtime).shrink(0)
    assert not means_of(runtime).unowned_directories
    assert list(means_of(runtime).data.sandboxes()) == []
    assert runtime._broker is not None
    broker = runtime._broker
    await until(lambda: not pool_of(runtime).busy and len(broker._jails) == pool_of(runtime).idle)


@pytest.mark.full_tier
async def test_short_memory_ends_prewarmed_kernels_too(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runtime.warm(count=1, new=True)
    (prewarmed,) = prewarmed_of(runtime)
    monkeypatch.setattr(memory, "available", lambda: (1, 100))
    starter = means_of(runtime).starter
    await starter._tend()
    assert prewarmed.kernel.jail.gone
    assert not means_of(runtime).unowned_directories


@pytest.mark.full_tier
async def test_unused_prewarmed_kernels_make_room_for_idle_kernels(
    runtime: Runtime,
) -> None:
    starter: KernelFactory = means_of(runtime).starter
    clock = ManualClock()
    starter._clock = clock.loop
    await runtime.warm(count=1, new=True)
    pool = pool_of(runtime)
    for _ in range(int(2 * QUIET_S / TICK_S) + 2):
        clock.advance(TICK_S)
        while starter._ending:
            await asyncio.wait(starter._ending)
    await until(lambda: not pool.lacks)
    assert (len(pool._prewarmed), len(pool._idle)) == (0, 1)


async def test_more_than_the_policy_keeps_is_refused(runtime: Runtime) -> None:
    with pytest.raises(BadRequest, match="max_idle"):
        await runtime.warm(policy(max_idle=2), count=3, new=True)


async def test_home_by_itself_comes_and_goes(runtime: Runtime) -> None:
    means = means_of(runtime)
    loaded, decided = await runtime.decide("default")
    home = await make_prewarmed(means, decided, await _interpreter_of(runtime.settings, decided))
    assert means.unowned_directories == {home.directory}
    assert list(means.data.sandboxes()) == [home.directory]
    assert loaded == decided
    await home.give_up()
    assert not means.unowned_directories
    assert list(means.data.sandboxes()) == []


async def test_each_of_two_policies_that_share_a_pool_gets_what_was_warmed_for_it(
    runtime: Runtime,
) -> None:
    one, other = policy(max_idle=2), narrower(policy(max_idle=2))
    await runtime.warm(one, count=1, new=True)
    await runtime.warm(other, count=1, new=True)
    assert len(prewarmed_of(runtime)) == 2
    for each in (one, other):
        async with await runtime.create(each) as box:
            assert box._prewarmed is not None


@pytest.mark.full_tier
async def test_prewarmed_of_a_policy_that_was_changed_make_room_for_those_of_the_new_one(
    runtime: Runtime,
) -> None:
    await runtime.warm(policy(max_idle=1), count=1, new=True)
    (old,) = prewarmed_of(runtime)
    changed = narrower(policy(max_idle=1))
    async with await runtime.create(changed) as box:
        assert box._prewarmed is None
        await box.start()
    await until(lambda: pool_of(runtime).settled and old not in prewarmed_of(runtime))
    assert old.kernel.jail.gone
    async with await runtime.create(changed) as box:
        assert box._prewarmed is not None


@pytest.mark.full_tier
async def test_stop_ends_a_kernel_too_that_was_ready_and_not_used_yet(runtime: Runtime) -> None:
    await runtime.warm(count=1, new=True)
    (prewarmed,) = prewarmed_of(runtime)
    async with await runtime.create() as box:
        await box.stop()
        assert prewarmed.kernel.jail.gone
        assert (await box.run("1 + 1")).result == "2"


async def test_home_that_cannot_be_removed_is_left_to_a_collection(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = means_of(runtime)
    loaded, _ = await runtime.decide("default")
    interpreter = await _interpreter_of(runtime.settings, loaded)

    async def fail(*_: object, **__: object) -> None:
        raise Broken("the broker did not do it")

    with monkeypatch.context() as patch:
        patch.setattr(BrokerClient, "drop_sandbox", fail)
        patch.setattr("sbx.runtime.files.disk_limit.limited", fail)
        with pytest.raises(Broken, match="did not do it"):
            await make_prewarmed(means, loaded, interpreter)
    assert not means.unowned_directories
    assert list(means.data.sandboxes()) == []
