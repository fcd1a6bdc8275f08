"""When a process that answers nothing counts as silent."""

import asyncio
from collections.abc import Callable

import pytest

from sbx.isolation.broker import pulse
from sbx.isolation.broker.pulse import Pulse, Silence, answered, unanswered


def test_two_requests_in_a_row_without_an_answer_are_silence() -> None:
    first = unanswered(answered(100.0), 110.0, 120.0)
    assert first == Silence(1, 120.0)
    assert not first.is_over_limit
    second = unanswered(first, 120.0, 130.0)
    assert second == Silence(2, 130.0)
    assert second.is_over_limit


def test_requests_that_waited_at_the_same_time_count_once() -> None:
    first = unanswered(answered(100.0), 101.0, 131.0)
    assert unanswered(first, 105.0, 135.0) == first


def test_a_request_counts_for_nothing_if_anything_came_meanwhile() -> None:
    silence = answered(115.0)
    assert unanswered(silence, 110.0, 120.0) == Silence(0, 115.0)


def test_an_answer_begins_the_count_again() -> None:
    assert unanswered(answered(100.0), 100.0, 110.0).unanswered == 1
    assert answered(111.0) == Silence(0, 111.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY_S", 0.01)
    monkeypatch.setattr(pulse, "ANSWER_S", 0.05)


async def _until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  # a test's own condition
            await asyncio.sleep(0.005)


async def test_a_process_that_never_answers_is_given_up_once() -> None:
    given_up: list[str] = []
    never = asyncio.Event()
    watched = Pulse(never.wait, lambda: given_up.append("silent"))
    watched.start()
    await _until(lambda: given_up)
    watched.unanswered(asyncio.get_running_loop().time())
    assert given_up == ["silent"]


async def test_a_process_that_answers_late_once_is_not_given_up() -> None:
    given_up: list[str] = []
    silent, pings = asyncio.Event(), 0

    async def ping() -> None:
        nonlocal pings
        pings += 1
        if pings == 1:
            await silent.wait()
        else:
            watched.answered()

    watched = Pulse(ping, lambda: given_up.append("silent"))
    watched.start()
    await _until(lambda: pings == 10)
    assert watched._silence.unanswered == 0
    assert not given_up
    watched.stop()


async def test_a_ping_that_fails_is_an_answer() -> None:
    given_up: list[str] = []
    pings = 0

    async def ping() -> None:
        nonlocal pings
        pings += 1
        raise OSError

    watched = Pulse(ping, lambda: given_up.append("silent"))
    watched.start()
    await _until(lambda: pings == 10)
    assert not given_up
    watched.stop()
