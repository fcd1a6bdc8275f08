"""How memory and descriptors of the service grow, for each of its lives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from bench.torture.ledger import Sample

_HOUR_S = 3600.0
_WARM_UP_S = 60.0  # caches and the heap fill in the first minute
_MOST_POINTS = 400  # the number of pairs grows with its square


@dataclass(frozen=True, slots=True)
class Growth:
    """One life. Slopes per hour, None for a life that was too short; maxima over all of it."""

    pid: int
    seconds: float
    rss_mib_per_hour: float | None
    fds_per_hour: float | None
    rss_mib_max: float
    fds_max: int


def growth(samples: Iterable[Sample], *, least_s: float) -> list[Growth]:
    """Each life in the order of their begin; slopes of those that lasted `least_s` and longer."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    return [_of(pid, life, least_s) for pid, life in lives.items()]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the median of the slopes of all pairs (Theil and Sen), which single peaks do not move;
    None with fewer than two points."""
    step = max(1, len(points) // _MOST_POINTS)
    pairs = combinations(points[::step], 2)
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x1 != x2]
    return median(slopes) if slopes else None


def _of(pid: int, life: Sequence[Sample], least_s: float) -> Growth:
    began, seconds = life[0].at, life[-1].at - life[0].at
    is_long = seconds >= least_s
    warm = [sample for sample in life if is_long and sample.at - began >= _WARM_UP_S]
    return Growth(
        pid=pid,
        seconds=round(seconds, 1),
        rss_mib_per_hour=_per_hour([(sample.at, sample.rss_kib / 1024) for sample in warm]),
        fds_per_hour=_per_hour([(sample.at, float(sample.fds)) for sample in warm]),
        rss_mib_max=round(max(sample.rss_kib for sample in life) / 1024, 1),
        fds_max=max(sample.fds for sample in life),
    )


def _per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    per_second = slope(points)
    return None if per_second is None else round(per_second * _HOUR_S, 2)
