"""Decide about requests: pure functions of the network of a policy and the known parts of a
request.

    ProxyRequest    the known parts: first the host, then its addresses, then the first TLS message
    judge           → RuleResult: the entry that allows it, or the rule that refuses it, and why
    EgressDecision  the record of a decision

Hosts here are canonical (hosts.py), and so are those of a policy.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import unquote

from msgspec import Struct

from sbx.egress.addresses import is_exempt, reserved
from sbx.egress.hosts import NoHost, canonical, is_address
from sbx.policy import destinations
from sbx.policy.tables import Network

# One server reads these as a path, and another one as a path above it, or as two.
_AMBIGUOUS = re.compile(r"//|\\|%(?:2[fF]|5[cC]|25|00)|(?:^|/)\.{1,2}(?:[/;]|$)")


UNLISTED = "network.allow"  # the rule that refuses a host or a port which no entry names
_parsed = lru_cache(4096)(destinations.parse)


class ClientHello(Struct, frozen=True):
    """The server name in the first message of TLS."""

    sni: str | None


class ProxyRequest(Struct, frozen=True):
    """A request, or the parts of it that are known. `path` (with its query) is None if the proxy
    cannot see it. `own` are those of `addresses` that belong to this host."""

    method: str
    host: str
    port: int
    path: str | None = None
    addresses: tuple[str, ...] | None = None
    hello: ClientHello | None = None
    own: frozenset[str] = frozenset()


class RuleResult(Struct, frozen=True):
    """`rule` is the key of the policy that decided, with the entry if one allowed."""

    allowed: bool
    rule: str
    reason: str


class EgressDecision(Struct, frozen=True):
    """A record of the decision about a request. An allowed request has a second one at its end
    (`ended`), with the bytes from (`bytes_in`) and to (`bytes_out`) the host. If a rule cut the
    request off, that record is not `allowed` and has the `rule`."""

    at: float
    sandbox: str
    allowed: bool
    rule: str
    host: str
    port: int
    method: str
    path: str | None
    address: str | None
    reason: str
    bytes_in: int = 0
    bytes_out: int = 0
    ended: bool = False


def judge(network: Network, request: ProxyRequest, granted: Sequence[str] = ()) -> RuleResult:
    """Decide by all known parts of a request. Call it again when more parts are known.

    `granted` are entries in addition to `network.allow`. All other rules apply to their hosts too.
    """
    entry = next((entry for entry in network.allow if _names(entry, request)), None)
    grant = next((entry for entry in granted if _names(entry, request)), None)
    if entry is None and grant is None:
        return RuleResult(False, UNLISTED, _unlisted(network, request))
    rule = f"{UNLISTED}: {entry}" if entry is not None else f"grant: {grant}"
    return (
        _by_rules(network, request)
        or _by_addresses(network, request)
        or _by_hello(request)
        or RuleResult(True, rule, "")
    )


def has_rules(network: Network, host: str) -> bool:
    """Return whether requests to this host must be read to be judged."""
    return any(destinations.host_covers(rule.host, host) for rule in network.rule)


def _names(entry: str, request: ProxyRequest) -> bool:
    return _parsed(entry).covers(destinations.Destination(request.host, request.port))


def _unlisted(network: Network, request: ProxyRequest) -> str:
    if any(destinations.host_covers(_parsed(entry).host, request.host) for entry in network.allow):
        return f"{request.host} may be reached, but not at port {request.port}"
    return f"{request.host} is not in the policy's network.allow"


def _by_rules(network: Network, request: ProxyRequest) -> RuleResult | None:
    """Return a refusal if the host has rules and none of them allows the request."""
    if request.path is None:
        return None
    rules = [rule for rule in network.rule if destinations.host_covers(rule.host, request.host)]
    if not rules:
        return None
    path = request.path.partition("?")[0]
    plain = unquote(path)
    unclear = _AMBIGUOUS.search(path) or _AMBIGUOUS.search(plain)
    if any(rule.paths != "any" for rule in rules) and unclear:
        return RuleResult(
            False, "network.rule", "the path could be read in two ways, and rules depend on it"
        )
    methods = [rule for rule in rules if rule.methods == "any" or request.method in rule.methods]
    if not methods:
        return RuleResult(
            False, "network.rule", f"{request.method} requests to {request.host} are not allowed"
        )
    if not any(
        rule.paths == "any" or any(_leads(pattern, plain) for pattern in rule.paths)
        for rule in methods
    ):
        return RuleResult(
            False,
            "network.rule",
            f"{request.method} requests to {request.host} are not allowed for this path",
        )
    return None


def _leads(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


_OWN = "an address of the machine itself"


def _by_addresses(network: Network, request: ProxyRequest) -> RuleResult | None:
    """Refuse all addresses if one is not allowed: a name that leads to the Internet and into a
    private network is an attack or a mistake."""
    for address in request.addresses or ():
        kind = reserved(address) or (_OWN if address in request.own else None)
        if kind is not None and not is_exempt(address, request.host, network.allow_private):
            leads = "is" if address == request.host else f"leads to {address},"
            return RuleResult(
                False,
                "network.allow_private",
                f"{request.host} {leads} {kind}, and not in the policy's network.allow_private",
            )
    return None


def _by_hello(request: ProxyRequest) -> RuleResult | None:
    if request.hello is None:
        return None
    sni = request.hello.sni
    if sni is None:
        if is_address(request.host):
            return None  # TLS has no server name for an address
        return RuleResult(False, "tls.sni", f"the TLS to {request.host} names no server")
    try:
        meant = canonical(sni)
    except NoHost:
        meant = None
    if meant != request.host:
        named = meant or "an invalid host"
        return RuleResult(
            False, "tls.sni", f"the TLS to {request.host} names {named} as the server"
        )
    return None
