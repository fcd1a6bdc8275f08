"""Slots: how many downloads, followers and uploads an owner may have at once.

Each of them occupies a file, memory and the work of others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal
from weakref import WeakSet, WeakValueDictionary

from starlette.requests import HTTPConnection

from sbx.api.middleware import HURRY
from sbx.api.server.settings import ServiceSettings
from sbx.errors import Unavailable
from sbx.service.caller import Caller

Kind = Literal["downloads", "followers"]
_WAIT_S = 30.0  # longer than a slow upload can keep a slot while others wait


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

    def __init__(self, kind: Kind, limit: int) -> None:
        self._kind = kind
        self._limit = limit
        self._slots: WeakSet[Slot] = WeakSet()

    def take(self, owner: str) -> Slot:
        """Raise Unavailable `too_many_downloads`, `too_many_followers`."""
        if sum(slot.owner == owner for slot in self._slots) >= self._limit:
            raise Unavailable(
                f"an owner has at most {self._limit} {self._kind} at once",
                code=f"too_many_{self._kind}",
                hint="end one of them, or read it to its end",
                details={"limit": self._limit, "retry_after_s": 1},
            )
        return Slot(owner, self._slots)


class UploadSlots:
    """The slots for uploads, in all and per owner. An upload waits a moment for its slot.

    An owner waits for its own slots first, so that its uploads do not fill the queue of all.
    """

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


class _Slots:
    """The slots of an app."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.uploads = UploadSlots(settings.uploads_at_once, settings.uploads_per_owner)
        self.others: dict[Kind, OwnerSlots] = {
            "downloads": OwnerSlots("downloads", settings.downloads_per_owner),
            "followers": OwnerSlots("followers", settings.followers_per_owner),
        }


def take_slot(request: HTTPConnection, kind: Kind) -> Slot | None:
    """Take a slot for the caller; None if the app has no service, and so no caller. Raise as
    `OwnerSlots.take`."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return None if caller is None else _slots(request).others[kind].take(caller.owner)


@asynccontextmanager
async def upload_slot(request: HTTPConnection, caller: Caller) -> AsyncIterator[None]:
    """Occupy an upload slot for the body of `request`, which must come faster while others wait.
    Check first that the caller may send it. Raise as `UploadSlots.take`."""
    uploads = _slots(request).uploads
    async with uploads.take(caller.owner):
        hurry: Callable[[], bool] = uploads.awaited
        request.scope["state"][HURRY] = hurry
        yield


def _slots(request: HTTPConnection) -> _Slots:
    state = request.app.state
    if not hasattr(state, "slots"):
        state.slots = _Slots(state.settings)
    slots: _Slots = state.slots
    return slots
