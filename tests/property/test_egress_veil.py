"""No spelling of a secret's value passes, wherever a reply is cut into pieces."""

import base64
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from sbx.egress.veil import RedactingStream, Search, Sniffer

PLACEHOLDER = b"sbx-secret-0"
values = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=8, max_size=20
) | st.sampled_from(
    ["aaaaaaaaa", "%%%%%%%%%", "&#38;&#38;", r"\\\u0041\\", "41414141", "%41%41%41"]
)
SPELLINGS = (
    lambda one: one,
    str.lower,
    str.upper,
    lambda one: f"%{ord(one):02x}",
    lambda one: f"%{ord(one):02X}",
    lambda one: f"&#{ord(one)};",
    lambda one: f"&#{ord(one):05d};",
    lambda one: f"&#x{ord(one):x};",
    lambda one: f"&#x{ord(one):04X};",
    lambda one: rf"\u{ord(one):04x}",
    lambda one: rf"\u{ord(one.upper()):04X}",
    lambda one: rf"\x{ord(one):02x}",
)
contexts = st.binary(max_size=20) | st.sampled_from([b"%", b"&#", b"\\", b"%4", b"&amp", b"\\u00"])
cuts = st.lists(st.integers(0, 300), max_size=20)


@st.composite
def encoded(draw: st.DrawFn) -> tuple[str, bytes]:
    """A value, and one way of spelling it."""
    value = draw(values)
    match draw(st.sampled_from(["mixed", "hex", "base64", "utf-16"])):
        case "hex":
            between = draw(st.sampled_from(["", ":", "-", " "]))
            text = between.join(f"{ord(one):02x}" for one in value)
            return value, draw(st.sampled_from([text, text.upper()])).encode()
        case "base64":
            return value, base64.b64encode(value.encode())[: len(value) * 8 // 6]
        case "utf-16":
            return value, value.encode("utf-16-le")[:-1]
    ways = draw(st.lists(st.sampled_from(SPELLINGS), min_size=len(value), max_size=len(value)))
    return value, "".join(way(one) for way, one in zip(ways, value, strict=True)).encode()


def shown(search: Search, body: bytes, at: Sequence[int]) -> bytes:
    veil = RedactingStream(search)
    places = [0, *sorted(min(one, len(body)) for one in at), len(body)]
    pieces = [body[start:end] for start, end in pairwise(places)]
    return b"".join(map(veil.feed, pieces)) + veil.end()


@given(encoded(), contexts, contexts, cuts)
def test_no_spelling_of_the_value_leaves_however_the_body_is_cut(
    secret: tuple[str, bytes], before: bytes, after: bytes, at: list[int]
) -> None:
    value, spelled = secret
    assume(spelled.lower() not in PLACEHOLDER)
    search = Search([(value, PLACEHOLDER)])
    body = before + spelled + after
    whole = shown(search, body, [])
    assert PLACEHOLDER in whole
    assert spelled.lower() not in whole.lower()
    assert shown(search, body, at) == whole == RedactingStream(search).over(body)


@given(st.binary(max_size=200), cuts)
def test_what_holds_no_value_passes_as_it_is(body: bytes, at: list[int]) -> None:
    assert shown(Search([("no-such-value", PLACEHOLDER)]), body, at) == body
    assert shown(Search([]), body, at) == body


@given(st.text(max_size=40), cuts)
def test_text_is_not_taken_for_compressed(text: str, at: list[int]) -> None:
    body = "".join(one for one in text if one.isprintable()).encode()
    sniffer = Sniffer()
    places = [0, *sorted(min(one, len(body)) for one in at), len(body)]
    pieces = [body[start:end] for start, end in pairwise(places)]
    assert b"".join(map(sniffer.feed, pieces)) + sniffer.feed(b"", last=True) == body
