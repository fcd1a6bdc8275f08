"""How many of one kind an owner may hold at once: each holds a file, memory and work of others."""

from typing import Literal
from weakref import WeakSet

from starlette.requests import HTTPConnection

from sbx.api.server.settings import ServiceSettings
from sbx.errors import Unavailable
from sbx.service.auth import Caller

Kind = Literal["downloads", "followers"]


class Slot:
    """One that is held: until `end`, or until nobody has it any more."""

    __slots__ = ("__weakref__", "_held", "owner")

    def __init__(self, owner: str, held: "WeakSet[Slot]") -> None:
        self.owner = owner
        self._held = held
        held.add(self)

    def end(self) -> None:
        """A second time does nothing."""
        self._held.discard(self)


class OwnerSlots:
    """The ones of one kind."""

    def __init__(self, kind: Kind, most: int) -> None:
        self._kind = kind
        self._most = most
        self._held: WeakSet[Slot] = WeakSet()

    def take(self, owner: str) -> Slot:
        """Raises Unavailable `too_many_downloads`, `too_many_followers`."""
        if sum(one.owner == owner for one in self._held) >= self._most:
            raise Unavailable(
                f"an owner has at most {self._most} {self._kind} at once",
                code=f"too_many_{self._kind}",
                hint="end one of them, or read it to its end",
                details={"limit": self._most, "retry_after_s": 1},
            )
        return Slot(owner, self._held)


def share(request: HTTPConnection, kind: Kind) -> Slot | None:
    """One of the caller's; None where nobody is known, as on an app without a service. Raises as
    `OwnerSlots.take`."""
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        return None
    state = request.app.state
    if not hasattr(state, "shares"):
        settings: ServiceSettings = state.settings
        state.shares = {
            "downloads": OwnerSlots("downloads", settings.downloads_per_owner),
            "followers": OwnerSlots("followers", settings.followers_per_owner),
        }
    found: dict[Kind, OwnerSlots] = state.shares
    return found[kind].take(caller.owner)
