"""One budget of frames for all channels of one owner.

The event loop reads the frames of every kernel. `Channel` limits each kernel, but an owner may have
many. A budget limits all channels of one owner together to about a third of the event loop. When
it is used up, the channels that send more than half of the average stop being read. They continue
one after the other, the one that sent least lately first. A kernel that sends little is never held
back, also when its neighbours flood.

    spend    record the frames that a channel has read
    leave    forget a channel that is closed
"""

import asyncio
from typing import Protocol
from weakref import WeakValueDictionary

UNITS_PER_S = 10_000.0  # a small frame is one unit, and takes about 33 µs
BURST = 1_000.0
_BUSY = 100.0  # units, above which a channel counts as busy
_BUSY_PER_S = UNITS_PER_S / 16  # of one channel, above which it becomes busy
_TICK_S = 0.005


class BudgetReader(Protocol):
    """The part of a Channel that a budget uses."""

    def hold_back(self) -> None: ...
    def release(self) -> None: ...


class Level:
    """Units that drain at a rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._units = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """Return the units that are left now."""
        self._units = max(0.0, self._units - (now - self._at) * self._per_s)
        self._at = now
        return self._units

    def add(self, units: float, now: float) -> None:
        self._units = self.at(now) + units


class FrameBudget:
    """See the module. Belongs to reader event loop."""

    def __init__(self) -> None:
        self._all = Level(UNITS_PER_S)
        self._each: dict[BudgetReader, Level] = {}
        self._paused: set[BudgetReader] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used_up(self) -> bool:
        """Return whether busy channels are held back, or would be."""
        return self._all.at(asyncio.get_running_loop().time()) > BURST

    @property
    def paused_count(self) -> int:
        """Return how many channels the host does not read now."""
        return len(self._paused)

    def spend(self, reader: BudgetReader, units: float) -> None:
        """Record frames. Hold back the busy channels when the budget is used up."""
        now = asyncio.get_running_loop().time()
        level = self._each.get(reader)
        if level is None:
            level = self._each[reader] = Level(_BUSY_PER_S)
        level.add(units, now)
        self._all.add(units, now)
        if self.used_up:
            self._hold_back(now)

    def leave(self, reader: BudgetReader) -> None:
        """Forget a channel. It is not let go."""
        self._each.pop(reader, None)
        self._paused.discard(reader)

    def _hold_back(self, now: float) -> None:
        fair = self._fair(now)
        for reader, level in self._each.items():
            if reader not in self._paused and level.at(now) > fair:
                self._paused.add(reader)
                reader.hold_back()
        self._tick_later(now)

    def _fair(self, now: float) -> float:
        """Return the level up to which a channel is not held back."""
        levels = [units for level in self._each.values() if (units := level.at(now)) > 0]
        return max(_BUSY, sum(levels) / len(levels) / 2) if levels else _BUSY

    def _tick_later(self, now: float) -> None:
        if self._paused and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(now + _TICK_S, self._tick)

    def _tick(self) -> None:
        """Let the next channel be read. It is held back again by its own frames."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        fair = self._fair(now)
        ready = {reader for reader in self._paused if self._each[reader].at(now) <= fair}
        if self._paused and self._all.at(now) <= BURST:
            ready.add(min(self._paused, key=lambda reader: self._each[reader].at(now)))
        for reader in ready:
            self._paused.discard(reader)
            reader.release()
        self._tick_later(now)


class FrameBudgets:
    """The budgets of a service, by owner. A budget lives as long as a sandbox refers to it."""

    def __init__(self) -> None:
        self._budgets: WeakValueDictionary[str, FrameBudget] = WeakValueDictionary()

    def of(self, owner: str) -> FrameBudget:
        """Return the budget of this owner."""
        return self._budgets.setdefault(owner, FrameBudget())
