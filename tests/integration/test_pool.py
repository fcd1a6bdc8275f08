"""Pool, fork and cold: which path serves, what is kept ready, and what ends it. On real jails."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from manual_clock import ManualClock
from msgspec import structs

from sbx import Runtime, Settings
from sbx.environments.interpreter import own_interpreter
from sbx.errors import BadRequest, Broken, CannotEnforce, SbxError, Unavailable
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail, ZygoteHandle
from sbx.isolation.launch_plan import Paths, ZygotePlan
from sbx.isolation.receipt import Receipt
from sbx.isolation.seccomp import load_filters
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool import pools, scaling
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.scaling import LEFT_ALONE_S, QUIET_S, TICK_S, UNUSED_S
from sbx.kernels.pool.warm_pool import Pool, destroy
from sbx.kernels.pool.zygotes import Key, ZygoteGroup, key_of
from sbx.linux import memory
from sbx.policy import Policy, load

pytestmark = pytest.mark.needs("namespaces")
PROJECT = Path(__file__).resolve().parents[2]
ZOMBIE = psutil.STATUS_ZOMBIE
FORK = {"pool": {"max_idle": 0}}
COLD = {"pool": {"start": "cold"}}


@pytest.fixture
async def runtime(own_runtime: Runtime) -> Runtime:
    """One of its own for each test: they count its kernels, kill them, and turn its clock."""
    return own_runtime


def policy(**pool: Any) -> Policy:
    default = load("default")
    return default.model_copy(update={"pool": default.pool.model_copy(update=pool)})


async def until(true: Callable[[], object], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110  # some of it is linux's, which sets no event
            await asyncio.sleep(0.01)


def starter_of(runtime: Runtime) -> KernelFactory:
    assert runtime._resources is not None
    return runtime._resources.starter


def pool_of(runtime: Runtime) -> Pool:
    (pool,) = starter_of(runtime)._pools.values()
    return pool


def zygotes(of: Runtime | BrokerClient) -> list[ZygoteHandle]:
    """Those that take orders, as the broker has told."""
    broker = of if isinstance(of, BrokerClient) else of._broker
    assert broker is not None
    return [zygote for zygote in broker._zygotes.values() if zygote.alive]


# -- which path serves -----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.unprivileged
async def test_each_path_serves_and_gives_the_same_receipt_but_for_its_name(
    runtime: Runtime,
) -> None:
    await runtime.warm(count=1)
    receipts = {}
    for path, narrower in (("pool", {}), ("fork", FORK), ("cold", COLD)):
        async with await runtime.create(narrower=narrower) as box:
            receipts[path] = await box.start()
            assert (await box.run("1 + 1")).result == "2"
    assert {path: one.path for path, one in receipts.items()} == {
        "pool": "pool",
        "fork": "fork",
        "cold": "cold",
    }
    assert like_any(receipts["pool"]) == like_any(receipts["fork"]) == like_any(receipts["cold"])
    assert runtime.starts.served == {"pool": 1, "fork": 1, "cold": 1}
    assert runtime.starts.failed == {}


def like_any(receipt: Receipt) -> dict[str, Any]:
    """The receipt without what differs between any two kernels."""
    plain = replace(receipt, path="", host_uid=0, read_at=0.0).to_dict()
    return {**plain, "namespaces": sorted(receipt.namespaces)}


async def test_fork_imports_no_module_of_sbx_that_its_zygote_could_have_imported(
    runtime: Runtime,
) -> None:
    """An import takes milliseconds of each start. The last import of a zygote is `warmup`."""
    modules = """
import sys
names = [*sys.modules]
[name for name in names[names.index('sbx.guest.start.warmup') + 1:] if name.startswith('sbx.')]
"""
    async with await runtime.create(narrower=FORK) as box:
        assert (await box.run(modules)).result == "[]"
        assert box.receipt is not None
        assert box.receipt.path == "fork"


@pytest.mark.full_tier
async def test_setting_leaves_only_the_cold_path() -> None:
    async with Runtime(Settings(fast_path=False)) as runtime:
        async with await runtime.create() as box:
            receipt = await box.start()
            assert (receipt.path, receipt.fallback) == ("cold", "")
        with pytest.raises(Unavailable, match="the setting fast_path"):
            await runtime.warm()
        assert not zygotes(runtime)


@pytest.mark.full_tier
async def test_narrowed_limits_and_variables_come_to_a_kernel_that_was_idle_before(
    runtime: Runtime,
) -> None:
    await runtime.warm()
    asked = {"limits": {"open_files": 100, "tmp_size": "2MiB"}}
    async with await runtime.create(narrower=asked, env={"WHO": "me"}) as box:
        run = await box.run(
            "import os, resource\n"
            "tmp = os.statvfs('/tmp')\n"
            "resource.getrlimit(resource.RLIMIT_NOFILE)[1], os.environ['WHO'],"
            " tmp.f_blocks * tmp.f_frsize"
        )
        assert run.result == "(100, 'me', 2097152)"
        assert box.receipt is not None
        assert box.receipt.path == "pool"


@pytest.mark.full_tier
async def test_request_that_shows_less_of_the_host_gets_a_zygote_of_its_own(
    runtime: Runtime,
) -> None:
    await runtime.warm()
    read = [path for path in load("default").filesystem.read if path != "/etc/ssl"]
    async with await runtime.create(narrower={"filesystem": {"read": read}}) as box:
        assert (await box.run("import os; os.path.exists('/etc/ssl')")).result == "False"
        assert box.receipt is not None
        assert box.receipt.path == "fork"


@pytest.mark.full_tier
async def test_many_who_come_at_once_share_one_zygote(runtime: Runtime) -> None:
    async def one() -> str:
        async with await runtime.create() as box:
            return (await box.start()).path

    assert await asyncio.gather(*(one() for _ in range(6))) == ["fork"] * 6
    assert len(zygotes(runtime)) == 1


# -- what fails, and what serves instead -----------------------------------------------------------


@pytest.mark.full_tier
async def test_kernel_that_died_idle_is_not_given_out_and_its_place_is_filled(
    runtime: Runtime,
) -> None:
    await runtime.warm()
    pool = pool_of(runtime)
    (first,) = pool._idle
    assert first.jail.pid is not None
    os.kill(first.jail.pid, signal.SIGKILL)
    await until(lambda: pool.idle == 1 and first not in pool._idle)
    await until(lambda: first.jail.control.fileno() == first.jail.kernel.fileno() == -1)
    async with await runtime.create() as box:
        assert (await box.start()).path == "pool"


@pytest.mark.full_tier
async def test_jail_that_cannot_enter_is_destroyed_and_the_next_path_serves(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runtime.warm(count=2)
    pool = pool_of(runtime)
    left = pool._idle[1]
    refused: list[Jail] = []
    enter = BrokerClient.enter

    async def once(broker: BrokerClient, jail: Jail, *words: Any) -> None:
        if not refused:
            refused.append(jail)
            raise Broken("a mount went wrong")
        await enter(broker, jail, *words)

    monkeypatch.setattr(BrokerClient, "enter", once)
    async with await runtime.create() as box:
        receipt = await box.start()
        assert (receipt.path, receipt.fallback) == ("fork", "pool: a mount went wrong")
        assert refused[0].gone
    await until(lambda: pool.idle == 1 and left not in pool._idle)
    assert runtime.starts.failed == {"pool": 1}
    assert runtime.starts.last_cause == "a mount went wrong"


@pytest.mark.full_tier
async def test_cold_path_serves_where_no_jail_can_enter_and_the_zygote_goes(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        raise Broken("no such mount here")

    monkeypatch.setattr(BrokerClient, "enter", never)
    await runtime.warm()
    async with await runtime.create() as box:
        receipt = await box.start()
        assert (await box.run("1 + 1")).result == "2"
    assert receipt.path == "cold"
    assert receipt.fallback == "pool: no such mount here; fork: no such mount here"
    await until(lambda: not zygotes(runtime))


@pytest.mark.full_tier
async def test_zygote_whose_idle_jail_cannot_enforce_is_not_asked_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise CannotEnforce("no such wall here")

    await runtime.warm()
    monkeypatch.setattr(BrokerClient, "enter", refuse)
    async with await runtime.create() as box:
        receipt = await box.start()
    assert (receipt.path, receipt.fallback) == ("cold", "pool: no such wall here")
    await until(lambda: not zygotes(runtime))


@pytest.mark.full_tier
async def test_one_deadline_is_for_all_paths_and_leaves_the_last_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(pools, "_FAST_SHARE", 0.05)  # instead of a half: the rest is for the last
    async with Runtime(Settings(start_timeout=40)) as runtime:
        await runtime.warm()
        monkeypatch.setattr(BrokerClient, "enter", hang)
        async with await runtime.create() as box:
            receipt = await box.start()
        assert receipt.path == "cold"
        pool_s, fork_s = map(float, re.findall(r"within ([\d.]+) s", receipt.fallback))
        assert 0 < pool_s <= 2
        assert 0 < fork_s <= 0.05 * (40 - pool_s)  # the share of what the first has left
    async with Runtime(Settings(start_timeout=1)) as runtime:
        monkeypatch.setattr(BrokerClient, "launch", hang)
        async with await runtime.create(narrower=COLD) as box:
            with pytest.raises(Broken, match="within 1 s"):
                await box.start()


@pytest.mark.full_tier
async def test_zygote_has_as_long_as_a_start_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    order, answer = BrokerClient.order, []

    async def listen(broker: BrokerClient, do: str, **words: Any) -> dict[str, Any]:
        if do == "start_zygote":
            answer.append(words["deadline_s"])
        return await order(broker, do, **words)

    monkeypatch.setattr(BrokerClient, "order", listen)
    async with Runtime(Settings(start_timeout=77)) as runtime:
        await runtime.warm()
    assert answer == [77]


@pytest.mark.full_tier
async def test_variable_that_a_preloaded_module_has_read_acts_as_on_the_cold_path(
    runtime: Runtime,
) -> None:
    asked = "import matplotlib; matplotlib.get_backend()"
    science, answer = load("data-science"), []
    for narrower in ({}, COLD):
        async with await runtime.create(
            science, narrower=narrower, env={"MPLBACKEND": "svg"}
        ) as box:
            answer.append((await box.run(asked)).result)
            assert box.receipt is not None
            assert box.receipt.path == "cold"
            assert ("the request sets MPLBACKEND" in box.receipt.fallback) is (not narrower)
    assert answer == ["'svg'", "'svg'"]


@pytest.mark.full_tier
async def test_caller_s_own_fault_costs_nobody_the_zygote(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cold path cannot start either says nothing against the zygote."""

    async def never(*_: Any) -> None:
        raise Broken("the workspace was replaced")

    await runtime.warm()
    before = zygotes(runtime)
    with monkeypatch.context() as patch:
        patch.setattr(BrokerClient, "enter", never)
        patch.setattr(BrokerClient, "launch", never)
        async with await runtime.create() as box:
            with pytest.raises(Broken, match="was replaced"):
                await box.start()
    async with await runtime.create(narrower=FORK) as box:
        assert (await box.start()).path == "fork"
    assert zygotes(runtime) == before


@pytest.mark.full_tier
async def test_zygote_that_cannot_start_leaves_the_cold_path_and_a_reason(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BrokerClient.start_zygote

    async def start_nothing(broker: BrokerClient, plan: ZygotePlan, *words: Any) -> ZygoteHandle:
        return await start(broker, structs.replace(plan, command=("/nothing",)), *words)

    monkeypatch.setattr(BrokerClient, "start_zygote", start_nothing)
    monkeypatch.setattr(scaling, "delay", lambda _failures: 60.0)
    async with await runtime.create() as box:
        receipt = await box.start()
        await box.stop()
        again = await box.start()
    assert receipt.path == again.path == "cold"
    assert "/nothing" in receipt.fallback
    assert re.search(r"not tried again for \d+ s", again.fallback)
    assert runtime.starts.failed["fork"] == 2


@pytest.mark.full_tier
@pytest.mark.core
async def test_zygote_that_is_killed_takes_nobody_along_and_the_pool_fills_again(
    runtime: Runtime,
) -> None:
    async with await runtime.create() as box:
        await box.run("kept = 41")
        pool, before = pool_of(runtime), zygotes(runtime)
        await until(lambda: pool.idle == 1 and not pool.needs_prewarmed)
        assert pool.lineage._pid is not None
        os.kill(pool.lineage._pid, signal.SIGKILL)
        await until(lambda: not zygotes(runtime))
        async with await runtime.create() as other:
            assert (await other.start()).path == "pool"
        await until(lambda: pool.idle == 1)
        assert (await box.run("kept + 1")).result == "42"
        assert not set(before) & set(zygotes(runtime))


@pytest.mark.full_tier
async def test_start_that_is_cancelled_at_any_moment_leaves_no_jail_behind(
    runtime: Runtime,
) -> None:
    await runtime.warm(policy(max_idle=8), count=8)
    for wait_ms in (0, 1, 2, 3, 5, 8, 12, 20):
        async with await runtime.create(policy(max_idle=8)) as box:
            starting = asyncio.create_task(box.start())
            await asyncio.sleep(wait_ms / 1000)
            starting.cancel()
            await asyncio.wait([starting])
    broker = runtime._broker
    assert broker is not None
    pool = pool_of(runtime)
    await until(lambda: not pool.lacks)
    await until(lambda: not pool.needs_prewarmed)
    kept = (*pool._idle, *(one.kernel for one in pool._prewarmed))
    await until(lambda: set(broker._jails.values()) == {one.jail for one in kept})


# -- sizes, with a clock of our own ----------------------------------------------------------------


class BrokerHost:
    """A broker and a starter without sandboxes, where time goes by when a test says so."""

    def __init__(self, broker: BrokerClient, clock: ManualClock, starter: KernelFactory) -> None:
        self.broker = broker
        self.clock = clock
        self.starter = starter

    def key(self, **pool: Any) -> Key:
        assert self.broker.capabilities is not None
        machine = self.broker.capabilities.machine
        filters = load_filters(machine)
        paths = Paths("", "", own_interpreter(), str(PROJECT))
        chosen = policy(**pool)
        key = key_of(chosen, chosen, self.broker.capabilities, paths, filters)
        assert key is not None
        return key

    async def pass_time(self, seconds: float) -> None:
        """Tick by tick, each with what it sets off."""
        for _ in range(int(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            while self.starter._ending:
                await asyncio.wait(self.starter._ending)


@pytest.fixture
async def broker_host() -> AsyncIterator[BrokerHost]:
    settings = Settings()
    broker = await BrokerClient.start(uids=settings.uid_range, groups=settings.cgroups)
    clock = ManualClock()
    starter = KernelFactory(broker, most=2, deadline_s=30, clock=clock.loop)
    yield BrokerHost(broker, clock, starter)
    await starter.close()
    await broker.close()


@pytest.mark.full_tier
async def test_what_nobody_wants_goes_down_to_min_idle(broker_host: BrokerHost) -> None:
    key = broker_host.key(min_idle=1, max_idle=4)
    await broker_host.starter.warm(key, 4)
    await broker_host.pass_time(QUIET_S - TICK_S)
    assert broker_host.starter.idle(key) == 4
    await broker_host.pass_time(QUIET_S + TICK_S)
    assert broker_host.starter.idle(key) == 1


@pytest.mark.full_tier
async def test_nothing_is_idle_while_somebody_waits_for_a_start(broker_host: BrokerHost) -> None:
    key = broker_host.key()
    await broker_host.starter.warm(key, 1)
    (pool,) = broker_host.starter._pools.values()
    with broker_host.starter._caller_waits():
        taken = pool.take()
        assert taken is not None
        after = await Kernel.attach(await pool.lineage.fork())
        await destroy(taken, after)  # what was ordered before was made before
        assert pool.lacks
        assert pool.idle == 0
    await until(lambda: pool.idle == 1)


@pytest.mark.full_tier
async def test_policy_that_nobody_uses_keeps_neither_kernel_nor_zygote(
    broker_host: BrokerHost,
) -> None:
    key = broker_host.key()
    await broker_host.starter.warm(key, 1)
    await broker_host.pass_time(UNUSED_S)
    assert broker_host.starter.idle(key) == 0
    await until(lambda: not zygotes(broker_host.broker))
    await until(lambda: not broker_host.broker._jails)
    assert broker_host.clock._due == []  # and nothing wakes up for it any more


async def test_short_memory_ends_what_is_idle_and_nothing_is_idle_until_it_is_over(
    broker_host: BrokerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = broker_host.key()
    await broker_host.starter.warm(key, 1)
    with monkeypatch.context() as short:
        short.setattr(memory, "available", lambda: (1, 100))
        await broker_host.pass_time(2 * TICK_S)
        assert broker_host.starter.idle(key) == 0
        with pytest.raises(Unavailable, match="short of memory"):
            await broker_host.starter.warm(key, 1)
    await broker_host.pass_time(TICK_S)
    await until(lambda: broker_host.starter.idle(key) == 1)


async def test_third_policy_makes_room_by_the_one_used_longest_ago(broker_host: BrokerHost) -> None:
    first, second, third = (broker_host.key(min_idle=number) for number in (0, 1, 2))
    for key in (first, second, third):
        broker_host.clock.advance(LEFT_ALONE_S / 2)
        await broker_host.starter.warm(key, 1)
    idle = [broker_host.starter.idle(key) for key in (first, second, third)]
    assert idle[0] == 0
    assert idle[1] == idle[2] == 1
    await until(lambda: len(zygotes(broker_host.broker)) == 2)


async def test_third_policy_ends_no_zygote_that_was_just_used(broker_host: BrokerHost) -> None:
    for number in (0, 1):
        await broker_host.starter.warm(broker_host.key(min_idle=number), 1)
    before = zygotes(broker_host.broker)
    broker_host.clock.advance(LEFT_ALONE_S - 1)
    with pytest.raises(Unavailable, match="all 2 zygotes are in use"):
        await broker_host.starter.warm(broker_host.key(min_idle=2), 1)
    assert zygotes(broker_host.broker) == before


@pytest.mark.full_tier
async def test_pool_is_busy_while_a_kernel_is_idle_ahead(
    broker_host: BrokerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker_host.starter.warm(broker_host.key(), 1)
    (pool,) = broker_host.starter._pools.values()
    fork, busy = ZygoteGroup.fork, []

    async def look(lineage: ZygoteGroup, *, ahead: bool = False) -> Jail:
        busy.append(pool.busy)
        return await fork(lineage, ahead=ahead)

    monkeypatch.setattr(ZygoteGroup, "fork", look)
    used_at = pool.used_at
    broker_host.clock.advance(1)
    await pool.shrink(0)
    broker_host.starter._work.set()
    await until(lambda: pool.idle == 1)
    assert (busy, pool.busy, pool.used_at) == ([True], False, used_at)


async def test_kernels_that_end_at_once_are_not_waited_for_without_end(
    broker_host: BrokerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, add_idle = Kernel.attach, Pool.add_idle

    async def stillborn(jail: Jail) -> Kernel:
        kernel = await attach(jail)
        await jail.kill()
        return kernel

    async def short_lived(pool: Pool) -> None:
        await add_idle(pool)
        await asyncio.gather(*(kernel.jail.kill() for kernel in pool._idle))
        await until(lambda: not pool.idle)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "add_idle", short_lived)
        patch.setattr(KernelFactory, "_lacking", lambda _: None)
        with pytest.raises(Unavailable, match="as soon as they are idle"):
            await broker_host.starter.warm(broker_host.key(), 1)
        patch.setattr(Pool, "add_idle", add_idle)
        patch.setattr(Kernel, "attach", stillborn)
        with pytest.raises(Broken, match="ended before it was idle"):
            await broker_host.starter.warm(broker_host.key(), 1)
    (pool,) = broker_host.starter._pools.values()
    assert pool.lineage.rests_s == 1
    assert not zygotes(broker_host.broker)


async def test_what_nobody_foresaw_ends_neither_refilling_nor_tending(
    broker_host: BrokerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Pool) -> None:
        raise RuntimeError("nobody foresaw this")

    key = broker_host.key()
    await broker_host.starter.warm(key, 1)
    (pool,) = broker_host.starter._pools.values()
    await pool.shrink(0)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "add_idle", fail)
        patch.setattr(Pool, "settle", fail)
        await broker_host.pass_time(2 * TICK_S)
        await until(lambda: not broker_host.starter._work.is_set())
    broker_host.starter._drop(broker_host.key(min_idle=3))  # which nobody ever used
    await broker_host.pass_time(TICK_S)
    await until(lambda: broker_host.starter.idle(key) == 1)


async def test_worn_zygote_is_replaced_and_what_it_forked_lives_on(broker_host: BrokerHost) -> None:
    key = broker_host.key()
    await broker_host.starter.warm(key, 1)
    (before,) = zygotes(broker_host.broker)
    (pool,) = broker_host.starter._pools.values()
    broker_host.clock.advance(3600)
    pool.used_at = broker_host.clock.time()
    await broker_host.pass_time(TICK_S)
    await until(lambda: before not in zygotes(broker_host.broker))
    assert len(zygotes(broker_host.broker)) == 1
    assert broker_host.starter.idle(key) == 1
    assert pool._idle[0].alive


async def test_more_than_a_policy_keeps_cannot_be_asked_for(broker_host: BrokerHost) -> None:
    with pytest.raises(BadRequest, match=r"pool.max_idle of the policy is 4"):
        await broker_host.starter.warm(broker_host.key(), 5)


@pytest.mark.full_tier
async def test_close_while_a_zygote_starts_leaves_nothing(broker_host: BrokerHost) -> None:
    warming = asyncio.create_task(broker_host.starter.warm(broker_host.key(), 1))
    await until(lambda: broker_host.broker._zygotes)
    await broker_host.starter.close()
    with pytest.raises(SbxError):
        await warming
    assert not broker_host.broker._zygotes


@pytest.mark.full_tier
async def test_end_of_the_broker_ends_all_that_was_kept(broker_host: BrokerHost) -> None:
    key = broker_host.key()
    await broker_host.starter.warm(key, 2)
    assert broker_host.broker._process is not None
    below = psutil.Process(broker_host.broker._process.pid).children(recursive=True)
    broker_host.broker._process.kill()
    await until(lambda: not broker_host.broker.alive)
    await until(lambda: broker_host.starter.idle(key) == 0)
    with pytest.raises(SbxError):
        await broker_host.starter.warm(key, 1)
    assert zygotes(broker_host.broker) == []
    await until(lambda: not any(one.is_running() and one.status() != ZOMBIE for one in below))
    await broker_host.starter.close()
    await broker_host.broker.close()
    async with Runtime():
        pass  # the next one removes the cgroups that a killed broker leaves


@pytest.mark.full_tier
async def test_a_kernel_that_is_prewarmed_is_not_replaced(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was neither idle nor prewarmed meanwhile, so that another one was forked for it."""
    entering, may_enter, enter = asyncio.Event(), asyncio.Event(), BrokerClient.enter

    async def wait_and_enter(self: BrokerClient, *words: Any) -> None:
        entering.set()
        await may_enter.wait()
        await enter(self, *words)

    monkeypatch.setattr(BrokerClient, "enter", wait_and_enter)
    warming = asyncio.create_task(runtime.warm(count=1, new=True))
    await entering.wait()
    assert runtime._starter is not None
    (pool,) = runtime._starter._pools.values()
    assert (pool.idle, pool.lacks) == (0, False)
    may_enter.set()
    await warming
    assert runtime.idle == 1
