"""Signed links: a text that opens one sandbox, or one port of it, to its holder.

A link has the rights of the caller who made it, for this sandbox only. It is not stored, but
encrypted and authenticated with a key from the secret of the tokens: a page of the sandbox may see
the address that opens it, and must not read the owner or the user there. Equal links have equal
texts, because signatures of the E2B surface are made from them. A link ends with its time, with its
sandbox, and with the key, token or login of its maker.
"""

import base64
import hashlib
import hmac
import json
import math
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from msgspec import Struct

from sbx.aio import Clock
from sbx.errors import Denied
from sbx.service.auth import Authenticator
from sbx.service.caller import Caller

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

_READ_MAX = 1024
_PURPOSE = b"sbx-link"


class Link(Struct, frozen=True):
    """A link as it was made. `port`: the only one that it opens; None: all, and everything else."""

    caller: Caller
    sandbox_id: str
    port: int | None
    expires_at: float


class Links:
    """The links of a service."""

    def __init__(self, access: Authenticator, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._cipher: AESSIV | None = None
        self._read: LRUCache[str, Link] = LRUCache(_READ_MAX)

    async def make(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        port: int | None = None,
        expires_at: float | None = None,
    ) -> str:
        """Return a link. The caller has checked that `caller` may use the sandbox."""
        claims = {
            "sub": caller.owner,
            "sandbox": sandbox_id,
            "port": port,
            "exp": expires_at,
            "via": caller.via_id,
            "scopes": None if caller.scopes is None else sorted(caller.scopes),
            "user_id": caller.user_id,
            "agent_id": caller.agent_id,
            "conversation_id": caller.conversation_id,
        }
        present = {name: value for name, value in claims.items() if value is not None}
        data = (await self._opened_cipher()).encrypt(json.dumps(present).encode(), [_PURPOSE])
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    async def open(self, text: str, sandbox_id: str, port: int | None = None) -> Link:
        """Return the link. Raise Denied `unauthorized` if it is not valid now for this sandbox and
        this port; no port is everything of the sandbox."""
        link = self._read.get(text)
        if link is None:
            link = self._read[text] = await self._decrypted(text)
        via, until = link.caller.via_id, link.expires_at
        if via is not None:
            until = min(until, await self._access.valid_until(via))
        is_other = link.sandbox_id != sandbox_id or link.port not in (None, port)
        if is_other or self._clock.now() >= until:
            raise _invalid()
        return link

    async def _opened_cipher(self) -> "AESSIV":
        if self._cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV

            secret = await self._access.signing_secret()
            self._cipher = AESSIV(hmac.digest(secret, _PURPOSE, hashlib.sha512))
        return self._cipher

    async def _decrypted(self, text: str) -> Link:
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            if base64.urlsafe_b64encode(data).decode().rstrip("=") != text:
                raise ValueError  # base64 has other texts of the same bytes
            claims: dict[str, Any] = json.loads(
                (await self._opened_cipher()).decrypt(data, [_PURPOSE])
            )
        except (ValueError, InvalidTag):
            raise _invalid() from None
        scopes = claims.get("scopes")
        caller = Caller(
            claims["sub"],
            "token",
            scopes=None if scopes is None else frozenset(scopes),
            user_id=claims.get("user_id"),
            agent_id=claims.get("agent_id"),
            conversation_id=claims.get("conversation_id"),
            via_id=claims.get("via"),
        )
        return Link(caller, claims["sandbox"], claims.get("port"), claims.get("exp", math.inf))


def _invalid() -> Denied:
    return Denied(
        "the link to this sandbox is not valid, or no longer",
        code="unauthorized",
        hint="ask for the endpoint again",
    )
