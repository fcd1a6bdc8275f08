"""The caller goes away in the middle of something: nothing of it is left behind."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import pytest
from chain import broker, lives, nests, tidy, until

from sbx import Runtime
from sbx.errors import Closed, SbxError
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy, load
from tests.tiers import rows

T = TypeVar("T")
Preloading = Callable[[str], Policy]
pytestmark = pytest.mark.needs("namespaces")
NARROWER: dict[str, dict[str, Any]] = {
    "pool": {"pool": {"max_idle": 1}},
    "fork": {"pool": {"max_idle": 0}},
    "cold": {"pool": {"start": "cold"}},
}
_STEPS_MAX = 200


async def cancelled_at(step: int, work: Coroutine[Any, Any, T]) -> T:
    """`work`, whose task is cancelled when it comes to wait for the `step`-th time."""
    task = asyncio.current_task()
    assert task is not None

    @types.coroutine
    def drive() -> Generator[Any, Any, T]:
        resume: Any = work.send
        word: Any = None
        waits = 0
        while True:
            try:
                future = resume(word)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            waits += 1
            if waits == step:
                task.cancel()
            try:
                word, resume = (yield future), work.send
            except BaseException as error:  # noqa: BLE001  # it is the work's
                word, resume = error, work.throw

    return await drive()


@pytest.mark.parametrize("path", ["pool", "fork", "cold"])
async def test_start_that_is_cancelled_at_any_wait_leaves_no_jail(
    path: str, runtime: Runtime
) -> None:
    if path != "cold":
        await runtime.warm()
    for step in range(1, _STEPS_MAX):
        async with await runtime.create(narrower=NARROWER[path]) as box:
            starting = asyncio.create_task(cancelled_at(step, box.start()))
            await asyncio.wait([starting])
            if not starting.cancelled():
                break
            if path == "pool":
                await runtime.warm()
    assert starting.result().path == path
    assert step > 1  # what is there already is not waited for
    await tidy(runtime)


async def test_create_that_is_cancelled_at_any_wait_leaves_no_sandbox(runtime: Runtime) -> None:
    for step in range(1, _STEPS_MAX):
        creating = asyncio.create_task(cancelled_at(step, runtime.create()))
        await asyncio.wait([creating])
        if not creating.cancelled():
            break
    assert step > 2
    assert runtime._sandboxes == {creating.result()}
    await creating.result().close()
    assert not runtime._sandboxes


async def test_close_while_a_zygote_starts_ends_the_start_and_the_zygote() -> None:
    async with Runtime() as runtime, asyncio.timeout(60):
        box = await runtime.create()
        starting = asyncio.create_task(box.start())
        itself = broker()
        (nest,) = await until(lambda: nests(itself))
        await runtime.close()
        assert (await _end_of(starting)) in ("served", "closed")
        assert not any(map(lives, (nest.zygote, nest.keeper, nest.monitor, itself)))


async def test_sandbox_that_is_closed_does_not_wait_for_its_start(
    runtime: Runtime, preloading: Preloading
) -> None:
    box = await runtime.create(preloading("import time\ntime.sleep(3600)"))
    starting = asyncio.create_task(box.start())
    await until(lambda: bool(runtime._broker and runtime._broker._zygotes))
    async with asyncio.timeout(60):
        await box.close()
    with pytest.raises(Closed):
        await starting


@pytest.mark.full_tier
async def test_close_while_the_pool_is_refilled_leaves_nothing() -> None:
    default = load("default")
    full = default.pool.model_copy(update={"min_idle": 4})
    async with Runtime() as runtime, asyncio.timeout(60):
        box = await runtime.create(default.model_copy(update={"pool": full}))
        await box.start()
        itself = broker()
        await until(nests(itself)[0].idle)
        below = itself.children(recursive=True)
        await runtime.close()
        assert not any(map(lives, below))


@pytest.mark.parametrize("delay_s", rows([0, 0.03, 0.3], [0.03]))
async def test_close_while_eight_starts_are_in_flight_ends_them_all(delay_s: float) -> None:
    async with Runtime() as runtime, asyncio.timeout(60):
        boxes = [await runtime.create() for _ in range(8)]
        starting = [asyncio.create_task(box.start()) for box in boxes]
        await asyncio.sleep(delay_s)
        await runtime.close()
        assert {await _end_of(one) for one in starting} <= {"served", "closed"}


async def _end_of(starting: "asyncio.Task[Receipt]") -> str:
    try:
        await starting
    except SbxError as error:
        return error.code
    return "served"
