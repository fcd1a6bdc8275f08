"""The addresses that are not of the public Internet, and the kind of each.

`ipaddress` has most of them, but its answers changed between releases of Python 3.11, and it treats
an IPv4 address inside an IPv6 address as an IPv6 address. So this table comes first. Addresses that
carry another one (mapped, 6to4, NAT64, Teredo) are refused as such: no honest reply of a resolver
needs them, and sbx cannot know whether Linux, a router or a tunnel unpacks them.
"""

import asyncio
import ipaddress
from collections.abc import Sequence

from sbx.egress.resolver import Lookup, NotReached, Resolver
from sbx.policy import destinations

_METADATA = "an address where clouds hand out credentials"
_KINDS: tuple[tuple[str, str], ...] = (  # the first that holds gives its name
    ("169.254.169.254/32", _METADATA),
    ("169.254.170.0/24", _METADATA),  # of containers
    ("100.100.100.200/32", _METADATA),
    ("168.63.129.16/32", _METADATA),  # looks public, and is the host of a virtual machine
    ("192.0.0.192/32", _METADATA),
    ("fd00:ec2::/32", _METADATA),
    ("fd20:ce::/32", _METADATA),
    ("0.0.0.0/8", "an unspecified address"),  # Linux connects 0.0.0.0 to itself
    ("127.0.0.0/8", "a loopback address"),
    ("10.0.0.0/8", "a private address"),
    ("172.16.0.0/12", "a private address"),
    ("192.168.0.0/16", "a private address"),
    ("100.64.0.0/10", "a carrier's shared address"),
    ("169.254.0.0/16", "a link-local address"),
    ("192.0.0.0/24", "a reserved address"),
    ("192.0.2.0/24", "an address for documentation"),
    ("192.88.99.0/24", "a 6to4 relay"),
    ("198.18.0.0/15", "an address for benchmarks"),
    ("198.51.100.0/24", "an address for documentation"),
    ("203.0.113.0/24", "an address for documentation"),
    ("224.0.0.0/4", "a multicast address"),
    ("240.0.0.0/4", "a reserved address"),  # and the broadcast
    ("::/128", "an unspecified address"),
    ("::1/128", "a loopback address"),
    ("::ffff:0:0/96", "an IPv4 address inside an IPv6 one"),
    ("::/96", "an IPv4 address inside an IPv6 one"),
    ("::ffff:0:0:0/96", "an IPv4 address inside an IPv6 one"),
    ("64:ff9b::/96", "an IPv4 address inside a NAT64 one"),
    ("64:ff9b:1::/48", "an IPv4 address inside a NAT64 one"),
    ("100::/64", "a reserved address"),
    ("2001::/32", "an IPv4 address inside a Teredo one"),
    ("2001::/23", "a reserved address"),
    ("2001:db8::/32", "an address for documentation"),
    ("2002::/16", "an IPv4 address inside a 6to4 one"),
    ("3fff::/20", "an address for documentation"),
    ("5f00::/16", "a reserved address"),
    ("fc00::/7", "a private address"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a site-local address"),
    ("ff00::/8", "a multicast address"),
)
_NETWORKS = tuple((ipaddress.ip_network(text), kind) for text, kind in _KINDS)
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that has been given out so far
_INVALID = "an invalid address"
_NOTES_S = 5.0  # for the look-ups of one policy
_NEVER = frozenset({"an unspecified address", "a multicast address"})
_BY_NAME = frozenset({"a private address", "a carrier's shared address", "a loopback address"})


def reserved(address: str) -> str | None:
    """Return the kind of the address, for a sentence; None for the public Internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return _INVALID
    if getattr(parsed, "scope_id", None) is not None:
        return "an address of one link"
    for network, kind in _NETWORKS:
        if parsed.version == network.version and parsed in network:
            return kind
    if not parsed.is_global or (parsed.version == 6 and parsed not in _UNICAST):
        return "a reserved address"
    return None


def is_exempt(address: str, host: str, allow_private: tuple[str, ...]) -> bool:
    """Return whether the policy allows this address, although it is not public.

    An entry with an address or a network allows exactly that. An entry with a host allows only a
    host of the own network: its DNS must not lead to a metadata service or into a tunnel.
    """
    kind = reserved(address)
    if kind in _NEVER or kind == _INVALID:
        return False
    parsed = ipaddress.ip_address(address)
    for entry in allow_private:
        try:
            network = ipaddress.ip_network(entry)
        except ValueError:
            if kind in _BY_NAME and destinations.host_covers(entry, host):
                return True
        else:
            if parsed.version == network.version and parsed in network:
                return True
    return False


async def refused_names(allow_private: Sequence[str], lookup: Lookup) -> list[str]:
    """Return a note for each name in `allow_private` that leads to an address which an entry by
    name does not allow. A name that is not resolved in time has no note."""
    resolver = Resolver(lookup, _NOTES_S)
    try:
        notes = await asyncio.gather(*(_refused_name(name, resolver) for name in allow_private))
    finally:
        await resolver.close()
    return [note for note in notes if note is not None]


async def _refused_name(entry: str, resolver: Resolver) -> str | None:
    if destinations.is_address(entry) or "*" in entry or "/" in entry:
        return None
    try:
        addresses = await resolver.resolve(entry, 443)
    except NotReached:
        return None
    for address in addresses:
        kind = reserved(address)
        if kind is not None and not is_exempt(address, entry, (entry,)):
            advice = "no entry allows it" if kind in _NEVER else "list the address itself"
            return (
                f"network.allow_private: {entry} leads to {address}, {kind}, which an entry by name"
                f" does not allow; {advice}"
            )
    return None
