"""Signed links: a text that opens one sandbox, or one port of it, to its holder.

A link has the rights of the caller who made it, for this sandbox only. It is a JWT, signed with the
secret of the tokens, and not stored. It ends with its time, with its sandbox, and with the key or
token of its maker.
"""

from typing import Any

from cachetools import TTLCache
from msgspec import Struct

from sbx.aio import Clock
from sbx.errors import Denied
from sbx.service.auth import Authenticator
from sbx.service.caller import Caller

_ALGORITHM = "HS256"
_AUDIENCE = "sbx-link"
_CHECKED_S = 5.0  # between two looks at the key of its maker
_CHECKED_MAX = 1024


class Link(Struct, frozen=True):
    """A checked link. `port`: the only one that it opens; None: all, and everything else."""

    caller: Caller
    sandbox_id: str
    port: int | None
    expires_at: float | None


class Links:
    """The links of a service."""

    def __init__(self, access: Authenticator, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._checked: TTLCache[str, Link] = TTLCache(_CHECKED_MAX, _CHECKED_S, timer=clock.now)

    async def make(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        port: int | None = None,
        expires_at: float | None = None,
    ) -> str:
        """Return a link. The caller has checked that `caller` may use the sandbox."""
        import jwt  # takes 50 ms, which a service without tokens does not need

        claims = {
            "aud": _AUDIENCE,
            "sub": caller.owner,
            "sandbox": sandbox_id,
            "port": port,
            "exp": None if expires_at is None else int(expires_at + 1),
            "via": caller.via_id,
            "scopes": None if caller.scopes is None else sorted(caller.scopes),
            "user_id": caller.user_id,
            "agent_id": caller.agent_id,
            "conversation_id": caller.conversation_id,
        }
        present = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(present, await self._access.signing_secret(), algorithm=_ALGORITHM)

    async def open(self, text: str, sandbox_id: str, port: int | None = None) -> Link:
        """Return the link. Raise Denied `unauthorized` if it is not valid now for this sandbox and
        this port; no port is everything of the sandbox."""
        link = self._checked.get(text)
        if link is None:
            link = await self._read(text)
            self._checked[text] = link
        expired = link.expires_at is not None and self._clock.now() >= link.expires_at
        if expired or link.sandbox_id != sandbox_id or link.port not in (None, port):
            raise _invalid()
        return link

    async def _read(self, text: str) -> Link:
        import jwt

        secret = await self._access.signing_secret()
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                secret,
                algorithms=[_ALGORITHM],
                audience=_AUDIENCE,
                options={"require": ["aud", "sub", "sandbox"], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError):
            raise _invalid() from None
        via = claims.get("via")
        if via is not None and await self._access.is_revoked(via):
            raise _invalid()
        scopes = claims.get("scopes")
        caller = Caller(
            claims["sub"],
            "token",
            scopes=None if scopes is None else frozenset(scopes),
            user_id=claims.get("user_id"),
            agent_id=claims.get("agent_id"),
            conversation_id=claims.get("conversation_id"),
            via_id=via,
        )
        return Link(caller, claims["sandbox"], claims.get("port"), claims.get("exp"))


def _invalid() -> Denied:
    return Denied(
        "the link to this sandbox is not valid, or no longer",
        code="unauthorized",
        hint="ask for the endpoint again",
    )
