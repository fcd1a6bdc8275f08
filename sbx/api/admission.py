"""Admission of connections: counted per listener, decided by `decide`.

TCP and the Unix socket have `connections_max` places each, so that neither can take those of the
other. A TCP connection is unauthenticated until a request on it carries a valid key or token, and
again after a request without one. If the places of these are taken when a new connection comes, the
oldest of them is closed in any case: a client with a key needs such a place only until its request
is authenticated, and an attacker cannot keep one. When all places are taken by clients with a key,
the one that has made no request for longest is closed. An owner has at most a quarter of the places
over TCP, for all its keys and tokens: beyond it, its own idle connections are closed, and then its
requests are refused. So no owner shuts out the others. Of the Unix socket's places some are for the
operator (root and the user of the service), and no other user has more than half.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address

from msgspec import Struct
from uvicorn.server import ServerState

from sbx.aio import kept_with
from sbx.errors import SbxError, Unavailable

# In the extensions of a scope: the place of the connection, and a function that closes it after
# the data that was sent.
PLACE, CLOSE = "sbx.place", "sbx.close"
OWNER_SHARE = 4  # an owner has at most one of so many places over TCP
_FOR_OPERATORS = 16
_PREFIX = 64  # bits of an IPv6 address: one client chooses the others as it likes


class AdmissionDecision(StrEnum):
    """The decision about a new connection. REPLACE…: admit it, and close the oldest unauthenticated
    connection, of all or of the same address, or the authenticated one that is idle for longest."""

    ADMIT = "admit"
    REPLACE = "replace"
    REPLACE_OF_ADDRESS = "replace_of_address"
    REPLACE_IDLE = "replace_idle"
    REFUSE = "refuse"


class TcpOpen(Struct, frozen=True):
    """The open TCP connections when a new one comes. `of_address`: the unauthenticated ones of its
    address; 0 for loopback, where a reverse proxy connects for all clients. `idle`: the
    authenticated ones without a request."""

    connections: int = 0
    unauthenticated: int = 0
    of_address: int = 0
    idle: int = 0


class UnixOpen(Struct, frozen=True):
    """The open connections of the Unix socket when a new one comes. `others`: those of all users
    except operators; `of_user`: those of the user of the new one; `operator`: whether it is one."""

    operator: bool
    connections: int = 0
    others: int = 0
    of_user: int = 0


def decide(counts: TcpOpen | UnixOpen, limit: int) -> AdmissionDecision:
    """Decide about a new connection of a listener with `limit` places."""
    if isinstance(counts, UnixOpen):
        full = counts.connections >= limit
        if not counts.operator:
            full = (
                full
                or counts.others >= limit - min(_FOR_OPERATORS, limit // 2)
                or counts.of_user >= max(1, limit // 2)
            )
        return AdmissionDecision.REFUSE if full else AdmissionDecision.ADMIT
    if counts.of_address >= max(1, limit // 4):
        return AdmissionDecision.REPLACE_OF_ADDRESS
    full = counts.connections >= limit
    if counts.unauthenticated >= max(1, limit // 2) or (full and counts.unauthenticated):
        return AdmissionDecision.REPLACE
    if full:
        return AdmissionDecision.REPLACE_IDLE if counts.idle else AdmissionDecision.REFUSE
    return AdmissionDecision.ADMIT


class AdmissionPlace:
    """The place of one connection. `refused`: it stays open only until it has its 503."""

    __slots__ = ("_admission", "_authenticated", "address", "close", "owner", "refused", "user")

    def __init__(
        self,
        admission: "Admission",
        close: Callable[[], None],
        *,
        user: int | None = None,
        address: str | None = None,
        refused: bool = False,
    ) -> None:
        self._admission = admission
        self._authenticated = False
        self.address = address  # to count by
        self.close = close
        self.owner: str | None = None  # of the last request over TCP with a valid key or token
        self.user = user
        self.refused = refused

    def begin_request(self) -> None:
        """Record that a request needs an answer, and that its caller is not known yet."""
        self._authenticated = False
        self._admission.remove_idle(self)

    def authenticated(self, owner: str) -> None:
        """Record that the request has a valid key or token of this owner. Raise Unavailable
        `too_many_connections`."""
        self._admission.count_for(self, owner)
        self._authenticated = True
        self._admission.remove_unauthenticated(self)

    def end_request(self, *, flushed: bool = True) -> None:
        """Record that every request is answered. `flushed`: the client has the replies."""
        if not self._authenticated:
            self._admission.add_unauthenticated(self)
        elif flushed:
            self._admission.add_idle(self)

    def leave(self) -> None:
        """Release the place. A second call does nothing."""
        self._admission.remove(self)


_Queue = OrderedDict[AdmissionPlace, None]


class Admission:
    """The places of one server; a `limit` of None is unlimited."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._open: set[AdmissionPlace] = set()
        self._refused: set[AdmissionPlace] = set()
        self._users: Counter[int] = Counter()
        # TCP connections, the oldest first.
        self._unauthenticated: _Queue = OrderedDict()
        self._addresses: dict[str, _Queue] = {}
        self._idle: _Queue = OrderedDict()
        self._owners: Counter[str] = Counter()
        self._operators = frozenset({0, os.geteuid()})

    def enter_unix(self, user: int, close: Callable[[], None]) -> AdmissionPlace | None:
        """Return a place for a connection of this user, perhaps a refused one, or None if too many
        are refused already."""
        operators = sum(self._users[operator] for operator in self._operators)
        connections = self._users.total()
        counts = UnixOpen(
            user in self._operators, connections, connections - operators, self._users[user]
        )
        if self._decided(counts) is AdmissionDecision.REFUSE:
            return self._refuse(close)
        self._users[user] += 1
        return self._admit(AdmissionPlace(self, close, user=user))

    def enter_tcp(self, host: str, close: Callable[[], None]) -> AdmissionPlace | None:
        """Like `enter_unix`, for a connection from this address. It may close an older one."""
        address = _bounded_address(host)
        of_address = self._addresses.get(address or "", OrderedDict())
        counts = TcpOpen(
            len(self._open) - self._users.total(),
            len(self._unauthenticated),
            len(of_address),
            len(self._idle),
        )
        match self._decided(counts):
            case AdmissionDecision.REFUSE:
                return self._refuse(close)
            case AdmissionDecision.REPLACE:
                self._close_first(self._unauthenticated)
            case AdmissionDecision.REPLACE_OF_ADDRESS:
                self._close_first(of_address)
            case AdmissionDecision.REPLACE_IDLE:
                self._close_first(self._idle)
        place = self._admit(AdmissionPlace(self, close, address=address))
        self.add_unauthenticated(place)
        return place

    def count_for(self, place: AdmissionPlace, owner: str) -> None:
        """Count a TCP connection for this owner. Raise Unavailable `too_many_connections` beyond
        its share, if none of its other connections is idle."""
        if place.owner == owner or place.user is not None or place not in self._open:
            return
        self._count_for_none(place)
        if self._limit is not None and self._owners[owner] >= max(1, self._limit // OWNER_SHARE):
            idle = next((each for each in self._idle if each.owner == owner), None)
            if idle is None:
                raise too_many_connections()
            self.remove(idle)
            idle.close()
        place.owner = owner
        self._owners[owner] += 1

    def _count_for_none(self, place: AdmissionPlace) -> None:
        if place.owner is not None:
            self._owners[place.owner] -= 1
            if not self._owners[place.owner]:
                del self._owners[place.owner]
            place.owner = None

    def _decided(self, counts: TcpOpen | UnixOpen) -> AdmissionDecision:
        return AdmissionDecision.ADMIT if self._limit is None else decide(counts, self._limit)

    def _admit(self, place: AdmissionPlace) -> AdmissionPlace:
        self._open.add(place)
        return place

    def _refuse(self, close: Callable[[], None]) -> AdmissionPlace | None:
        assert self._limit is not None
        if len(self._refused) >= max(1, self._limit // 4):
            return None
        place = AdmissionPlace(self, close, refused=True)
        self._refused.add(place)
        return place

    def _close_first(self, places: _Queue) -> None:
        place = next(iter(places))
        self.remove(place)
        place.close()

    def add_unauthenticated(self, place: AdmissionPlace) -> None:
        """Count it, unless it is counted already, closed, or a connection of the Unix socket."""
        if place in self._open and place.user is None:
            self._unauthenticated.setdefault(place)
            if place.address is not None:
                self._addresses.setdefault(place.address, OrderedDict()).setdefault(place)

    def remove_unauthenticated(self, place: AdmissionPlace) -> None:
        self._unauthenticated.pop(place, None)
        if place.address is not None and (queue := self._addresses.get(place.address)) is not None:
            queue.pop(place, None)
            if not queue:
                del self._addresses[place.address]

    def add_idle(self, place: AdmissionPlace) -> None:
        """Let it be closed when all places are taken, unless it is of the Unix socket."""
        if place in self._open and place.user is None:
            self._idle[place] = None

    def remove_idle(self, place: AdmissionPlace) -> None:
        self._idle.pop(place, None)

    def remove(self, place: AdmissionPlace) -> None:
        self._refused.discard(place)
        self._count_for_none(place)
        self.remove_unauthenticated(place)
        self.remove_idle(place)
        if place in self._open:
            self._open.remove(place)
            if place.user is not None:
                self._users[place.user] -= 1
                if not self._users[place.user]:
                    del self._users[place.user]


def too_many_connections() -> SbxError:
    return Unavailable(
        "too many connections are open",
        code="too_many_connections",
        hint="close connections that are not in use, and try again",
        details={"retry_after_s": 1},
    )


def admission_of(server: ServerState, limit: int | None) -> Admission:
    """Return the admission of a server, created by its first connection."""
    return kept_with(server, Admission, limit)


def _bounded_address(host: str) -> str | None:
    """Return the address to count by: of IPv6 its network, and None for loopback."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return None
    if isinstance(address, IPv6Address):
        return str(IPv6Address(int(address) >> _PREFIX << _PREFIX))
    return str(address)
