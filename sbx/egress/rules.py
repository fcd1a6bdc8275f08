"""What may go out: pure decisions over a policy's network and what is known of a request.

    Asked     what somebody inside asks for, as far as it is known: first where to, then which
              addresses that has, then what the first TLS message says
    judge     → Verdict: allowed by which entry, or refused by which rule, in a sentence
    Decision  what is recorded of it

Hosts in here are canonical (hosts.py); the policy's are by themselves.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from sbx.egress.addresses import is_exempt, reserved
from sbx.egress.hosts import NoHost, canonical, is_address
from sbx.policy import destinations
from sbx.policy.model import Network

# What one server takes for a path and another for one above it, or for two.
_AMBIGUOUS = re.compile(r"//|\\|%(?:2[fF]|5[cC]|25|00)|(?:^|/)\.{1,2}(?:[/;]|$)")


_parsed = lru_cache(4096)(destinations.parse)


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What the first message of TLS says of the host that is meant."""

    sni: str | None


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """What is asked for. `path` (with its query) is None where it cannot be seen, and so are
    `addresses` and `hello` before they are known. `own` are those of `addresses` that are this
    host's."""

    method: str
    host: str
    port: int
    path: str | None = None
    addresses: tuple[str, ...] | None = None
    hello: ClientHello | None = None
    own: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RuleResult:
    """`rule` is the key of the policy that decided, with its entry where one allowed."""

    allowed: bool
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class EgressDecision:
    """What is recorded: once when it is decided, and of what was allowed once more at its end
    (`ended`), with the bytes from (`bytes_in`) and to (`bytes_out`) the host outside. What was
    allowed and then cut off is not `allowed` at its end, and `rule` says by what."""

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


def judge(network: Network, asked: ProxyRequest) -> RuleResult:
    """By all that is known of it. Whoever comes to know more asks again."""
    entry = next((entry for entry in network.allow if _names(entry, asked)), None)
    if entry is None:
        return RuleResult(False, "network.allow", _unlisted(network, asked))
    return (
        _by_rules(network, asked)
        or _by_addresses(network, asked)
        or _by_hello(asked)
        or RuleResult(True, f"network.allow: {entry}", "")
    )


def has_rules(network: Network, host: str) -> bool:
    """Whether what is asked of this host must be read to be judged."""
    return any(destinations.host_covers(rule.host, host) for rule in network.rule)


def _names(entry: str, asked: ProxyRequest) -> bool:
    return _parsed(entry).covers(destinations.Destination(asked.host, asked.port))


def _unlisted(network: Network, asked: ProxyRequest) -> str:
    if any(destinations.host_covers(_parsed(entry).host, asked.host) for entry in network.allow):
        return f"{asked.host} may be reached, but not at port {asked.port}"
    return f"{asked.host} is not in the policy's network.allow"


def _by_rules(network: Network, asked: ProxyRequest) -> RuleResult | None:
    """Of several rules for a host one must let it through; a host without any is free."""
    if asked.path is None:
        return None
    rules = [rule for rule in network.rule if destinations.host_covers(rule.host, asked.host)]
    if not rules:
        return None
    path = asked.path.partition("?")[0]
    plain = unquote(path)
    unclear = _AMBIGUOUS.search(path) or _AMBIGUOUS.search(plain)
    if any(rule.paths != "any" for rule in rules) and unclear:
        return RuleResult(
            False, "network.rule", "the path could be read in two ways, and rules hang on it"
        )
    methods = [rule for rule in rules if rule.methods == "any" or asked.method in rule.methods]
    if not methods:
        return RuleResult(False, "network.rule", f"{asked.host} may not be asked by {asked.method}")
    if not any(
        rule.paths == "any" or any(_leads(one, plain) for one in rule.paths) for rule in methods
    ):
        return RuleResult(
            False, "network.rule", f"{asked.host} may not be asked by {asked.method} for this path"
        )
    return None


def _leads(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


_OWN = "an address of the machine itself"


def _by_addresses(network: Network, asked: ProxyRequest) -> RuleResult | None:
    """One address that may not be reached spoils them all: a name that leads to the Internet and
    to the inside of somebody's network is an attack or a mistake."""
    for address in asked.addresses or ():
        kind = reserved(address) or (_OWN if address in asked.own else None)
        if kind is not None and not is_exempt(address, asked.host, network.allow_private):
            leads = "is" if address == asked.host else f"leads to {address},"
            return RuleResult(
                False,
                "network.allow_private",
                f"{asked.host} {leads} {kind}, and not in the policy's network.allow_private",
            )
    return None


def _by_hello(asked: ProxyRequest) -> RuleResult | None:
    if asked.hello is None:
        return None
    sni = asked.hello.sni
    if sni is None:
        if is_address(asked.host):
            return None  # TLS has no server name for an address
        return RuleResult(False, "tls.sni", f"the TLS to {asked.host} names no server")
    try:
        meant = canonical(sni)
    except NoHost:
        meant = None
    if meant != asked.host:
        named = meant or "something that is no host"
        return RuleResult(False, "tls.sni", f"the TLS to {asked.host} names {named} as the server")
    return None
