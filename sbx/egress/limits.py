"""What holds for all connections of one sandbox, and the few things that they share."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbx.egress.denials import EgressDenied
from sbx.egress.resolver import Resolver
from sbx.egress.rules import EgressDecision, has_rules
from sbx.egress.secrets import SecretMisuse, SecretStore
from sbx.egress.stream import ByteCounter
from sbx.policy.model import Network

if TYPE_CHECKING:
    from sbx.egress.certificates import Authority


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long is waited, in seconds, for whoever is inside and for the world."""

    idle: float = 60.0  # for the next request of a connection
    head: float = 15.0  # for all of its head, once it has begun
    body: float = 60.0  # for the next piece of its body, or for room for the next of the reply
    tls: float = 15.0  # for the first message of TLS, or for all it takes to begin
    resolve: float = 15.0
    connect: float = 20.0
    left: float = 3.0  # for a reply, when whoever asked says that it will say no more
    linger: float = 1.0  # for whoever is refused to read it


class RateLimit:
    """Lets through so many a second, and some at once after a pause. What is decided is written
    to the audit log: whoever asks without end must not fill the disk with it."""

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
    """One connection of a sandbox at a time: all of them at once would be a long turn of the loop,
    in which nobody else has one."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def turn(self) -> None:
        async with self._one:
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Tls:
    """What it takes to end TLS here and to begin it anew towards the outside."""

    authority: "Authority"
    outside: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
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

    def reads(self, host: str) -> bool:
        """Whether TLS to this host is ended here, so that what is in it can be judged or filled."""
        return self.vault.concerns(host) or has_rules(self.network, host)

    def look(self, where: str, text: bytes) -> None:
        """Raises Refused for a placeholder or a honeytoken in something that was said inside."""
        try:
            self.vault.check(where, text)
        except SecretMisuse as error:
            raise misplaced(error) from None
        self.trip(where, text)

    def trip(self, where: str, text: bytes) -> None:
        if name := self.honeytokens(text.decode("latin-1")):
            raise EgressDenied(
                "honeytoken", f"{where} holds what nobody should have found ({name})"
            )


def misplaced(error: SecretMisuse) -> EgressDenied:
    return EgressDenied(f"secrets.{error.secret}" if error.secret else "secrets", str(error))
