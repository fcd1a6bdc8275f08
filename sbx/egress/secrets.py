"""Secrets that code inside uses and cannot read.

Code inside has a placeholder. The proxy replaces it with the value in the header and for the hosts
that the secret names. It refuses requests with a placeholder at any other place that it can read.
In replies of these hosts it replaces every known form of the value with the placeholder (veil.py).

    Secret              one secret
    SecretStore         the secrets of one sandbox: placeholders, values, misuse
    PlaceholderScanner  finds a placeholder in a stream, across its pieces
"""

import base64
import binascii
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sbx.egress.veil import RedactingStream, Search
from sbx.errors import Unavailable
from sbx.policy import destinations

MARK = "sbx-secret-"
_LETTERS = 32
_PLACEHOLDER = re.compile(rb"sbx-secret-[0-9a-f]{%d}" % _LETTERS, re.IGNORECASE)
_LENGTH = len(MARK) + _LETTERS
_UNESCAPED = tuple(  # the letters of a placeholder, in percent encoding
    (f"%{ord(form):02x}".encode(), letter.encode())
    for letter in sorted({*MARK, *"0123456789abcdef"})
    for form in sorted({letter, letter.upper()})
)
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_SHORTEST = 8  # below it, placeholders would replace text that is not the value
_LONGEST = 8192
_BASIC = re.compile(rb"basic +([A-Za-z0-9+/=_-]+) *", re.IGNORECASE)
_URLSAFE = bytes.maketrans(b"-_", b"+/")

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Secret:
    """`value` goes into `header` of requests to `hosts`, over plain HTTP only with `allow_plain`.

    Raise Unavailable `secret_unusable`, without the value, if no header can contain it.
    """

    name: str
    env: str
    hosts: tuple[str, ...]
    header: str
    value: str = field(repr=False)
    allow_plain: bool = False

    def __post_init__(self) -> None:
        if not _SHORTEST <= len(self.value) <= _LONGEST or not _VALUE.fullmatch(self.value):
            raise Unavailable(
                f"the value of the secret {self.name} cannot be used: it must be of {_SHORTEST} to "
                f"{_LONGEST} characters of ASCII, in one line, and not begin or end with a space",
                code="secret_unusable",
            )

    def goes_to(self, host: str) -> bool:
        return any(destinations.host_covers(pattern, host) for pattern in self.hosts)


def password(value: bytes) -> bytes | None:
    """Return the `user:password` in the value of a header, as pip and git send it; None without
    one."""
    if (basic := _BASIC.fullmatch(value)) is None:
        return None
    try:
        return base64.b64decode(basic[1].translate(_URLSAFE))
    except (binascii.Error, ValueError):
        return None


class SecretMisuse(Exception):
    """A placeholder at a place where no value is allowed; the text names both. `needs_grant`: a
    person may allow the value there."""

    def __init__(self, secret: str, why: str, *, needs_grant: bool = False) -> None:
        super().__init__(why)
        self.secret = secret
        self.needs_grant = needs_grant


class SecretStore:
    """The secrets of one sandbox. A secret has a different placeholder in every sandbox."""

    def __init__(
        self, by_name: Mapping[str, Secret], need_grant: Collection[str] = frozenset()
    ) -> None:
        """`need_grant`: the names of secrets that are inserted only after a grant."""
        self._need_grant = frozenset(need_grant)
        self._by_placeholder = {
            f"{MARK}{secrets.token_hex(_LETTERS // 2)}".encode(): secret
            for secret in by_name.values()
        }
        self._of = {secret: text for text, secret in self._by_placeholder.items()}
        self._searches: dict[tuple[Secret, ...], Search] = {}
        self.environment: Mapping[str, str] = MappingProxyType(
            {secret.env: text.decode() for text, secret in self._by_placeholder.items()}
        )

    def concerns(self, host: str) -> bool:
        """Return whether a secret may go to this host, so that its messages are read."""
        return any(secret.goes_to(host) for secret in self._of)

    def filled(
        self, headers: Headers, host: str, *, secure: bool, granted: Collection[str] = ()
    ) -> Headers:
        """Return the headers with the values of secrets. `granted`: the names of granted ones.
        Raise SecretMisuse."""
        locked = self._need_grant.difference(granted)
        return [(name, self._fill(name, value, host, secure, locked)) for name, value in headers]

    def check(self, where: str, text: bytes) -> None:
        """Raise SecretMisuse for a placeholder in the text, also in percent encoding."""
        for form in (text, _plain(text)) if b"%" in text else (text,):
            if match := _PLACEHOLDER.search(form):
                raise self.misplaced(match[0], where)

    def misplaced(self, placeholder: bytes, where: str) -> SecretMisuse:
        secret = self._by_placeholder.get(placeholder.lower())
        if secret is None:
            return SecretMisuse("", f"{where} contains a placeholder of no secret of this sandbox")
        return SecretMisuse(
            secret.name,
            f"{where} contains the placeholder of {secret.name}, which is for the header "
            f"{secret.header} of requests to {', '.join(secret.hosts)}",
        )

    def veil(self, host: str) -> RedactingStream:
        there = tuple(secret for secret in self._of if secret.goes_to(host))
        if there not in self._searches:
            self._searches[there] = Search([(secret.value, self._of[secret]) for secret in there])
        return RedactingStream(self._searches[there])

    def _fill(
        self, name: bytes, value: bytes, host: str, secure: bool, locked: frozenset[str]
    ) -> bytes:
        if (plain := password(value)) and _PLACEHOLDER.search(plain):
            filled = self._put(name, plain, host, secure, locked)
            return value.split()[0] + b" " + base64.b64encode(filled)
        self._check_escaped(name, value)
        return self._put(name, value, host, secure, locked)

    def _check_escaped(self, name: bytes, value: bytes) -> None:
        if not _PLACEHOLDER.search(value):
            self.check(f"the header {name.decode('latin-1')}", value)

    def _put(
        self, name: bytes, value: bytes, host: str, secure: bool, locked: frozenset[str]
    ) -> bytes:
        def fill(match: re.Match[bytes]) -> bytes:
            secret = self._by_placeholder.get(match[0])
            if (
                secret is None
                or secret.header.lower().encode() != name.lower()
                or not secret.goes_to(host)
            ):
                where = f"the header {name.decode('latin-1')} of a request to {host}"
                raise self.misplaced(match[0], where)
            if not secure and not secret.allow_plain:
                raise SecretMisuse(
                    secret.name,
                    f"{secret.name} is not sent in clear text: use https for {host}, or set "
                    "allow_plain in the policy",
                )
            if secret.name in locked:
                raise SecretMisuse(
                    secret.name, f"{secret.name} is inserted only after a grant", needs_grant=True
                )
            return secret.value.encode()

        return _PLACEHOLDER.sub(fill, value)


class PlaceholderScanner:
    def __init__(self, vault: SecretStore, where: str) -> None:
        self._vault = vault
        self._where = where
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        """Raise SecretMisuse. A part of the placeholder may be sent by then, never the whole."""
        seen = self._tail + piece
        if match := _PLACEHOLDER.search(seen):
            raise self._vault.misplaced(match[0], self._where)
        self._tail = seen[-(_LENGTH - 1) :]


def _plain(text: bytes) -> bytes:
    """Decode the percent encoding of the letters of a placeholder, also if it is threefold.

    To decode all percent signs takes 30 ms for a head that is full of them, and blocks the loop.
    """
    text = text.lower()
    for _ in range(2):
        text = text.replace(b"%25", b"%")
    for escape, letter in _UNESCAPED:
        text = text.replace(escape, letter)
    return text
