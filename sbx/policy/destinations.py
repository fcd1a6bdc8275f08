"""Hosts in a policy: `example.org`, `*.example.org:8443`, `192.0.2.7`, `[2001:db8::7]:443`.

`localhost` and `host.sbx` name the loopback of the host. A wildcard matches every name below a
domain and not the domain itself. An entry without a port means the two default ports of the web.
Names are compared as text, addresses by their value.
"""

import ipaddress
import re
from typing import NamedTuple

LOOPBACK = ("127.0.0.1", "::1")
THIS_HOST = frozenset({"localhost", "host.sbx"})
DEFAULT_PORTS = frozenset({80, 443})
_DOMAIN = re.compile(
    r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
)
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class Destination(NamedTuple):
    """One entry of `network.allow`.

    `host` is a name, `*.` and a name, or an address as Linux writes it, without brackets. `port`
    None stands for `DEFAULT_PORTS`.
    """

    host: str
    port: int | None = None

    @property
    def ports(self) -> frozenset[int]:
        return DEFAULT_PORTS if self.port is None else frozenset({self.port})

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def covers(self, other: "Destination") -> bool:
        """Return whether this entry includes every host and port of `other`."""
        return host_covers(self.host, other.host) and self.ports >= other.ports


def parse(text: str) -> Destination:
    """Parse a destination. Raise ValueError if it is invalid or not in its canonical form."""
    host, port = _split(text)
    if not is_name(host) and not is_address(host):
        raise ValueError(f"{text} does not name a host")
    if port and not (_PORT.fullmatch(port) and int(port) <= 65535):
        raise ValueError(f"{text} has no port from 1 to 65535")
    destination = Destination(host, int(port) if port else None)
    if str(destination) != text:
        raise ValueError(f"the canonical form of {text} is {destination}")
    return destination


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        return host if closed else "", port.removeprefix(":")
    host, _, port = text.partition(":")
    return host, port


def is_name(text: str) -> bool:
    """Return whether the text is a domain, or a wildcard for all names below one, in lower case."""
    return text in THIS_HOST or (len(text) <= 253 and _DOMAIN.fullmatch(text) is not None)


def is_address(text: str) -> bool:
    """Return whether the text is the address of one host, in canonical form and without a zone."""
    try:
        return spelling(ipaddress.ip_address(text)) == text and "%" not in text
    except ValueError:
        return False


def spelling(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return the canonical form of an address.

    Python 3.13 ends a mapped address with dotted digits, and earlier versions do not.
    """
    if isinstance(address, ipaddress.IPv6Address) and (mapped := address.ipv4_mapped) is not None:
        high, low = divmod(int(mapped), 1 << 16)
        return f"::ffff:{high:x}:{low:x}"
    return str(address)


def host_covers(pattern: str, other: str) -> bool:
    """Return whether `pattern` includes `other`, which is a host or a pattern of hosts."""
    return pattern == other or (pattern.startswith("*.") and other.endswith(pattern[1:]))


def overlap(pattern: str, other: str) -> bool:
    """Return whether some host matches both patterns. Of two patterns, one includes the other or
    they share no host."""
    return host_covers(pattern, other) or host_covers(other, pattern)
