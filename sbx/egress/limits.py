"""The limits and the shared state of all connections of one sandbox."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from sbx.egress.denials import EgressDenied
from sbx.egress.resolver import Resolver
from sbx.egress.rules import EgressDecision, has_rules
from sbx.egress.secrets import SecretMisuse, SecretStore
from sbx.egress.stream import ByteCounter
from sbx.policy.grants import Grants
from sbx.policy.tables import Network
from sbx.protocol.grants import Access

if TYPE_CHECKING:
    from sbx.egress.certificates import Authority


class Timeouts(Struct, frozen=True):
    """The waits for clients inside and for hosts outside, in seconds."""

    idle: float = 60.0  # for the next request of a connection
    head: float = 15.0  # for the whole head, once it has begun
    body: float = 60.0  # for the next piece of a body, or for room for the next of the reply
    tls: float = 15.0  # for the first message of TLS, or for the whole handshake
    resolve: float = 15.0
    connect: float = 20.0
    left: float = 3.0  # for a reply, after the client has closed its side
    linger: float = 1.0  # for a refused client to read the refusal


class RateLimit:
    """Allow a number of decisions per second, and some at once after a pause. Decisions are written
    to the audit log: a client that never stops must not fill the disk."""

    def __init__(self, per_second: float, at_once: int) -> None:
        self._apart_s = 1 / per_second
        self._credit_s = at_once / per_second
        self._next = 0.0

    async def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now - self._credit_s) + self._apart_s
        if self._next > now:
            await asyncio.sleep(self._next - now)


class FairQueue:
    """Admit one connection of a sandbox at a time: all of them at once would block the loop for
    other sandboxes."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)


class Tls(Struct, frozen=True):
    """The means to end TLS here and to begin it again towards the outside."""

    authority: "Authority"
    outside: ssl.SSLContext


class ConnectionLimits(Struct, frozen=True):
    """`grants` are those of the conversation that connects, if the policy permits any."""

    sandbox: str
    network: Network
    vault: SecretStore
    tls: Tls | None
    resolver: Resolver
    meter: ByteCounter
    allowed: RateLimit
    refused: RateLimit
    reading: FairQueue  # of heads
    patience: Timeouts
    record: Callable[[EgressDecision], None]
    honeytokens: Callable[[str], str | None]
    clock: Callable[[], float]
    grants: Grants | None = None

    @property
    def granted_hosts(self) -> Sequence[str]:
        return self.grants.hosts if self.grants is not None else ()

    @property
    def granted_secrets(self) -> Sequence[str]:
        return self.grants.secrets if self.grants is not None else ()

    def reads(self, host: str) -> bool:
        """Return whether TLS to this host ends here, because a rule or a secret needs its
        content."""
        return self.vault.concerns(host) or has_rules(self.network, host)

    def look(self, where: str, text: bytes) -> None:
        """Raise EgressDenied for a placeholder or a honeytoken in the text."""
        try:
            self.vault.check(where, text)
        except SecretMisuse as error:
            raise misplaced(error) from None
        self.trip(where, text)

    def trip(self, where: str, text: bytes) -> None:
        if name := self.honeytokens(text.decode("latin-1")):
            raise EgressDenied("honeytoken", f"{where} contains a honeytoken ({name})")


def misplaced(error: SecretMisuse) -> EgressDenied:
    access = Access("secret", error.secret) if error.needs_grant else None
    rule = f"secrets.{error.secret}" if error.secret else "secrets"
    return EgressDenied(rule, str(error), access)
