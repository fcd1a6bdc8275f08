"""Decide how many kernels to keep ready, and which zygotes to replace.

Pure: plain values in, plain values out. `Pool`, `ZygoteGroup` and `KernelFactory` hold the values
and act. Times are seconds of any one clock; memory is bytes.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

TICK_S = 10.0  # the period of all checks here; they stop while nothing is kept
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


class PoolDemand(Struct, frozen=True):
    """The recent demand for kernels of one pool.

    `target` is the number of kernels to keep. `spare` is the smallest number of kernels left over
    since `since`: they were not needed. `filled` is true once the target was reached. A miss
    then means that the target is too low, and not that the pool is new.
    """

    target: int
    spare: int
    since: float
    filled: bool = False


def taken(demand: PoolDemand, remaining: int) -> PoolDemand:
    """Return the demand after a kernel was taken and `remaining` are left."""
    return replace(demand, spare=min(demand.spare, remaining))


def missed(demand: PoolDemand, least: int, most: int) -> PoolDemand:
    """Return the demand after a request that found no kernel. The first one fills the pool."""
    target = min(most, demand.target + 1) if demand.filled else max(least, demand.target)
    return replace(demand, target=target, spare=0)


def settled(demand: PoolDemand, idle: int, least: int, now: float) -> PoolDemand:
    """Return the demand after a quiet time: lower the target by the spare kernels."""
    if now - demand.since < QUIET_S:
        return demand
    target = max(min(least, demand.target), demand.target - demand.spare)
    return replace(demand, target=target, spare=min(idle, target), since=now)


# --- a zygote -------------------------------------------------------------------------------------


class ZygoteAge(Struct, frozen=True):
    """The age and use of one zygote. `grown` is the memory that it took since its start."""

    age_s: float
    forks: int
    grown: int


def needs_replacing(wear: ZygoteAge) -> str:
    """Return why another zygote should take over, or "" while this one serves well.

    Kernels of one zygote share its address layout and its hash seed, because a fork copies both.
    A new zygote draws new ones, so knowledge that an attacker gains in one kernel soon expires.
    """
    if wear.forks >= _FORKS_MAX:
        return f"it has forked {wear.forks} kernels"
    if wear.age_s >= _AGE_MAX_S:
        return f"it is {wear.age_s:.0f} s old"
    if wear.grown >= _GROWTH_MAX:
        return f"it has grown by {wear.grown >> 20} MiB"
    return ""


def delay(failures: int) -> float:
    """Return for how long to start no zygote after this many failures in a row."""
    return 0.0 if failures == 0 else min(_DELAY_MAX_S, 2.0 ** min(failures - 1, 16))


def failures_after(failures: int, lived_s: float) -> int:
    """Return the count after one more failure.

    A zygote that served for a while resets the count, its own failure included: the next one is
    started at once.
    """
    return 0 if lived_s >= _SETTLED_S else failures + 1


def least_used(pools: Iterable[tuple[float, bool]]) -> int | None:
    """Return the index of the pool that makes room for another one, or None if all are needed.

    Each pool is a pair: the seconds since its last use, and whether it is busy now. A pool that was
    used just now is needed: if more policies take turns than there are zygotes, each would
    otherwise end the zygote that is needed next.
    """
    free = [
        (unused_s, -index)
        for index, (unused_s, busy) in enumerate(pools)
        if unused_s >= LEFT_ALONE_S and not busy
    ]
    return -max(free)[1] if free else None


# --- the host -------------------------------------------------------------------------------------


def short_of_memory(available: int, total: int, stalled: float, *, was_short: bool) -> bool:
    """Return whether to keep nothing ready.

    There are two levels, so that freed memory is not taken again at once. `stalled` is the per cent
    of time from PSI.
    """
    level = _ENOUGH if was_short else _SHORT
    return available < total * level or stalled > _STALLED_PER_CENT
