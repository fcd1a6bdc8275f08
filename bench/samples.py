"""A row of the table: what is measured and against which bound, and what came out."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Progress = Callable[[int, int], None]


class NotMeasured(Exception):
    """The row could not be measured as its name says; the message tells why."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What came out, in the row's unit. `also` are further figures that explain it, in `also_unit`
    if that is another unit."""

    measured: Sequence[float]
    baseline: Sequence[float]
    baseline_name: str
    also: Mapping[str, float] = field(default_factory=dict)
    also_unit: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """One row. `must` is the bound that is set for the p50, from the side of `better`; None where
    the figure is to be read beside its baseline.

    `usual` is the baseline's p50 on the machine that `must` was set on (the lower end of what was
    measured there). These machines are shared and of different speed, so a row also tells its p50
    at that machine's speed: the ratio of this run times `usual`. None where the speed of the
    machine is not what decides.

    `measure(rounds, progress)` raises NotMeasured. Without `quick_rounds` the row is left out of a
    quick run, unless it is named.
    """

    name: str
    unit: str
    must: float | None
    measure: Callable[[int, Progress], Awaitable[Samples]]
    rounds: int
    quick_rounds: int | None = None
    better: Literal["lower", "higher"] = "lower"
    usual: float | None = None
    ratio_max: float | None = None  # a bound of `ratio`, where the baseline is the limit

    def row(self, samples: Samples) -> dict[str, Any]:
        """The JSON line of `scripts/bench --json`.

        `ratio` is the p50 divided by the baseline's, so it is good below 1 where lower is better
        and above 1 where higher is.
        """
        p50, baseline_p50 = median(samples.measured), median(samples.baseline)
        ratio = float(f"{p50 / baseline_p50:.3g}")
        scaled = None if self.usual is None else p50 / baseline_p50 * self.usual
        return {
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "p50": round(p50, 3),
            "min": round(min(samples.measured), 3),
            "p99": round(percentile(samples.measured, 99), 3),
            "n": len(samples.measured),
            "must": self.must,
            "ratio_max": self.ratio_max,
            "met": self._met(p50) and (self.ratio_max is None or ratio <= self.ratio_max),
            "scaled_p50": scaled and round(scaled, 3),
            "scaled_met": scaled and self._met(scaled),
            "baseline": samples.baseline_name,
            "baseline_p50": round(baseline_p50, 3),
            "ratio": ratio,
            "also": {name: round(value, 3) for name, value in samples.also.items()},
            "also_unit": samples.also_unit or self.unit,
        }

    def _met(self, p50: float) -> bool:
        if self.must is None:
            return True
        return p50 <= self.must if self.better == "lower" else p50 >= self.must


def compared(row: Mapping[str, Any]) -> str:
    """How many times better or worse than the baseline, whichever way is good."""
    gain = row["ratio"] if row["better"] == "higher" else 1 / row["ratio"]
    if gain >= 1:
        return f"{figure(gain)} times better"
    return f"{figure(1 / gain)} times worse"


def figure(value: float) -> str:
    """Three significant digits, never with an exponent."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """By the nearest rank: a value that was measured, never one in between."""
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


async def in_turn(
    rounds: int,
    sample: Callable[[], Awaitable[float]],
    baseline: Callable[[], Awaitable[float]],
    progress: Progress,
    *,
    every: int = 1,
) -> tuple[list[float], list[float]]:
    """`rounds` samples, with a baseline after every `every`th of them, from the first on."""
    measured, compared = [], []
    for number in range(rounds):
        measured.append(await sample())
        if number % every == 0:
            compared.append(await baseline())
        progress(number + 1, rounds)
    return measured, compared
