"""The row that samples make, and the order in which sample and baseline are taken."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from bench.at_once import at_once
from bench.samples import Bench, Progress, Samples, compared, figure, in_turn, percentile


def row(
    measured: Sequence[float],
    baseline: Sequence[float] = (10.0,),
    *,
    must: float | None = 5.0,
    better: Literal["lower", "higher"] = "lower",
    also: dict[str, float] | None = None,
    also_unit: str = "",
    usual: float | None = None,
    ratio_max: float | None = None,
) -> dict[str, Any]:
    async def measure(rounds: int, progress: Progress) -> Samples:
        raise AssertionError("a row is made of what was measured")

    bench = Bench(
        *("name", "ms", must, measure),
        rounds=1,
        better=better,
        usual=usual,
        ratio_max=ratio_max,
    )
    return bench.row(Samples(measured, baseline, "what people have", also or {}, also_unit))


def test_row_has_every_figure_under_its_own_name() -> None:
    assert row([3.0, 1.0, 2.0], [20.0, 10.0, 40.0], also={"bwrap": 1.23456}) == {
        "name": "name",
        "unit": "ms",
        "better": "lower",
        "p50": 2.0,
        "min": 1.0,
        "p99": 3.0,
        "n": 3,
        "must": 5.0,
        "ratio_max": None,
        "met": True,
        "scaled_p50": None,
        "scaled_met": None,
        "baseline": "what people have",
        "baseline_p50": 20.0,
        "ratio": 0.1,
        "also": {"bwrap": 1.235},
        "also_unit": "ms",
    }


@pytest.mark.parametrize(
    ("better", "p50", "met"),
    [
        ("lower", 5.0, True),
        ("lower", 5.1, False),
        ("higher", 4.9, False),
        ("higher", 5.0, True),
    ],
)
def test_must_is_met_from_the_side_that_is_good(
    better: Literal["lower", "higher"], p50: float, met: bool
) -> None:
    assert row([p50], must=5.0, better=better)["met"] is met


@pytest.mark.parametrize(("p50", "met"), [(30.0, True), (30.1, False)])
def test_ratio_to_the_baseline_may_be_the_bound(p50: float, met: bool) -> None:
    assert row([p50], must=None, ratio_max=3.0)["met"] is met


def test_further_figures_may_have_another_unit() -> None:
    assert row([1.0], also={"p99": 3.0}, also_unit="s")["also_unit"] == "s"


def test_must_is_judged_by_what_was_measured_and_not_by_what_is_printed() -> None:
    assert row([5.0004], must=5.0)["p50"] == 5.0
    assert row([5.0004], must=5.0)["met"] is False


def test_comparison_says_better_whichever_way_is_good() -> None:
    assert compared(row([2.0], [10.0])) == "5 times better"
    assert compared(row([10.0], [2.0])) == "5 times worse"
    assert compared(row([60.0], [4.0], better="higher")) == "15 times better"
    assert compared(row([4.0], [60.0], better="higher")) == "15 times worse"


def test_figures_are_read_without_an_exponent() -> None:
    assert [figure(value) for value in (0.01234, 1.5, 999.0, 2131.4)] == [
        "0.0123",
        "1.5",
        "999",
        "2131",
    ]


def test_ratio_of_a_tiny_share_does_not_vanish() -> None:
    assert row([0.25], [1000.0])["ratio"] == 0.00025


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 201)]
    assert percentile(values, 99) == 198.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([2.0, 1.0], 50) == 1.0


async def test_baseline_is_taken_in_turn_and_as_seldom_as_asked() -> None:
    taken: list[str] = []
    answer: list[tuple[int, int]] = []

    async def sample() -> float:
        taken.append("sample")
        return 1.0

    async def baseline() -> float:
        taken.append("baseline")
        return 2.0

    found = await in_turn(4, sample, baseline, lambda *progress: answer.append(progress), every=3)
    assert found == ([1.0] * 4, [2.0] * 2)
    assert taken == ["sample", "baseline", "sample", "sample", "sample", "baseline"]
    assert answer == [(1, 4), (2, 4), (3, 4), (4, 4)]


async def test_no_more_than_asked_run_at_a_time() -> None:
    running = most = 0

    async def act() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    assert await at_once(7, act, most=3) == [None] * 7
    assert (most, running) == (3, 0)


async def test_the_first_that_fails_ends_the_others_before_it_is_raised() -> None:
    ended: list[str] = []
    begun = 0

    async def act() -> None:
        nonlocal begun
        begun += 1
        try:
            if begun == 3:
                raise LookupError
            await asyncio.Event().wait()
        finally:
            ended.append("one")

    with pytest.raises(LookupError):
        await at_once(3, act)
    assert ended == ["one"] * 3


def test_a_row_is_told_at_the_speed_of_the_machine_that_its_bound_was_set_on() -> None:
    """Half as fast a machine, by its baseline: half the p50, and that is within the bound."""
    slow = row([6.0], [20.0], must=5.0, usual=10.0)
    assert (slow["met"], slow["scaled_p50"], slow["scaled_met"]) == (False, 3.0, True)
    rate = row([30.0], [5.0], must=50.0, better="higher", usual=10.0)
    assert (rate["met"], rate["scaled_p50"], rate["scaled_met"]) == (False, 60.0, True)
    bad = row([12.0], [20.0], must=5.0, usual=10.0)
    assert (bad["scaled_p50"], bad["scaled_met"]) == (6.0, False)
