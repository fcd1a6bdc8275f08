"""Secrets that code inside uses and cannot read.

Inside stands a placeholder. In the header that the secret names, of a request to a host that it
names, the proxy puts the value in its place; anywhere else that it can see a placeholder, the
request is refused. Of what such a host answers, every form of the value that echoing servers are
known for is turned back into the placeholder (veil.py).

    Secret   one of them
    Vault    those of one sandbox: its placeholders, what is filled in, what is refused
    Scan     whether a placeholder is in a stream, across its pieces
"""

import base64
import binascii
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sbx.egress.veil import RedactingStream, Search
from sbx.errors import Unavailable
from sbx.policy import destinations

MARK = "sbx-secret-"
_LETTERS = 32
_PLACEHOLDER = re.compile(rb"sbx-secret-[0-9a-f]{%d}" % _LETTERS, re.IGNORECASE)
_LENGTH = len(MARK) + _LETTERS
_UNESCAPED = tuple(  # what a placeholder consists of, as it stands behind a percent sign
    (f"%{ord(form):02x}".encode(), letter.encode())
    for letter in sorted({*MARK, *"0123456789abcdef"})
    for form in sorted({letter, letter.upper()})
)
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_SHORTEST = 8  # below it, replies would be full of placeholders that never were the value
_LONGEST = 8192
_BASIC = re.compile(rb"basic +([A-Za-z0-9+/=_-]+) *", re.IGNORECASE)
_URLSAFE = bytes.maketrans(b"-_", b"+/")

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Secret:
    """`value` goes into `header` of requests to `hosts`, over plain HTTP only with `allow_plain`.

    Raises Unavailable `secret_unusable`, without the value in it, for what no header can hold.
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
    """The `user:password` of a header's value, as pip and git send that of a URL; None if it has
    none."""
    if (basic := _BASIC.fullmatch(value)) is None:
        return None
    try:
        return base64.b64decode(basic[1].translate(_URLSAFE))
    except (binascii.Error, ValueError):
        return None


class SecretMisuse(Exception):
    """A placeholder where no value may be put; the text says where, and for whom."""

    def __init__(self, secret: str, why: str) -> None:
        super().__init__(why)
        self.secret = secret


class SecretStore:
    """The secrets of one sandbox. Each has another placeholder in every sandbox."""

    def __init__(self, given: Mapping[str, Secret]) -> None:
        self._by_placeholder = {
            f"{MARK}{secrets.token_hex(_LETTERS // 2)}".encode(): secret
            for secret in given.values()
        }
        self._of = {secret: text for text, secret in self._by_placeholder.items()}
        self._searches: dict[tuple[Secret, ...], Search] = {}
        self.environment: Mapping[str, str] = MappingProxyType(
            {secret.env: text.decode() for text, secret in self._by_placeholder.items()}
        )

    def concerns(self, host: str) -> bool:
        """Whether a secret may go to this host, so that its requests and replies are read."""
        return any(secret.goes_to(host) for secret in self._of)

    def filled(self, headers: Headers, host: str, *, secure: bool) -> Headers:
        """The headers with values in them. Raises Misplaced."""
        return [(name, self._fill(name, value, host, secure)) for name, value in headers]

    def check(self, where: str, text: bytes) -> None:
        """Raises Misplaced for a placeholder in the text, also behind percent signs."""
        for form in (text, _plain(text)) if b"%" in text else (text,):
            if found := _PLACEHOLDER.search(form):
                raise self.misplaced(found[0], where)

    def misplaced(self, placeholder: bytes, where: str) -> SecretMisuse:
        secret = self._by_placeholder.get(placeholder.lower())
        if secret is None:
            return SecretMisuse("", f"{where} holds a placeholder of no secret of this sandbox")
        return SecretMisuse(
            secret.name,
            f"{where} holds the placeholder of {secret.name}, which is for the header "
            f"{secret.header} of requests to {', '.join(secret.hosts)}",
        )

    def veil(self, host: str) -> RedactingStream:
        """For what this host answers."""
        there = tuple(secret for secret in self._of if secret.goes_to(host))
        if there not in self._searches:
            self._searches[there] = Search([(one.value, self._of[one]) for one in there])
        return RedactingStream(self._searches[there])

    def _fill(self, name: bytes, value: bytes, host: str, secure: bool) -> bytes:
        if (plain := password(value)) and _PLACEHOLDER.search(plain):
            filled = self._put(name, plain, host, secure)
            return value.split()[0] + b" " + base64.b64encode(filled)
        self._check_escaped(name, value)
        return self._put(name, value, host, secure)

    def _check_escaped(self, name: bytes, value: bytes) -> None:
        if not _PLACEHOLDER.search(value):
            self.check(f"the header {name.decode('latin-1')}", value)

    def _put(self, name: bytes, value: bytes, host: str, secure: bool) -> bytes:
        def one(found: re.Match[bytes]) -> bytes:
            secret = self._by_placeholder.get(found[0])
            if (
                secret is None
                or secret.header.lower().encode() != name.lower()
                or not secret.goes_to(host)
            ):
                where = f"the header {name.decode('latin-1')} of a request to {host}"
                raise self.misplaced(found[0], where)
            if not secure and not secret.allow_plain:
                raise SecretMisuse(
                    secret.name,
                    f"{secret.name} is not sent in clear text: ask {host} by https, or let the "
                    "policy say allow_plain",
                )
            return secret.value.encode()

        return _PLACEHOLDER.sub(one, value)


class PlaceholderScanner:
    """Looks for placeholders in what is sent, piece by piece."""

    def __init__(self, vault: SecretStore, where: str) -> None:
        self._vault = vault
        self._where = where
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        """Raises Misplaced. A part of a placeholder may have been passed on by then, never all."""
        seen = self._tail + piece
        if found := _PLACEHOLDER.search(seen):
            raise self._vault.misplaced(found[0], self._where)
        self._tail = seen[-(_LENGTH - 1) :]


def _plain(text: bytes) -> bytes:
    """Its percent signs undone so far as a placeholder could stand behind them, also thrice.

    Letter by letter: to undo them all takes 30 ms for a head full of them, which everybody waits.
    """
    text = text.lower()
    for _ in range(2):
        text = text.replace(b"%25", b"%")
    for escape, letter in _UNESCAPED:
        text = text.replace(escape, letter)
    return text
