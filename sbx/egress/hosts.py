"""One spelling of each host, so that sbx judges, resolves, compares and sends the same text.

A name is in lower case, without the dot at its end, in IDNA 2008 (after the mapping of UTS 46, as
in browsers), with percent signs decoded once. An address is as `ipaddress` writes it. A text that
another program could read as another host is invalid: `127.1`, `0x7f.0.0.1` and `2130706433` are
names to us and addresses to the resolver of libc, and `a%2eb` differs if it is decoded twice.
"""

import ipaddress
import re
from urllib.parse import unquote_to_bytes

import idna

from sbx.policy.destinations import spelling

_LONGEST = 253
_TEXT_MAX = 1024  # before it becomes a name; idna is slow with long texts
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_LIKE_A_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/?#@\\\s]+)(?::([0-9]{1,5}))?")


class NoHost(ValueError):
    """The text does not name a host, or could name two."""


def canonical(text: str) -> str:
    """Return the host in `text`: a name, or an address without brackets. Raise NoHost."""
    if len(text) > _TEXT_MAX:
        raise NoHost("it is too long")
    if text.startswith("[") and text.endswith("]"):
        return _address(text[1:-1], ipaddress.IPv6Address)
    name = _ascii(_unquoted(text)).removesuffix(".")
    if len(name) > _LONGEST:
        raise NoHost("it is too long")
    labels = name.split(".")
    if _LIKE_A_NUMBER.fullmatch(labels[-1]):
        return _address(name, ipaddress.IPv4Address)
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise NoHost("it has a letter that hosts do not have, or an empty or overlong part")
    return name


def authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise NoHost("it is not written host:port")
    port = int(match[2]) if match[2] else default_port
    if port is None or not 1 <= port <= 65535:
        raise NoHost("it has no port from 1 to 65535")
    return canonical(match[1]), port


def written(host: str, port: int, default_port: int | None) -> str:
    """Return `host:port` for a Host header, without the port of the scheme."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port == default_port else f"{bracketed}:{port}"


def is_address(host: str) -> bool:
    return ":" in host or (
        host[-1].isdigit() and _LIKE_A_NUMBER.fullmatch(host.split(".")[-1]) is not None
    )


def _unquoted(text: str) -> str:
    try:
        plain = unquote_to_bytes(text).decode()
    except UnicodeError:
        raise NoHost("it is not UTF-8") from None
    if "%" in plain:
        raise NoHost("its percent signs are escaped twice")
    return plain


def _ascii(text: str) -> str:
    """Use idna only for names that need it: it refuses underscores, which host names may have."""
    if text.isascii():
        name = text.lower()
        if "xn--" not in name:
            return name
    try:
        name = idna.encode(text, uts46=True).decode("ascii").lower()
    except UnicodeError:  # the errors of idna are subclasses
        raise NoHost("it is not a name by IDNA 2008") from None
    return name


def _address(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> str:
    try:
        if "%" in text:
            raise ValueError("a zone is of this machine's links")
        return spelling(kind(text))
    except ValueError:
        raise NoHost("it looks like an address, but is not a valid one") from None
