"""Decide: how many kernels to keep ready, and which zygotes have served their time.

Pure: plain values in, plain values out. `Pool`, `Lineage` and `Starter` hold the values and act.
Times are seconds of one clock, whichever it is; memory is bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

TICK_S = 10.0  # how often anything here is looked at; nothing is when nothing is kept
QUIET_S = 60.0
UNUSED_S = 600.0
LEFT_ALONE_S = 30.0
_FORKS_MAX = 1_000
_AGE_MAX_S = 3_600.0
_GROWTH_MAX = 64 << 20
_SETTLED_S = 60.0
_DELAY_MAX_S = 300.0
_SHORT = 0.05
_ENOUGH = 0.10
_STALLED_PER_CENT = 10.0


# --- a pool ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked of one pool lately.

    `target` is how many kernels to keep. `spare` is the smallest number that was left over since
    `since`: so many were kept for nobody. `filled`: the target was reached once, so that a miss
    means that it is too low, and not that the pool is new.
    """

    target: int
    spare: int
    since: float
    filled: bool = False


def taken(demand: Demand, left: int) -> Demand:
    """A kernel was taken, and `left` remain."""
    return replace(demand, spare=min(demand.spare, left))


def missed(demand: Demand, least: int, most: int) -> Demand:
    """Somebody came and none was there. The first who comes begins the use of the pool."""
    target = min(most, demand.target + 1) if demand.filled else max(least, demand.target)
    return replace(demand, target=target, spare=0)


def settled(demand: Demand, parked: int, least: int, now: float) -> Demand:
    """After a quiet time: as many less as nobody wanted in it, and never more."""
    if now - demand.since < QUIET_S:
        return demand
    target = max(min(least, demand.target), demand.target - demand.spare)
    return replace(demand, target=target, spare=min(parked, target), since=now)


# --- a zygote -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wear:
    """What one zygote has been through. `grown` is the memory it took since its start."""

    age_s: float
    forks: int
    grown: int


def worn(wear: Wear) -> str:
    """Why another zygote should take over; empty while this one serves well.

    Kernels of one zygote share its address layout and its hash seed, because a fork copies both.
    A new zygote draws them anew: what one kernel learnt of them serves nobody for long.
    """
    if wear.forks >= _FORKS_MAX:
        return f"it has forked {wear.forks} kernels"
    if wear.age_s >= _AGE_MAX_S:
        return f"it is {wear.age_s:.0f} s old"
    if wear.grown >= _GROWTH_MAX:
        return f"it has grown by {wear.grown >> 20} MiB"
    return ""


def delay(failures: int) -> float:
    """How long a zygote is not started, or not asked, after so many failures in a row."""
    return 0.0 if failures == 0 else min(_DELAY_MAX_S, 2.0 ** min(failures - 1, 16))


def failures_after(failures: int, lived_s: float) -> int:
    """The count after one more failure. A zygote that served for a while has made up for those
    before it, and for its own: another one is started at once."""
    return 0 if lived_s >= _SETTLED_S else failures + 1


def least_used(pools: Iterable[tuple[float, bool]]) -> int | None:
    """Which of the pools, as (for how long it was not used, whether it is busy now), makes room for
    another one; None when all are needed.

    One that was used just now is needed: where more policies take turns than there are zygotes,
    each would otherwise end the zygote that is wanted next.
    """
    free = [
        (unused_s, -index)
        for index, (unused_s, busy) in enumerate(pools)
        if unused_s >= LEFT_ALONE_S and not busy
    ]
    return -max(free)[1] if free else None


# --- the host -------------------------------------------------------------------------------------


def short_of_memory(available: int, total: int, stalled: float, *, was_short: bool) -> bool:
    """Whether to keep nothing ready. Two levels, so that what giving memory back frees is not
    taken again at once. `stalled` in per cent of time, of PSI."""
    level = _ENOUGH if was_short else _SHORT
    return available < total * level or stalled > _STALLED_PER_CENT
