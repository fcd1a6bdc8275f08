"""What may go out, decided over whole values."""

import pytest
from msgspec.structs import replace

from sbx.egress.addresses import refused_names
from sbx.egress.resolver import own
from sbx.egress.rules import ClientHello, ProxyRequest, RuleResult, judge
from sbx.policy import destinations
from sbx.policy.tables import Network, NetworkRule

NETWORK = Network(
    mode="proxy",
    allow=(
        "example.org",
        "*.example.org:8443",
        "93.184.216.34",
        "[2606:4700::1111]:443",
        "ruled.example",
        "intranet.example",
        "10.0.0.5",
    ),
    rule=(
        NetworkRule(host="ruled.example", methods=("GET",), paths=("/v1/*", "/health")),
        NetworkRule(host="ruled.example", methods=("POST",), paths=("/v1/jobs",)),
    ),
    allow_private=("intranet.example", "10.0.0.0/28"),
)
UNLISTED = "network.allow"


def allowed(entry: str) -> RuleResult:
    return RuleResult(True, f"network.allow: {entry}", "")


@pytest.mark.parametrize(
    ("host", "port", "verdict"),
    [
        ("example.org", 443, allowed("example.org")),
        ("example.org", 80, allowed("example.org")),
        (
            "example.org",
            8443,
            RuleResult(False, UNLISTED, "example.org may be reached, but not at port 8443"),
        ),
        ("a.example.org", 8443, allowed("*.example.org:8443")),
        ("a.b.example.org", 8443, allowed("*.example.org:8443")),
        (
            "a.example.org",
            443,
            RuleResult(False, UNLISTED, "a.example.org may be reached, but not at port 443"),
        ),
        (
            "notexample.org",
            8443,
            RuleResult(False, UNLISTED, "notexample.org is not in the policy's network.allow"),
        ),
        (
            "example.org.evil.example",
            443,
            RuleResult(
                False, UNLISTED, "example.org.evil.example is not in the policy's network.allow"
            ),
        ),
        ("93.184.216.34", 443, allowed("93.184.216.34")),
        ("2606:4700::1111", 443, allowed("[2606:4700::1111]:443")),
        (
            "93.184.216.35",
            443,
            RuleResult(False, UNLISTED, "93.184.216.35 is not in the policy's network.allow"),
        ),
    ],
)
def test_judge_knows_hosts_and_ports(host: str, port: int, verdict: RuleResult) -> None:
    assert judge(NETWORK, ProxyRequest("CONNECT", host, port)) == verdict


def test_judge_allows_nothing_where_nothing_is_listed() -> None:
    asked = ProxyRequest("CONNECT", "example.org", 443)
    assert judge(Network(mode="proxy"), asked) == RuleResult(
        False, UNLISTED, "example.org is not in the policy's network.allow"
    )


BY_PATH = RuleResult(
    False, "network.rule", "GET requests to ruled.example are not allowed for this path"
)
UNCLEAR = RuleResult(
    False, "network.rule", "the path could be read in two ways, and rules depend on it"
)


@pytest.mark.parametrize(
    ("method", "path", "verdict"),
    [
        ("GET", "/v1/", allowed("ruled.example")),
        ("GET", "/v1/a/b?next=/../..//", allowed("ruled.example")),
        ("GET", "/health", allowed("ruled.example")),
        ("GET", "/%68ealth", allowed("ruled.example")),
        ("POST", "/v1/jobs", allowed("ruled.example")),
        ("GET", "/healthy", BY_PATH),
        ("GET", "/", BY_PATH),
        ("GET", "/V1/", BY_PATH),
        (
            "POST",
            "/v1/",
            RuleResult(
                False,
                "network.rule",
                "POST requests to ruled.example are not allowed for this path",
            ),
        ),
        (
            "DELETE",
            "/v1/jobs",
            RuleResult(False, "network.rule", "DELETE requests to ruled.example are not allowed"),
        ),
        ("GET", "/v1/../admin", UNCLEAR),
        ("GET", "/v1/%2e%2e/admin", UNCLEAR),
        ("GET", "/v1/..;/admin", UNCLEAR),
        ("GET", "/v1/..", UNCLEAR),
        ("GET", "/v1/..%2fadmin", UNCLEAR),
        ("GET", "/v1/%252e%252e/admin", UNCLEAR),
        ("GET", "/v1/..\\admin", UNCLEAR),
        ("GET", "/v1//admin", UNCLEAR),
    ],
)
def test_judge_knows_methods_and_paths(method: str, path: str, verdict: RuleResult) -> None:
    assert judge(NETWORK, ProxyRequest(method, "ruled.example", 80, path)) == verdict


def test_judge_leaves_paths_of_hosts_without_rules_alone() -> None:
    asked = ProxyRequest("PURGE", "example.org", 80, "/a//../%2f")
    assert judge(NETWORK, asked) == allowed("example.org")


def private(host: str, what: str) -> RuleResult:
    reason = f"{host} {what}, and not in the policy's network.allow_private"
    return RuleResult(False, "network.allow_private", reason)


@pytest.mark.parametrize(
    ("host", "addresses", "verdict"),
    [
        ("example.org", ("93.184.216.34", "2606:4700::1111"), allowed("example.org")),
        (
            "example.org",
            ("93.184.216.34", "10.1.2.3"),
            private("example.org", "leads to 10.1.2.3, a private address"),
        ),
        (
            "example.org",
            ("10.0.0.5",),  # a network of allow_private, whoever's name leads there
            allowed("example.org"),
        ),
        (
            "example.org",
            ("169.254.169.254",),
            private(
                "example.org",
                "leads to 169.254.169.254, an address where clouds hand out credentials",
            ),
        ),
        ("intranet.example", ("192.168.7.7", "fd12::1"), allowed("intranet.example")),
        ("intranet.example", ("127.0.0.1",), allowed("intranet.example")),
        (
            "intranet.example",
            ("169.254.169.254",),
            private(
                "intranet.example",
                "leads to 169.254.169.254, an address where clouds hand out credentials",
            ),
        ),
        (
            "intranet.example",
            ("::ffff:10.0.0.5",),
            private(
                "intranet.example",
                "leads to ::ffff:10.0.0.5, an IPv4 address inside an IPv6 one",
            ),
        ),
        ("10.0.0.5", ("10.0.0.5",), allowed("10.0.0.5")),
    ],
)
def test_judge_knows_addresses(host: str, addresses: tuple[str, ...], verdict: RuleResult) -> None:
    assert judge(NETWORK, ProxyRequest("CONNECT", host, 443, addresses=addresses)) == verdict


def test_judge_refuses_a_public_address_that_is_the_machine_s_own() -> None:
    public = "93.184.216.34"
    asked = ProxyRequest(
        "CONNECT", "example.org", 443, addresses=(public,), own=frozenset({public})
    )
    verdict = private("example.org", f"leads to {public}, an address of the machine itself")
    assert judge(NETWORK, asked) == verdict
    meant = NETWORK.model_copy(update={"allow_private": (f"{public}/32",)})
    assert judge(meant, asked) == allowed("example.org")
    assert judge(NETWORK, replace(asked, own=frozenset())) == allowed("example.org")


def test_own_addresses_are_those_that_linux_would_come_from() -> None:
    assert own(("127.0.0.1", "93.184.216.34", "127.0.0.2")) == {"127.0.0.1"}
    assert own(("no address", "2001:db8::1")) == frozenset()


def test_judge_refuses_an_address_that_is_listed_and_private() -> None:
    network = Network(mode="proxy", allow=("10.0.0.5",))
    asked = ProxyRequest("GET", "10.0.0.5", 80, "/", addresses=("10.0.0.5",))
    assert judge(network, asked) == private("10.0.0.5", "is a private address")


@pytest.mark.parametrize(
    ("host", "sni", "verdict"),
    [
        ("example.org", "example.org", allowed("example.org")),
        ("example.org", "EXAMPLE.org.", allowed("example.org")),
        (
            "example.org",
            "evil.example",
            RuleResult(False, "tls.sni", "the TLS to example.org names evil.example as the server"),
        ),
        (
            "example.org",
            "a b",
            RuleResult(
                False,
                "tls.sni",
                "the TLS to example.org names an invalid host as the server",
            ),
        ),
        (
            "example.org",
            None,
            RuleResult(False, "tls.sni", "the TLS to example.org names no server"),
        ),
        ("93.184.216.34", None, allowed("93.184.216.34")),
        (
            "93.184.216.34",
            "example.org",
            RuleResult(
                False, "tls.sni", "the TLS to 93.184.216.34 names example.org as the server"
            ),
        ),
    ],
)
def test_judge_knows_the_server_that_tls_names(
    host: str, sni: str | None, verdict: RuleResult
) -> None:
    assert judge(NETWORK, ProxyRequest("CONNECT", host, 443, hello=ClientHello(sni))) == verdict


@pytest.mark.parametrize(
    ("host", "address", "is_allowed"),
    [
        ("127.0.0.1", "127.0.0.1", False),  # not in allow_private
        ("localhost", "::1", True),
        ("host.sbx", "127.0.0.1", True),
        ("rebound.example", "127.0.0.1", False),  # its DNS must not lead to the host
    ],
)
def test_a_name_of_this_host_is_a_private_host_as_others(
    host: str, address: str, is_allowed: bool
) -> None:
    names = ("127.0.0.1", "localhost", "host.sbx", "rebound.example")
    network = Network(mode="proxy", allow=names, allow_private=names[1:3])
    request = ProxyRequest("GET", host, 80, addresses=(address,))
    assert judge(network, request).allowed is is_allowed


@pytest.mark.parametrize("name", ["localhost", "host.sbx:8124", "localhost:1"])
def test_names_of_the_host_are_destinations(name: str) -> None:
    assert str(destinations.parse(name)) == name


@pytest.mark.parametrize(
    ("address", "note"),
    [
        ("10.1.2.3", None),
        ("127.0.0.1", None),
        ("93.184.216.34", None),
        ("198.18.0.7", "198.18.0.7, an address for benchmarks, which an entry by name does not"),
        ("169.254.169.254", "169.254.169.254, an address where clouds hand out credentials"),
        ("0.0.0.0", "no entry allows it"),  # an address of a reply
    ],
)
async def test_a_private_name_without_effect_is_noted(address: str, note: str | None) -> None:
    async def lookup(_host: str, _port: int) -> list[str]:
        return [address]

    entries = ("crm.example", "192.0.2.0/24", "192.0.2.1")
    notes = await refused_names(entries, lookup)
    assert bool(notes) == (note is not None)
    assert all(note in text and "crm.example" in text for text in notes if note)


async def test_an_unknown_private_name_has_no_note() -> None:
    async def lookup(_host: str, _port: int) -> list[str]:
        raise OSError("unknown")

    assert await refused_names(("crm.example",), lookup) == []
