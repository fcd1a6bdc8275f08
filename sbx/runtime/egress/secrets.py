"""Secrets that code inside uses and cannot read.

Inside stands a placeholder. In the header that the secret names, of a request to a host that it
names, the proxy puts the value in its place; anywhere else that it can see a placeholder, the
request is refused. Of what such a host answers, every form of the value that echoing servers are
known for is turned back into the placeholder.

    Secret   one of them
    Vault    those of one sandbox: its placeholders, what is filled in, what is refused
    Scan     whether a placeholder is in a stream, across its pieces
    Veil     a stream with placeholders where values were
"""

import base64
import binascii
import bisect
import html
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import quote, quote_plus

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
_ESCAPED = re.compile("%[0-9A-F]{2}")
_TEXT_OF_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPELLINGS = tuple(  # what frameworks make of a text, where Python makes something else of it
    str.maketrans(spelling)
    for spelling in (
        {letter: f"\\u{ord(letter):04x}" for letter in "&<>"} | {'"': r"\"", "\\": r"\\"},
        {letter: f"\\u{ord(letter):04X}" for letter in "\"&'+<>`"} | {"\\": r"\\"},
        _TEXT_OF_HTML | {'"': "&#34;", "'": "&#39;"},
        _TEXT_OF_HTML | {'"': "&#34;", "'": "&#39;", "+": "&#43;"},
        _TEXT_OF_HTML | {'"': "&quot;", "'": "&#39;"},
        _TEXT_OF_HTML | {'"': "&quot;", "'": "&#039;"},
        _TEXT_OF_HTML | {'"': "&quot;", "'": "&#39;", "/": "&#x2F;", "=": "&#x3D;", "`": "&#x60;"},
    )
)

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


class Misplaced(Exception):
    """A placeholder where no value may be put; the text says where, and for whom."""

    def __init__(self, secret: str, why: str) -> None:
        super().__init__(why)
        self.secret = secret


class Vault:
    """The secrets of one sandbox. Each has another placeholder in every sandbox."""

    def __init__(self, given: Mapping[str, Secret]) -> None:
        self._by_placeholder = {
            f"{MARK}{secrets.token_hex(_LETTERS // 2)}".encode(): secret
            for secret in given.values()
        }
        self._of = {secret: text for text, secret in self._by_placeholder.items()}
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

    def misplaced(self, placeholder: bytes, where: str) -> Misplaced:
        secret = self._by_placeholder.get(placeholder.lower())
        if secret is None:
            return Misplaced("", f"{where} holds a placeholder of no secret of this sandbox")
        return Misplaced(
            secret.name,
            f"{where} holds the placeholder of {secret.name}, which is for the header "
            f"{secret.header} of requests to {', '.join(secret.hosts)}",
        )

    def veil(self, host: str) -> "Veil":
        """For what this host answers."""
        return Veil(
            [(secret.value, text) for secret, text in self._of.items() if secret.goes_to(host)]
        )

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
                raise Misplaced(
                    secret.name,
                    f"{secret.name} is not sent in clear text: ask {host} by https, or let the "
                    "policy say allow_plain",
                )
            return secret.value.encode()

        return _PLACEHOLDER.sub(one, value)


class Scan:
    """Looks for placeholders in what is sent, piece by piece."""

    def __init__(self, vault: Vault, where: str) -> None:
        self._vault = vault
        self._where = where
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        """Raises Misplaced. A part of a placeholder may have been passed on by then, never all."""
        seen = self._tail + piece
        if found := _PLACEHOLDER.search(seen):
            raise self._vault.misplaced(found[0], self._where)
        self._tail = seen[-(_LENGTH - 1) :]


class Veil:
    """Puts placeholders in the place of values. What might be the beginning of a value is kept back
    until the next piece shows; all else is given at once, for a stream of events is waited for."""

    def __init__(self, hidden: Iterable[tuple[str, bytes]]) -> None:
        self._instead: dict[bytes, bytes] = {}
        for value, placeholder in hidden:
            for form in _forms(value):
                self._instead.setdefault(form, placeholder)
        longest_first = sorted(self._instead, key=len, reverse=True)
        self._any = re.compile(b"|".join(map(re.escape, longest_first))) if longest_first else None
        self._sorted = sorted(self._instead)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._first = frozenset(form[0] for form in longest_first)
        # A plain search runs at memory's speed, and the expression at a hundredth of it.
        self._beginnings = frozenset(form[:_SHORTEST] for form in longest_first)
        self._held = b""

    def over(self, text: bytes) -> bytes:
        """A text that is whole."""
        if self._any is None:
            return text
        return self._any.sub(lambda found: self._instead[found[0]], text)

    def feed(self, piece: bytes) -> bytes:
        if self._any is None:
            return piece
        data = self._held + piece
        safe = len(data) - self._unsure(data)
        if not any(beginning in data for beginning in self._beginnings):
            self._held = data[safe:]
            return data[:safe]
        out, at = [], 0
        for found in self._any.finditer(data):
            if found.start() >= safe:
                break
            out += [data[at : found.start()], self._instead[found[0]]]
            at = found.end()
        end = max(at, safe)
        out.append(data[at:end])
        self._held = data[end:]
        return b"".join(out)

    def end(self) -> bytes:
        """What was kept back."""
        held, self._held = self._held, b""
        return self.over(held)

    def _unsure(self, data: bytes) -> int:
        """How many bytes at the end could be the beginning of a form."""
        for size in range(min(self._longest - 1, len(data)), 0, -1):
            if data[-size] not in self._first:
                continue
            tail = data[-size:]
            index = bisect.bisect_left(self._sorted, tail)
            if index < len(self._sorted) and self._sorted[index].startswith(tail):
                return size
        return 0


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


def _forms(value: str) -> Iterator[bytes]:
    """The value as servers echo it: in text, URLs, JSON, HTML, UTF-16 and base64."""
    quoted = json.dumps(value)[1:-1]
    spelt = [value, quoted, quoted.replace("/", r"\/"), html.escape(value)]
    for url in (quote(value, safe=""), quote(value), quote_plus(value), quote(value, safe="!*'()")):
        spelt += [url, _ESCAPED.sub(lambda found: found[0].lower(), url)]
    for form in (*spelt, *map(value.translate, _SPELLINGS)):
        yield form.encode()
    yield value.encode("utf-16-le")[:-1]  # which is in both orders of bytes
    for shift in range(3):  # wherever in a longer text it stands, as in user:password
        padded = b"\0" * shift + value.encode()
        first, end = (0, 2, 3)[shift], len(padded) * 8 // 6
        for coded in (base64.b64encode(padded), base64.urlsafe_b64encode(padded)):
            yield coded[first:end]
