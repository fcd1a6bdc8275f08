"""Interrupt, wait a little, kill: by a clock that jumps to the next thing that is due."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from sbx.runtime.run.termination import GracefulTermination, StopReason

TIMEOUT_S, GRACE_S = 60.0, 1.0


class _Impatient(selectors.SelectSelector):
    """Where the loop would wait, time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.waiting = _Impatient()
        super().__init__(self.waiting)

    def time(self) -> float:
        return self.waiting.now


class Code:
    """A run: its frames come at given times; what is done to it is written down."""

    def __init__(self, *, ends_at: float = 1e9, heeds: str = "interrupt kill") -> None:
        self.done: list[tuple[str, float]] = []
        self._loop = asyncio.get_running_loop()
        self._heeds = heeds.split()
        self._over = asyncio.Event()
        self._loop.call_at(ends_at, self._over.set)
        self.ladder = GracefulTermination(
            TIMEOUT_S, GRACE_S, self._told("interrupt"), self._told("kill")
        )

    async def run(self) -> float:
        """When it ended."""
        await self.ladder.next(self._over.wait)
        return self._loop.time()

    def at(self, when: float, act: Callable[[], Awaitable[object]]) -> None:
        self._loop.call_at(when, lambda: self._loop.create_task(act()))  # type: ignore[arg-type]

    def _told(self, what: str) -> Callable[[], Awaitable[None]]:
        async def tell() -> None:
            self.done.append((what, round(self._loop.time(), 1)))
            if what in self._heeds:
                self._over.set()

        return tell


async def busy(code: Code, each_s: float) -> None:
    """Frames that are there at once, each of which takes its reader so long."""
    while not code._over.is_set():
        await code.ladder.next(_nothing, at_once=True)
        await asyncio.sleep(each_s)
        await code.ladder.check_deadline()


async def _nothing() -> None:
    pass


@pytest.fixture
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    loop = _Loop()
    yield loop.run_until_complete
    loop.close()


def test_a_run_that_ends_in_time_is_left_alone(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code(ends_at=59)
        assert await code.run() == 59
        return code

    code = run(story())
    assert (code.done, code.ladder.why) == ([], None)


def test_at_its_deadline_it_is_interrupted_and_not_killed(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code()
        await code.run()
        return code

    code = run(story())
    assert (code.done, code.ladder.why) == ([("interrupt", 60.0)], StopReason.DEADLINE)
    assert not code.ladder.killed


def test_code_that_ignores_the_interrupt_is_killed_after_the_grace(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code(heeds="kill")
        await code.run()
        return code

    code = run(story())
    assert (code.done, code.ladder.killed) == ([("interrupt", 60.0), ("kill", 61.0)], True)


def test_a_run_that_outlives_its_kill_is_given_up(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code(heeds="")
        with pytest.raises(TimeoutError, match="outlived"):
            await code.run()
        return code

    assert run(story()).done == [("interrupt", 60.0), ("kill", 61.0)]


def test_too_much_output_starts_the_ladder_at_once(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code(heeds="kill")
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await code.run()
        await code.ladder.stop(StopReason.OUTPUT)
        await code.run()
        return code

    code = run(story())
    assert (code.done, code.ladder.why) == ([("interrupt", 5.0), ("kill", 6.0)], StopReason.OUTPUT)


def test_a_caller_s_interrupt_may_be_ignored_until_the_deadline(run: Callable[..., Any]) -> None:
    """As in Jupyter; and a second one is another interrupt. What ends it then is its time."""

    async def story() -> Code:
        code = Code(heeds="kill")
        for when in (10, 20):
            code.at(when, lambda: code.ladder.stop(StopReason.CALLER))
        await code.run()
        return code

    code = run(story())
    interrupts = [("interrupt", when) for when in (10.0, 20.0, 60.0)]
    assert (code.done, code.ladder.why) == ([*interrupts, ("kill", 61.0)], StopReason.DEADLINE)


def test_the_first_lasting_reason_counts(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code(heeds="")
        await code.ladder.stop(StopReason.OUTPUT)
        await code.ladder.stop(StopReason.DEADLINE)
        await code.ladder.stop(StopReason.CALLER)
        return code

    code = run(story())
    assert (len(code.done), code.ladder.why) == (1, StopReason.OUTPUT)


def test_a_time_out_of_the_code_s_own_is_not_ours(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code()

        async def following() -> None:
            raise TimeoutError("from within")

        with pytest.raises(TimeoutError, match="from within"):
            await code.ladder.next(following)
        return code

    assert run(story()).done == []


def test_what_is_there_at_once_is_taken_without_a_timer(run: Callable[..., Any]) -> None:
    async def story() -> Code:
        code = Code()
        asyncio.get_running_loop().call_at = None  # type: ignore[method-assign,assignment]
        assert await code.ladder.next(lambda: asyncio.sleep(0, "there"), at_once=True) == "there"
        return code

    assert run(story()).done == []


@pytest.mark.parametrize("each_s", [0.5, 7.0])
def test_a_reader_who_is_kept_elsewhere_minds_the_time(
    run: Callable[..., Any], each_s: float
) -> None:
    """The deadline was looked at only by who waited for a frame."""

    async def story() -> Code:
        code = Code(heeds="kill")
        await busy(code, each_s)
        return code

    code = run(story())
    (first, at), (second, later) = code.done
    assert (first, second, code.ladder.why) == ("interrupt", "kill", StopReason.DEADLINE)
    assert (at - TIMEOUT_S < each_s, later - at - GRACE_S < each_s) == (True, True)


def test_a_run_is_hurried_from_half_of_its_grace_on(run: Callable[..., Any]) -> None:
    async def story() -> list[bool]:
        code = Code(heeds="")
        seen = [code.ladder.deadline_near]
        await code.ladder.stop(StopReason.CALLER)
        seen.append(code.ladder.deadline_near)
        await code.ladder.stop(StopReason.OUTPUT)
        seen.append(code.ladder.deadline_near)
        await asyncio.sleep(GRACE_S / 2)
        return [*seen, code.ladder.deadline_near]

    assert run(story()) == [False, False, False, True]
