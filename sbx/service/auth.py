"""Callers and their rights: keys, tokens, and the peer of a Unix socket.

A key has all rights of its owner. A token is a signed permission that a holder of a key gives to a
front end: for one user, perhaps one agent and one conversation, perhaps a few scopes, until a time.
Its signature proves that sbx made it; the store decides about its bounds and its revocation. There
are no anonymous callers.
"""

import asyncio
import hashlib
import json
import logging
import math
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TTLCache
from msgspec.structs import replace

from sbx.aio import Clock, run_to_completion
from sbx.errors import BadRequest, Broken, Denied, NotFound, Unavailable
from sbx.service.caller import Caller
from sbx.service.ids import ID_MAX, check_id
from sbx.store import Store, keys, tokens
from sbx.store import console as console_table
from sbx.store.console import ConsoleSessionRow
from sbx.store.keys import KeyRecord as KeyRecord
from sbx.store.pending import PendingWrites
from sbx.store.tokens import TokenRecord as TokenRecord
from sbx.workspace.secret_files import keep_secret, secret_at

SCOPES = ("files:read", "files:write", "execute", "admin")
TOKEN_TTL_MAX_S = 366 * 86400.0
_ALGORITHM = "HS256"
_ISSUER = "sbx"
_AUDIENCE = "sbx"
_CLAIMS = ["jti", "sub", "iss", "aud", "iat", "exp"]
_BEARER_MAX = 4096
TOKENS_PER_OWNER = 10_000  # that are valid
_CACHED_S = 5.0
_CACHED_MAX = 1024
_USED_EVERY_S = 60.0
_GIVEN_NAME = "SBX_API_KEY"
_GIVEN_WEAK = 20  # characters; fewer can be guessed from the hash, should the store be stolen
_log = logging.getLogger(__name__)


class Authenticator:
    """Keys and tokens over a store. `secret_file` holds what signs tokens, made when missing.

    `shared_uid`: the uid that Linux reports of several users, see `unmapped_uid`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        secret_file: Path,
        service_uid: int,
        pending: PendingWrites | None = None,
        *,
        shared_uid: int | None = None,
    ) -> None:
        self._store = store
        self._pending = pending or PendingWrites(store)
        self._revoked: dict[str, float] = {}  # keys and tokens, until the store has it
        self._clock = clock
        self._secret_file = secret_file
        self._service_uid = service_uid
        self._shared_uid = shared_uid
        self._secret: bytes | None = None
        self._known: LRUCache[bytes, tuple[Caller, float]] = LRUCache(_CACHED_MAX)
        self._ends: TTLCache[str, float] = TTLCache(_CACHED_MAX, _CACHED_S, timer=clock.now)
        self._revocations = 0

    # -- who calls ---------------------------------------------------------------------------------

    def from_peer(self, uid: int) -> Caller:
        """Return the other end of a Unix socket, by the uid that Linux reports.

        Raise Denied `unauthorized` for the uid that stands for all users without a uid in the user
        namespace of the service: they would be one owner.
        """
        if uid == self._shared_uid:
            raise Denied(
                "the user of this connection is unknown in the user namespace of the service",
                code="unauthorized",
                hint="use a key: Authorization: Bearer <key>",
            )
        return self._of_uid(uid)

    def service_caller(self) -> Caller:
        """Return the user who runs this process."""
        return self._of_uid(self._service_uid)

    def _of_uid(self, uid: int) -> Caller:
        return Caller(f"uid:{uid}", "peer", operator=uid in (0, self._service_uid))

    async def from_bearer(self, bearer: str) -> Caller:
        """Return the caller with this key or token. Raise Denied `unauthorized`, with no reason."""
        if not 0 < len(bearer) <= _BEARER_MAX:
            raise _unauthorized()
        digest = hashlib.sha256(bearer.encode("utf-8", "surrogatepass")).digest()
        now = self._clock.now()
        cached = self._known.get(digest)
        if cached is not None and now < cached[1]:
            return cached[0]
        revocations = self._revocations
        caller, until = await self._of_key(digest.hex(), now) or await self._of_token(bearer, now)
        if revocations == self._revocations:  # else it may have been revoked while we looked
            self._known[digest] = caller, min(until, now + _CACHED_S)
        return caller

    async def _of_key(self, digest: str, now: float) -> tuple[Caller, float] | None:
        # Found by its hash: the time of a look-up depends on the hash, which does not reveal a key.
        key = await keys.get_by_digest(self._store, digest)
        if key is None:
            return None
        if now >= (until := await self.valid_until(key.id)):
            raise _unauthorized()
        if key.last_used_at is None or now - key.last_used_at >= _USED_EVERY_S:
            keys.used(self._store, key.id, now)
        caller = Caller(key.owner, "key", operator=key.operator, via_id=key.id)
        return caller, until

    async def _of_token(self, bearer: str, now: float) -> tuple[Caller, float]:
        claims = _claims_in(bearer, await self.signing_secret())
        token = await tokens.get(self._store, claims["jti"])
        until = min(claims["exp"], await self.valid_until(claims["jti"]))
        if token is None or token.owner != claims["sub"] or now >= until:
            raise _unauthorized()
        return _caller_of(token), until

    async def valid_until(self, via_id: str) -> float:
        """Return the end of a key, token or login, or of the key or token that made it, if that is
        earlier. Return 0 if it was revoked or does not exist. Nothing else decides about that: a
        copy of this rule would forget a case, as that of links did with the end of a token."""
        if (end := self._ends.get(via_id)) is None:
            revocations = self._revocations
            end = await self._end_of(via_id)
            if revocations == self._revocations:
                self._ends[via_id] = end
        return end

    async def _end_of(self, via_id: str) -> float:
        if via_id in self._revoked:
            return 0.0
        record, parent = await _record_and_maker(self._store, via_id)
        if record is None or getattr(record, "revoked_at", None) is not None:
            return 0.0
        end: float = getattr(record, "expires_at", math.inf)
        return end if parent is None else min(end, await self.valid_until(parent))

    def forget(self) -> None:
        """Forget who is alive: a key, a token or a login has ended."""
        self._revocations += 1
        self._known.clear()
        self._ends.clear()

    # -- keys --------------------------------------------------------------------------------------

    async def make_key(
        self, owner: str, name: str | None = None, *, operator: bool = False
    ) -> tuple[KeyRecord, str]:
        """Return a new key of `owner`, and its clear text, which is not stored and cannot be shown
        again."""
        text = f"sk-sbx-{secrets.token_hex(32)}"
        key = self._new_key(owner, name, operator)
        if not await keys.add(self._store, key, _digest(text)):
            raise Broken("a new key is as an old one; the source of randomness is broken")
        return key, text

    async def keys(self) -> list[KeyRecord]:
        return [
            replace(key, revoked_at=self._revoked[key.id]) if key.id in self._revoked else key
            for key in await keys.every(self._store)
        ]

    async def revoke_key(self, key_id: str) -> bool:
        """Revoke a key from now on; a second call does nothing. Raise NotFound.

        Return whether the store has the revocation. Until then it holds as long as this process
        lives.
        """
        return await run_to_completion(self._revoke(key_id, keys.get, keys.revoke))

    async def _revoke(
        self,
        record_id: str,
        get: Callable[[Store, str], Awaitable[object | None]],
        revoke: Callable[[sqlite3.Connection, str, float], None],
    ) -> bool:
        """Hold it in memory first: the store may refuse it, or take long."""
        is_new = record_id not in self._revoked
        at = self._revoked.setdefault(record_id, self._clock.now())
        self.forget()
        with suppress(Unavailable):  # a store that cannot be read may know it
            if await get(self._store, record_id) is None:
                if is_new:
                    del self._revoked[record_id]
                raise NotFound(
                    f"{record_id} does not exist",
                    hint="sbx key list and sbx token list show the ids",
                )

        def on_done(stored: bool) -> None:
            if stored:
                self._revoked.pop(record_id, None)
                self.forget()

        stored = await self._pending.write(
            f"the revocation of {record_id}",
            lambda on: revoke(on, record_id, at),
            on_done=on_done,
        )
        on_done(stored)
        return stored

    async def first_key(self, text: str | None, keep_at: Path) -> str | None:
        """Ensure that there is a key. Return the clear text of a new key, to show it once.

        `text` is the operator's own key (SBX_API_KEY): it becomes the key of the owner `default`,
        and replaces an earlier one. Without it, a store that never had a key gets one, which is
        also written to `keep_at`, mode 0600. Both are keys of an operator.

        Raise BadRequest `invalid_settings` for a `text` that no header can carry, Unavailable
        `secret_unusable` if `keep_at` cannot be written; then there is no new key.
        """
        if text:
            await self._adopt(text)
            return None
        if await keys.every(self._store):
            return None
        text = f"sk-sbx-{secrets.token_hex(32)}"
        key = self._new_key("default", "first", operator=True)
        kept = json.dumps({"api_key": text, "owner": key.owner, "id": key.id}, indent=2) + "\n"
        await asyncio.to_thread(keep_secret, keep_at, kept.encode())
        await keys.add(self._store, key, _digest(text))
        return text

    async def _adopt(self, text: str) -> None:
        if len(text) > _BEARER_MAX or not text.isprintable() or text != text.strip():
            raise BadRequest(
                f"{_GIVEN_NAME} must be printable, without space around it,"
                f" and at most {_BEARER_MAX} characters",
                code="invalid_settings",
            )
        if len(text) < _GIVEN_WEAK:
            _log.warning("%s is short, and may be guessed", _GIVEN_NAME)
        digest = _digest(text)
        stored = await keys.get_by_digest(self._store, digest)
        for key in await keys.every(self._store):
            if key.name == _GIVEN_NAME and key.revoked_at is None and key != stored:
                await self.revoke_key(key.id)
        if stored is None:
            await keys.add(self._store, self._new_key("default", _GIVEN_NAME, True), digest)
        elif stored.revoked_at is not None:
            _log.warning("%s gives the key %s, which was revoked", _GIVEN_NAME, stored.id)

    def _new_key(self, owner: str, name: str | None, operator: bool) -> KeyRecord:
        _check_name("owner", owner)
        if name is not None:
            _check_name("name", name)
        key_id = f"key-{secrets.token_hex(6)}"
        return KeyRecord(key_id, owner, name, operator, self._clock.now())

    # -- tokens ------------------------------------------------------------------------------------

    async def make_token(
        self,
        owner: str,
        *,
        user_id: str,
        agent_id: str | None = None,
        conversation_id: str | None = None,
        scopes: Iterable[str] | None = None,
        ttl_s: float,
        via_id: str | None = None,
    ) -> tuple[TokenRecord, str]:
        """Return a token within these bounds, and its text, which is not stored. It ends with the
        key of `via_id`, which is a key or a login; the logout of a browser does not end it.

        Raise BadRequest for a bound that is not an id, an unknown scope, or a `ttl_s` that is not
        within (0, a year], and Unavailable `too_many_tokens`.
        """
        _check_name("owner", owner)
        bounds = {"user_id": user_id, "agent_id": agent_id, "conversation_id": conversation_id}
        for name, value in bounds.items():
            if value is not None:
                check_id(name, value)
        if not 0 < ttl_s <= TOKEN_TTL_MAX_S:
            raise BadRequest(
                "a token's ttl must be more than 0 seconds and at most a year",
                details={"field": "ttl", "limit": TOKEN_TTL_MAX_S},
            )
        if via_id is not None and via_id.startswith(console_table.PREFIX):
            _, via_id = await _record_and_maker(self._store, via_id)
        now = self._clock.now()
        token = TokenRecord(
            f"tok-{secrets.token_hex(8)}",
            owner,
            user_id,
            agent_id,
            conversation_id,
            None if scopes is None else _checked_scopes(scopes),
            now,
            now + ttl_s,
            key_id=via_id,
        )
        import jwt  # takes 50 ms, which a service without tokens does not need

        text = jwt.encode(_claims_of(token), await self.signing_secret(), algorithm=_ALGORITHM)
        if not await tokens.add(self._store, token, TOKENS_PER_OWNER):
            raise _too_many_tokens()
        return token, text

    async def tokens(self, owner: str | None = None) -> list[TokenRecord]:
        """Return the tokens of one owner, or of all; revoked and expired ones too."""
        return [
            replace(token, revoked_at=self._revoked[token.id])
            if token.id in self._revoked
            else token
            for token in await tokens.every(self._store, owner)
        ]

    async def revoke_token(self, token_id: str) -> bool:
        """Revoke a token from now on. Raise and return as `revoke_key`."""
        return await run_to_completion(self._revoke(token_id, tokens.get, tokens.revoke))

    async def of_login(self, login: ConsoleSessionRow) -> Caller:
        """Return the caller with the login of a browser. Raise Denied `unauthorized` after its end,
        or the end of the token or key that it came from."""
        if self._clock.now() >= await self.valid_until(login.id):
            raise _unauthorized()
        if login.token_id is None:
            return Caller(login.owner, "console", operator=login.operator, via_id=login.id)
        token = await tokens.get(self._store, login.token_id)
        if token is None:
            raise _unauthorized()
        return _caller_of(token)

    async def signing_secret(self) -> bytes:
        if self._secret is None:
            self._secret = await asyncio.to_thread(secret_at, self._secret_file)
        return self._secret


def _too_many_tokens() -> Unavailable:
    return Unavailable(
        f"there are {TOKENS_PER_OWNER} valid tokens, which is the limit",
        code="too_many_tokens",
        hint="revoke some that are no longer needed, or choose a shorter ttl",
        details={"limit": TOKENS_PER_OWNER},
    )


async def _record_and_maker(
    store: Store, via_id: str
) -> tuple[KeyRecord | TokenRecord | ConsoleSessionRow | None, str | None]:
    """Return the record of a key, token or login, and the key or token that made it."""
    if via_id.startswith("key-"):
        return await keys.get(store, via_id), None
    if via_id.startswith(console_table.PREFIX):
        login = await console_table.get(store, via_id)
        return login, None if login is None else login.token_id or login.key_id
    token = await tokens.get(store, via_id)
    return token, None if token is None else token.key_id


def _caller_of(token: TokenRecord) -> Caller:
    return Caller(
        token.owner,
        "token",
        scopes=token.scopes,
        user_id=token.user_id,
        agent_id=token.agent_id,
        conversation_id=token.conversation_id,
        via_id=token.id,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unauthorized() -> Denied:
    return Denied(
        "the key or token is not valid",
        code="unauthorized",
        hint="send a key or an unexpired token as `Authorization: Bearer <key>`",
    )


def _claims_in(bearer: str, secret: bytes) -> dict[str, Any]:
    """Return the claims of a token. The caller checks its times with the injected clock."""
    if bearer.count(".") != 2:
        raise _unauthorized()
    import jwt
    from jwt.utils import base64url_decode, base64url_encode

    try:
        claims = jwt.decode(
            bearer,
            secret,
            algorithms=[_ALGORITHM],
            audience=_AUDIENCE,
            issuer=_ISSUER,
            options={
                "require": _CLAIMS,
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
            },
        )
        signature = bearer.rpartition(".")[2]
        # base64 has other texts of the same bytes, with padding for example: a token has one text.
        canonical = base64url_encode(base64url_decode(signature)).decode() == signature
    except (jwt.PyJWTError, ValueError):
        raise _unauthorized() from None
    if not canonical:
        raise _unauthorized()
    if not isinstance(claims["jti"], str) or not isinstance(claims["exp"], int):
        raise _unauthorized()
    return claims


def _claims_of(token: TokenRecord) -> dict[str, Any]:
    """Return the claims of a token. The bounds in it are for its readers; the store decides."""
    claims = {
        "iss": _ISSUER,
        "aud": _AUDIENCE,
        "sub": token.owner,
        "jti": token.id,
        "iat": int(token.created_at),
        "exp": int(token.expires_at + 1),
        "user_id": token.user_id,
        "agent_id": token.agent_id,
        "conversation_id": token.conversation_id,
        "scopes": None if token.scopes is None else sorted(token.scopes),
    }
    return {name: value for name, value in claims.items() if value is not None}


def _checked_scopes(scopes: Iterable[str]) -> frozenset[str]:
    scope_set = frozenset(scopes)
    if unknown := sorted(scope_set - set(SCOPES)):
        raise BadRequest(
            f"scope {unknown[0]!r} does not exist; scopes are {', '.join(SCOPES)}",
            details={"field": "scopes", "available": list(SCOPES)},
        )
    return scope_set


def _check_name(field: str, value: str) -> None:
    if not 0 < len(value) <= ID_MAX or not value.isprintable():
        raise BadRequest(
            f"{field} must be 1 to {ID_MAX} printable characters", details={"field": field}
        )
