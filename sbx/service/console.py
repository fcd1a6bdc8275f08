"""Logins of browsers at the console: one-time codes, and the cookies that they become.

    make_code   for a caller of an ordinary listener; a code is valid once, for a minute
    login       a browser exchanges the code for a cookie
    caller      the rights behind a cookie: those of the caller who requested its code

The memory of this process has the codes, and the store the logins: these survive a restart. Both
have only hashes. A cookie is valid for twelve hours after its last use, and for a week at most. It
ends with the key or token that it came from.
"""

import base64
import hashlib
import hmac
import secrets
from collections import deque
from dataclasses import replace

from cachetools import TTLCache
from msgspec import Struct

from sbx.aio import Clock
from sbx.errors import Denied, NotFound, Unavailable
from sbx.service.auth import Authenticator
from sbx.service.caller import Caller
from sbx.store import Store
from sbx.store import console as console_table
from sbx.store.console import ConsoleSessionRow as ConsoleSessionRow

CODE_S = 60.0
CODES_PER_OWNER = 16
COOKIE_S = 12 * 3600.0
LOGIN_MAX_S = 7 * 86400.0
ATTEMPTS = 10  # that fail, in a minute
_CHECKED_S = 5.0  # between two looks at the row of a login
_CHECKED_MAX = 1024
_SEEN_EVERY_S = 60.0
_CODES_MAX = 4096
_USER_AGENT_MAX = 300


class ConsoleLogin(Struct, frozen=True):
    """A browser that is logged in, and its rights."""

    caller: Caller
    row: ConsoleSessionRow


class _Code(Struct, frozen=True):
    caller: Caller
    expires_at: float


class ConsoleLogins:
    """The logins of a service at its console."""

    def __init__(self, store: Store, access: Authenticator, clock: Clock) -> None:
        self._store = store
        self._access = access
        self._clock = clock
        self._codes: TTLCache[str, _Code] = TTLCache(_CODES_MAX, CODE_S, timer=clock.now)
        self._failed: deque[float] = deque(maxlen=ATTEMPTS)
        self._checked: TTLCache[str, ConsoleLogin] = TTLCache(
            _CHECKED_MAX, _CHECKED_S, timer=clock.now
        )

    async def name(self) -> str:
        """Return the host name of the console of this data directory, such as
        `sbx-ab12cd34.localhost`. Cookies ignore ports, so each service needs a name."""
        secret = await self._access.signing_secret()
        digest = hmac.digest(secret, b"console name", "sha256")
        return f"sbx-{base64.b32encode(digest)[:8].decode().lower()}.localhost"

    def make_code(self, caller: Caller, *, operator: bool = True) -> tuple[str, float]:
        """Return a code and its expiry. `operator` of False gives up the rights of an operator.
        Raise Unavailable `too_many_codes`."""
        mine = [each for each in self._codes.values() if each.caller.owner == caller.owner]
        if len(mine) >= CODES_PER_OWNER:
            raise Unavailable(
                f"{CODES_PER_OWNER} codes wait for a login",
                code="too_many_codes",
                hint="use one of them, or wait a minute",
                details={"limit": CODES_PER_OWNER, "retry_after_s": CODE_S},
            )
        if not operator:
            caller = replace(caller, operator=False)
        code = secrets.token_urlsafe(32)
        expires_at = self._clock.now() + CODE_S
        self._codes[_digest(code)] = _Code(caller, expires_at)
        return code, expires_at

    async def login(self, code: str, user_agent: str) -> tuple[str, ConsoleLogin]:
        """Return a new cookie and its login. Raise Denied `code_not_valid`, and Unavailable
        `too_many_attempts` after many such codes. A valid code is never refused for these: a code
        cannot be guessed, and a stranger could otherwise prevent all logins."""
        valid = self._codes.pop(_digest(code), None)
        if valid is None:
            self._count_failure()
            raise Denied(
                "this login link was used already or has expired",
                code="code_not_valid",
                hint="get another one with: sbx console",
            )
        caller, now = valid.caller, self._clock.now()
        cookie = secrets.token_urlsafe(32)
        row = ConsoleSessionRow(
            id=f"{console_table.PREFIX}{secrets.token_hex(8)}",
            owner=caller.owner,
            operator=caller.operator,
            token_id=caller.via_id if caller.via == "token" else None,
            key_id=caller.via_id if caller.via == "key" else None,
            user_agent=user_agent[:_USER_AGENT_MAX],
            created_at=now,
            last_seen_at=now,
            expires_at=now + COOKIE_S,
        )
        await console_table.add(self._store, row, _digest(cookie))
        return cookie, ConsoleLogin(await self._access.of_login(row), row)

    async def find(self, cookie: str) -> ConsoleLogin:
        """Return the login with this cookie, which counts as a use. Raise Denied
        `unauthorized`."""
        digest, now = _digest(cookie), self._clock.now()
        login = self._checked.get(digest) or await self._read(digest)
        if now >= await self._access.valid_until(login.row.id):
            raise _logged_out()
        if now - login.row.last_seen_at >= _SEEN_EVERY_S:
            self._slide(login.row, now)
            self._checked.pop(digest, None)
        return login

    async def _read(self, digest: str) -> ConsoleLogin:
        row = await console_table.get_by_digest(self._store, digest)
        if row is None:
            raise _logged_out()
        login = self._checked[digest] = ConsoleLogin(await self._access.of_login(row), row)
        return login

    async def every(self, owner: str) -> list[ConsoleSessionRow]:
        """Return the logins of an owner that are valid by their time, the oldest first."""
        await self._store.settled()
        now = self._clock.now()
        rows = await console_table.list_for_owner(self._store, owner)
        return [row for row in rows if now < row.expires_at]

    async def end(self, owner: str, session_id: str) -> None:
        """End a login at once. Raise NotFound."""
        ended = await console_table.delete(self._store, session_id, owner)
        self._access.forget()
        if not ended:
            raise NotFound(f"login {session_id[:80]!r} does not exist")

    def _slide(self, row: ConsoleSessionRow, now: float) -> None:
        expires_at = min(now + COOKIE_S, row.created_at + LOGIN_MAX_S)
        console_table.seen(self._store, row.id, now, expires_at)

    def _count_failure(self) -> None:
        now = self._clock.now()
        if len(self._failed) == ATTEMPTS and now - self._failed[0] < CODE_S:
            raise Unavailable(
                "too many codes were not valid",
                code="too_many_attempts",
                hint="wait a minute, or get another link with: sbx console",
                details={"retry_after_s": CODE_S},
            )
        self._failed.append(now)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _logged_out() -> Denied:
    return Denied(
        "the login of this browser is over",
        code="unauthorized",
        hint="get a login link with: sbx console",
    )
