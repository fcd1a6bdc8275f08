"""Where a placeholder becomes a value, and a value a placeholder."""

import base64
import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable

import pytest

from sbx.egress.secrets import PlaceholderScanner, Secret, SecretMisuse, SecretStore
from sbx.egress.veil import Compressed, Sniffer
from sbx.errors import Unavailable

VALUE = 'tok/en+"with" <odd> letters'
SECRET = Secret("CRM", "CRM_TOKEN", ("api.example.org", "*.eu.example.org"), "Authorization", VALUE)


@pytest.fixture
def vault() -> SecretStore:
    return SecretStore({"CRM": SECRET, "PLAIN": Secret(
        "PLAIN", "PLAIN_KEY", ("plain.example",), "X-Key", "another-value", allow_plain=True
    )})  # fmt: skip


@pytest.fixture
def placeholder(vault: SecretStore) -> bytes:
    return vault.environment["CRM_TOKEN"].encode()


def test_a_secret_does_not_show_its_value() -> None:
    assert "tok" not in repr(SECRET)


@pytest.mark.parametrize(
    "value", ["", "short", "a\nnew line of it", "ünïcödé-letters", " begins", "x" * 8193]
)
def test_a_value_that_no_header_could_hold_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(Unavailable) as refused:
        Secret("CRM", "CRM_TOKEN", ("a.example",), "Authorization", value)
    assert refused.value.code == "secret_unusable"
    assert not value or value not in str(refused.value.to_dict())


def test_placeholders_are_marked_and_of_one_sandbox(vault: SecretStore) -> None:
    other = SecretStore({"CRM": SECRET})
    assert vault.environment["CRM_TOKEN"].startswith("sbx-secret-")
    assert vault.environment["CRM_TOKEN"] != other.environment["CRM_TOKEN"]
    assert VALUE not in str(dict(vault.environment))


def test_filled_puts_the_value_into_the_header_of_a_named_host(
    vault: SecretStore, placeholder: bytes
) -> None:
    given = [(b"Accept", b"*/*"), (b"authorization", b"Bearer " + placeholder)]
    value = b"Bearer " + VALUE.encode()
    expected = [(b"Accept", b"*/*"), (b"authorization", value)]
    assert vault.filled(given, "api.example.org", secure=True) == expected
    assert vault.filled(given, "a.eu.example.org", secure=True) == expected


def test_filled_looks_into_the_password_of_a_url(vault: SecretStore, placeholder: bytes) -> None:
    given = [(b"Authorization", b"Basic " + base64.b64encode(b"me:" + placeholder))]
    filled = vault.filled(given, "api.example.org", secure=True)
    assert base64.b64decode(filled[0][1].split()[1]) == b"me:" + VALUE.encode()


def test_filled_leaves_headers_without_a_placeholder_alone(vault: SecretStore) -> None:
    given = [(b"Authorization", b"Bearer mine"), (b"X", b"Basic !!!"), (b"Y", b"\xff%zz")]
    assert vault.filled(given, "api.example.org", secure=True) == given


@pytest.mark.parametrize(
    ("header", "host", "secure"),
    [
        (b"Authorization", "other.example", True),
        (b"Authorization", "example.org", True),
        (b"Authorization", "eu.example.org", True),
        (b"X-Other", "api.example.org", True),
        (b"Cookie", "api.example.org", True),
        (b"Authorization", "api.example.org", False),
    ],
)
@pytest.mark.parametrize("form", ["plain", "basic", "escaped", "capital"])
def test_filled_refuses_a_placeholder_anywhere_else(
    vault: SecretStore, placeholder: bytes, header: bytes, host: str, secure: bool, form: str
) -> None:
    value = {
        "plain": placeholder,
        "basic": b"Basic " + base64.b64encode(b":" + placeholder),
        "escaped": placeholder.replace(b"-", b"%2d"),
        "capital": placeholder.upper(),
    }[form]
    with pytest.raises(SecretMisuse) as refused:
        vault.filled([(header, value)], host, secure=secure)
    assert refused.value.secret == "CRM"
    assert VALUE not in str(refused.value)


def test_filled_sends_in_clear_text_only_what_says_so(vault: SecretStore) -> None:
    given = [(b"x-key", vault.environment["PLAIN_KEY"].encode())]
    expected = [(b"x-key", b"another-value")]
    assert vault.filled(given, "plain.example", secure=False) == expected


def test_a_placeholder_of_another_sandbox_is_refused(vault: SecretStore) -> None:
    strange = SecretStore({"CRM": SECRET}).environment["CRM_TOKEN"].encode()
    with pytest.raises(SecretMisuse, match="no secret of this sandbox"):
        vault.filled([(b"Authorization", strange)], "api.example.org", secure=True)


@pytest.mark.parametrize("text", [b"/a?t=%s", b"/%s/", b"a%s", b"/a?b=%%25%s"])
def test_check_finds_a_placeholder_in_a_path(
    vault: SecretStore, placeholder: bytes, text: bytes
) -> None:
    with pytest.raises(SecretMisuse):
        vault.check("the path", text % placeholder)
    with pytest.raises(SecretMisuse):
        vault.check("the path", text % placeholder.replace(b"s", b"%73"))
    vault.check("the path", text % placeholder[:-1])


@pytest.mark.parametrize("escape", ["%{:02x}", "%{:02X}", "%25{:02x}", "%2525{:02X}"])
@pytest.mark.parametrize("change", [bytes.lower, bytes.upper])
def test_check_undoes_percent_signs(
    vault: SecretStore, placeholder: bytes, escape: str, change: Callable[[bytes], bytes]
) -> None:
    escaped = "".join(map(escape.format, change(placeholder))).encode()
    with pytest.raises(SecretMisuse, match="CRM"):
        vault.check("the path", b"/a?b=%41" + escaped)
    vault.check("the path", b"/a?b=%41" + escaped[:-2])


@pytest.mark.parametrize("size", [1, 7, 42, 43, 1000])
def test_scan_finds_a_placeholder_across_pieces(
    vault: SecretStore, placeholder: bytes, size: int
) -> None:
    body = b"x" * 100 + placeholder + b"y" * 100
    scan = PlaceholderScanner(vault, "the body")
    with pytest.raises(SecretMisuse, match="the body"):
        list(map(scan.feed, (body[at : at + size] for at in range(0, len(body), size))))


def test_scan_lets_everything_else_through(vault: SecretStore, placeholder: bytes) -> None:
    scan = PlaceholderScanner(vault, "the body")
    for piece in (b"sbx-secret-", b"0123", placeholder[:-1], b"-", placeholder[1:]):
        scan.feed(piece)


FORMS = [
    VALUE.encode(),
    b"tok%2Fen%2B%22with%22%20%3Codd%3E%20letters",
    b'tok/en+\\"with\\" <odd> letters',
    b'tok\\/en+\\"with\\" <odd> letters',
    b"tok/en+&quot;with&quot; &lt;odd&gt; letters",
    b"tok%2fen%2b%22with%22%20%3codd%3e%20letters",
    b"tok%2Fen%2B%22with%22+%3Codd%3E+letters",
    rb"tok/en+\"with\" \u003codd\u003e letters",
    rb"tok/en\u002B\u0022with\u0022 \u003Codd\u003E letters",
    b"tok/en+&#34;with&#34; &lt;odd&gt; letters",
    b"tok/en&#43;&#34;with&#34; &lt;odd&gt; letters",
    b"tok&#x2F;en+&quot;with&quot; &lt;odd&gt; letters",
    VALUE.encode("utf-16-le")[:-1],
    VALUE.encode("utf-16-be")[1:],
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_veil_hides_the_value_in_every_form_across_pieces(
    vault: SecretStore, placeholder: bytes, form: bytes, size: int
) -> None:
    veil = vault.veil("api.example.org")
    body = b"before " + form + b" between " + form + b" tok/en"
    pieces = [veil.feed(body[at : at + size]) for at in range(0, len(body), size)]
    shown = b"".join(pieces) + veil.end()
    assert shown == b"before " + placeholder + b" between " + placeholder + b" tok/en"


ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "upper case": lambda value: value.upper().encode(),
    "lower case": lambda value: value.lower().encode(),
    "hex": lambda value: value.encode().hex().encode(),
    "HEX": lambda value: value.encode().hex().upper().encode(),
    "hex with colons": lambda value: value.encode().hex(":").encode(),
    "hex in twos": lambda value: value.encode().hex(" ", 2).encode(),
    "C": lambda value: ", ".join(f"0x{ord(letter):02X}" for letter in value).encode(),
    "%xx": lambda value: "".join(f"%{ord(letter):02x}" for letter in value).encode(),
    "%XX of upper case": lambda value: "".join(f"%{ord(c):02X}" for c in value.upper()).encode(),
    "%25xx": lambda value: "".join(f"%25{ord(letter):02x}" for letter in value).encode(),
    "&#n;": lambda value: "".join(f"&#{ord(letter)};" for letter in value).encode(),
    "&#0n;": lambda value: "".join(f"&#{ord(letter):04d};" for letter in value).encode(),
    "&#xn;": lambda value: "".join(f"&#x{ord(letter):X};" for letter in value).encode(),
    r"\u": lambda value: "".join(f"\\u{ord(letter):04x}" for letter in value).encode(),
    r"\U": lambda value: "".join(f"\\u{ord(letter):04X}" for letter in value).encode(),
    r"\x": lambda value: "".join(f"\\x{ord(letter):02x}" for letter in value).encode(),
    "JSON in JSON": lambda value: json.dumps(json.dumps(value)[1:-1])[1:-1].encode(),
    "all of them": lambda value: b"".join(
        (f"%{ord(c):02X}", f"&#{ord(c)};", f"\\u{ord(c):04x}", c.upper())[number % 4].encode()
        for number, c in enumerate(value)
    ),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_veil_hides_the_value_in_every_encoding(
    vault: SecretStore, placeholder: bytes, encoding: str, size: int
) -> None:
    """An echoing host returned the value to the code inside in upper case, in hex, with every
    letter behind a percent sign, and as numeric entities."""
    veil = vault.veil("api.example.org")
    body = b"before " + ENCODINGS[encoding](VALUE) + b"; after"
    pieces = [veil.feed(body[at : at + size]) for at in range(0, len(body), size)]
    assert b"".join(pieces) + veil.end() == b"before " + placeholder + b"; after"


@pytest.mark.parametrize(
    ("head", "compressed"),
    [
        (gzip.compress(b"a", mtime=0), True),  # the same for every worker of the tests
        (zlib.compress(b"a", 0), True),
        (zlib.compress(b"a", 2), True),
        (zlib.compress(b"a"), True),
        (zlib.compress(b"a", 9), True),
        (bz2.compress(b"a"), True),
        (lzma.compress(b"a"), True),
        (b"\x28\xb5\x2f\xfd\x04", True),
        (b"x^2 + y^2 = 1", False),
        (b"BZ", False),
        (b"\x1f", False),
        (b"", False),
        (b"{}", False),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_sniffer_knows_a_compressed_body(head: bytes, compressed: bool, size: int) -> None:
    sniffer = Sniffer()
    pieces = [head[at : at + size] for at in range(0, len(head), size)]
    if compressed:
        with pytest.raises(Compressed):
            [*map(sniffer.feed, pieces), sniffer.feed(b"", last=True)]
    else:
        assert b"".join([*map(sniffer.feed, pieces), sniffer.feed(b"", last=True)]) == head


@pytest.mark.parametrize("before", [b"", b"a:", b"me:", b"user:"])
def test_veil_hides_the_value_in_base64(
    vault: SecretStore, placeholder: bytes, before: bytes
) -> None:
    veil = vault.veil("api.example.org")
    shown = veil.over(base64.b64encode(before + VALUE.encode() + b"!"))
    left, hidden, right = shown.partition(placeholder)
    assert hidden
    assert len(left) <= len(before) * 8 / 6 + 1  # the letter that the value shares with what is
    assert len(right) <= 4  # before it, and the last four, with the one that is after it


def test_veil_keeps_back_no_more_than_it_must(vault: SecretStore) -> None:
    veil = vault.veil("api.example.org")
    assert veil.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert veil.feed(b"data: tok") == b"data: "
    assert veil.feed(b"yo") == b"tokyo"
    assert veil.end() == b""


def test_veil_of_another_host_has_nothing_to_hide(vault: SecretStore) -> None:
    veil = vault.veil("other.example")
    assert veil.feed(VALUE.encode()) + veil.end() == VALUE.encode()
