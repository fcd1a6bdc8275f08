"""The limits per owner and in all: kernels, downloads, followers and uploads at once.

    KernelLimit    an idle kernel of the owner that has most makes room, never one of an owner below
                   an equal share. Its event has the cause, and its next run reports `state_lost`.
                   If all are busy, an owner within its share waits for one
    OwnerSlots     one request too many is refused at once
    OwnerBytes     the same for bytes in memory
    UploadSlots    an upload waits a moment for its slot

Each download, follower, stream and upload occupies a file, memory and the work of others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Literal
from weakref import WeakSet, WeakValueDictionary

from sbx.errors import Unavailable
from sbx.runtime.run.context import Context
from sbx.service.sandbox import ServiceSandbox

_RETRY_AFTER_S = 5.0
_WAIT_S = 30.0  # longer than a slow upload can keep a slot while others wait
_LOOK_S = 1.0
SlotKind = Literal["downloads", "followers", "streams"]


class RoomQueue:
    """Owners within their share that wait for room, first come, first served."""

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        self.waiting = 0
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Let the first one look for room."""
        self._freed.set()

    async def wait(self, make_room: Callable[[int], Awaitable[bool]]) -> bool:
        """Wait until `make_room` returns True. Return False if it does not in time. It gets the
        number of those that wait behind."""
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while not await make_room(self.waiting - 1):
                    self._freed.clear()
                    # A process of a user can end, or a start fail, without a call of `freed`.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._freed.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        return True


class KernelLimit:
    """`every` returns all sandboxes."""

    def __init__(
        self, limit: int, per_owner: int, every: Callable[[], Iterable[ServiceSandbox]]
    ) -> None:
        self._limit = limit
        self._per_owner = per_owner
        self._every = every
        self.queue = RoomQueue()

    async def make_room(self, owner: str) -> None:
        """Make room for a kernel of this owner, which its sandbox counts already. Those that wait
        count, too, so that no owner above its share gets their room.

        Raise Unavailable `too_many_kernels` if every other kernel is busy and the owner is above
        its share, or if none becomes idle while the owner waits.
        """
        while self._counts()[owner] > self._per_owner:
            if not await self.evict_one("kernels_max", {owner}):
                raise _full(self._per_owner)
        if await self._has_room(0):
            return
        if not may_wait(owner, self._counts(), self._limit):
            raise _full(self._limit)
        if not await self.queue.wait(self._has_room):
            raise _full(self._limit)

    async def _has_room(self, behind: int) -> bool:
        while (counts := self._counts()).total() - behind > self._limit:
            if not await self.evict_one("kernels_max", over_share(counts, self._limit)):
                return False
        return True

    async def evict_one(self, cause: str, owners: Container[str] | None = None) -> bool:
        """End an idle kernel, of these owners if given: the least recently used one of the owner
        that has most. Return False if all are busy."""
        counts = self._counts()
        for sandbox, context in self._idle(counts.keys() if owners is None else owners, counts):
            if await context.end_if_idle():
                sandbox.evicted(context, cause)
                return True
        return False

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for sandbox in self._every():
            if kernels := sandbox.kernels:
                counts[sandbox.row.owner] += kernels
        return counts

    def _idle(
        self, owners: Container[str], counts: Counter[str]
    ) -> list[tuple[ServiceSandbox, Context]]:
        """Return the idle kernels in the order in which they end; of one owner, those of sandboxes
        that are leased now come last."""
        idle = [
            (-counts[sandbox.row.owner], sandbox.users > 0, context.used_at, sandbox, context)
            for sandbox in self._every()
            if sandbox.active is not None and sandbox.row.owner in owners
            for context in sandbox.active.live
            if not context.busy
        ]
        idle.sort(key=lambda item: item[:3])
        return [(sandbox, context) for _, _, _, sandbox, context in idle]


def over_share(counts: Counter[str], limit: int) -> set[str]:
    """Return the owners that use more than an equal share of `limit`. If all together use more than
    the limit, there is one."""
    share = limit // max(1, len(counts))
    return {owner for owner, count in counts.items() if count > share}


def may_wait(owner: str, counts: Counter[str], limit: int) -> bool:
    """Return whether the owner has no more than an equal share of `limit`, with the one that it
    requests. Each may have one."""
    return counts[owner] <= max(1, limit // len(counts))


class Slot:
    """A slot in use, until `end`, or until no reference to it is left."""

    __slots__ = ("__weakref__", "_slots", "owner")

    def __init__(self, owner: str, slots: "WeakSet[Slot]") -> None:
        self.owner = owner
        self._slots = slots
        slots.add(self)

    def end(self) -> None:
        """Release the slot. A second call does nothing."""
        self._slots.discard(self)


class OwnerSlots:
    """The slots of one kind: `limit` for each owner."""

    def __init__(self, kind: SlotKind, limit: int) -> None:
        self._kind = kind
        self._limit = limit
        self._slots: WeakSet[Slot] = WeakSet()

    def take(self, owner: str) -> Slot:
        """Raise Unavailable `too_many_downloads`, `too_many_followers`, `too_many_streams`."""
        if sum(slot.owner == owner for slot in self._slots) >= self._limit:
            raise Unavailable(
                f"an owner has at most {self._limit} {self._kind} at once",
                code=f"too_many_{self._kind}",
                hint="end one of them, or read it to its end",
                details={"limit": self._limit, "retry_after_s": 1},
            )
        return Slot(owner, self._slots)


class OwnerBytes:
    """The bytes of bodies that the requests of each owner have in memory: at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: Counter[str] = Counter()

    def take(self, owner: str, size: int) -> None:
        """Raise Unavailable `too_many_bodies`."""
        if self._used[owner] + size > self._limit:
            raise Unavailable(
                f"the bodies of an owner's requests have at most {self._limit} bytes together",
                code="too_many_bodies",
                hint="wait for the replies of others, or send large files as an upload",
                details={"limit": self._limit, "retry_after_s": 1},
            )
        self._used[owner] += size

    def release(self, owner: str, size: int) -> None:
        self._used[owner] -= size
        if not self._used[owner]:
            del self._used[owner]


class UploadSlots:
    """An owner waits for its own slots first, so that its uploads do not fill the queue of all."""

    def __init__(self, limit: int, per_owner: int, wait_s: float = _WAIT_S) -> None:
        self._limit = limit
        self._per_owner = per_owner
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(limit)
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting = 0

    def awaited(self) -> bool:
        """Return whether an owner with a free slot waits for one of all."""
        return self._waiting > 0

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """Occupy a slot for a caller that may upload. Raise Unavailable `too_many_uploads`."""
        own = self._owners.get(owner)
        if own is None:
            own = self._owners[owner] = asyncio.Semaphore(self._per_owner)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    await stack.enter_async_context(own)
                    await self._enter(stack)
            except TimeoutError:
                raise Unavailable(
                    f"{self._limit} uploads are in progress, or {self._per_owner} of this owner",
                    code="too_many_uploads",
                    hint="try again when one of them has ended",
                    details={
                        "limit": self._limit,
                        "limit_per_owner": self._per_owner,
                        "retry_after_s": 5,
                    },
                ) from None
            yield

    async def _enter(self, stack: AsyncExitStack) -> None:
        self._waiting += 1
        try:
            await stack.enter_async_context(self._free)
        finally:
            self._waiting -= 1


def _full(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} kernels run, which is the limit, and none of them is idle",
        code="too_many_kernels",
        hint="wait until a run has ended, or stop a sandbox",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
