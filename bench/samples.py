"""Samples of one quantity and of its baseline, and the row they make."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Samples:
    """What was measured, taken in turn; `must` is the bound that the design sets for the p50."""

    name: str
    unit: str
    measured: Sequence[float]
    baseline: Sequence[float]
    baseline_name: str
    must: float

    def row(self) -> dict[str, Any]:
        """The JSON line of `scripts/bench --json`. `ratio`: sbx against the baseline, below 1 is
        faster."""
        p50, baseline_p50 = median(self.measured), median(self.baseline)
        return {
            "name": self.name,
            "unit": self.unit,
            "p50": round(p50, 3),
            "min": round(min(self.measured), 3),
            "p99": round(percentile(self.measured, 99), 3),
            "n": len(self.measured),
            "baseline_p50": round(baseline_p50, 3),
            "ratio": round(p50 / baseline_p50, 3),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """By the nearest rank: a value that was measured, never one in between."""
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]
