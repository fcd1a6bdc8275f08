"""One spelling of each host, and whose an address is."""

import pytest

from sbx.egress.addresses import is_exempt, reserved
from sbx.egress.hosts import NoHost, authority, canonical, is_address, written


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("example.org", "example.org"),
        ("EXAMPLE.Org.", "example.org"),
        ("ex%61mple.org", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("B%C3%BCCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("\uff45xample\u3002org", "example.org"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("127.0.0.1", "127.0.0.1"),
        ("\uff11\uff12\uff17.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[2001:DB8:0::7]", "2001:db8::7"),
        ("[::ffff:127.0.0.1]", "::ffff:7f00:1"),
    ],
)
def test_canonical_spells_a_host_in_one_way(text: str, host: str) -> None:
    assert canonical(text) == host


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "a..b", ".a", "a.org..", "-a.org", "a-.org", "a" * 64 + ".org", "a." * 130),
        *("127.1", "0x7f.0.0.1", "0x7f000001", "2130706433", "0177.0.0.1", "1.2.3.4.5", "a.0x"),
        *("256.1.1.1", "01.2.3.4", "[::1", "::1", "[127.0.0.1]", "[fe80::1%eth0]", "[::1%25lo]"),
        *("ex%2561mple.org", "a%00b.org", "a%2fb.org", "a b.org", "a\tb", "a\nb.org", "a%ff.org"),
        *("user@example.org", "a:b", "a/b", "a?b", "a#b", "a\\b", "*.example.org", "xn--a.org"),
    ],
)
def test_canonical_refuses_what_could_be_read_otherwise(text: str) -> None:
    with pytest.raises(NoHost):
        canonical(text)


def test_authority_takes_host_and_port() -> None:
    assert authority("Example.org:8443") == ("example.org", 8443)
    assert authority("[2001:db8::7]:443") == ("2001:db8::7", 443)
    assert authority("example.org", 80) == ("example.org", 80)


@pytest.mark.parametrize(
    "text",
    ["example.org", "a:0", "a:65536", "a:-1", "a:", "a:1:2", ":1", "[::1]", "u@a:1", "a:99999999"],
)
def test_authority_without_a_port_that_there_is_is_none(text: str) -> None:
    with pytest.raises(NoHost):
        authority(text)


def test_written_leaves_out_the_port_of_the_scheme() -> None:
    assert written("example.org", 443, 443) == "example.org"
    assert written("example.org", 8443, 443) == "example.org:8443"
    assert written("2001:db8::7", 80, 443) == "[2001:db8::7]:80"


def test_is_address() -> None:
    assert is_address("127.0.0.1")
    assert is_address("::1")
    assert not is_address("example.org")
    assert not is_address("a1.example2")


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("93.184.216.34", None),
        ("2606:4700::1111", None),
        ("10.0.0.1", "a private address"),
        ("172.31.255.255", "a private address"),
        ("172.32.0.1", None),
        ("192.168.1.1", "a private address"),
        ("127.8.8.8", "a loopback address"),
        ("0.0.0.0", "an unspecified address"),
        ("169.254.1.1", "a link-local address"),
        ("169.254.169.254", "an address where clouds hand out credentials"),
        ("169.254.170.2", "an address where clouds hand out credentials"),
        ("168.63.129.16", "an address where clouds hand out credentials"),
        ("100.100.100.200", "an address where clouds hand out credentials"),
        ("fd00:ec2::254", "an address where clouds hand out credentials"),
        ("100.64.0.1", "a carrier's shared address"),
        ("198.18.0.1", "an address for benchmarks"),
        ("224.0.0.251", "a multicast address"),
        ("255.255.255.255", "a reserved address"),
        ("192.88.99.1", "a 6to4 relay"),
        ("::", "an unspecified address"),
        ("::1", "a loopback address"),
        ("::ffff:93.184.216.34", "an IPv4 address inside an IPv6 one"),
        ("::7f00:1", "an IPv4 address inside an IPv6 one"),
        ("2002:7f00:1::", "an IPv4 address inside a 6to4 one"),
        ("64:ff9b::a00:1", "an IPv4 address inside a NAT64 one"),
        ("64:ff9b:1::a00:1", "an IPv4 address inside a NAT64 one"),
        ("2001:0:4136:e378::1", "an IPv4 address inside a Teredo one"),
        ("fe80::1", "a link-local address"),
        ("fe80::1%eth0", "an address of one link"),
        ("fec0::1", "a site-local address"),
        ("fc00::1", "a private address"),
        ("ff02::1", "a multicast address"),
        ("2001:db8::1", "an address for documentation"),
        ("4000::1", "a reserved address"),
        ("not an address", "an invalid address"),
    ],
)
def test_reserved_says_whose_an_address_is(address: str, kind: str | None) -> None:
    assert reserved(address) == kind


def test_excused_is_an_address_by_itself_and_a_name_for_its_own_network() -> None:
    assert is_exempt("169.254.169.254", "169.254.169.254", ("169.254.169.254",))
    assert is_exempt("10.9.9.9", "db.corp.example", ("*.corp.example",))
    assert not is_exempt("169.254.169.254", "db.corp.example", ("*.corp.example",))
    assert not is_exempt("64:ff9b::a00:1", "db.corp.example", ("*.corp.example",))
    assert not is_exempt("10.9.9.9", "db.corp.example", ("corp.example", "10.8.0.0/16"))
    assert not is_exempt("0.0.0.0", "a.example", ("0.0.0.0/0",))
    assert not is_exempt("224.0.0.1", "a.example", ("0.0.0.0/0", "::/0"))
