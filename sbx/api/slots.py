"""The slots of an app: how many downloads, followers, streams and uploads an owner may have at
once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import HTTPConnection

from sbx.api.middleware import HURRY
from sbx.api.server.settings import ServiceSettings
from sbx.service.caller import Caller
from sbx.service.limits import OwnerSlots, Slot, SlotKind, UploadSlots


class _Slots:
    """The slots of an app."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.uploads = UploadSlots(settings.uploads_at_once, settings.uploads_per_owner)
        self.others: dict[SlotKind, OwnerSlots] = {
            "downloads": OwnerSlots("downloads", settings.downloads_per_owner),
            "followers": OwnerSlots("followers", settings.followers_per_owner),
            "streams": OwnerSlots("streams", settings.streams_per_owner),
        }


def take_slot(request: HTTPConnection, kind: SlotKind) -> Slot | None:
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
        request.scope["state"][HURRY] = uploads.awaited
        yield


def _slots(request: HTTPConnection) -> _Slots:
    state = request.app.state
    if not hasattr(state, "slots"):
        state.slots = _Slots(state.settings)
    slots: _Slots = state.slots
    return slots
