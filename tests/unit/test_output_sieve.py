"""What passes to the caller's own terminal, and what does not."""

import pytest

from sbx.cli.escape_filter import EscapeFilter


def passed(*pieces: bytes) -> bytes:
    sieve = EscapeFilter()
    return b"".join(sieve.feed(piece) for piece in pieces)


@pytest.mark.parametrize(
    "harmless",
    [
        b"plain text\r\n\ttab\x07\x08",
        b"\x1b[31;1mred\x1b[0m",
        b"\x1b[2J\x1b[H\x1b[10;20H\x1b[K\x1b[5A\x1b[3L\x1b[2P",
        b"\x1b[?1049h\x1b[?25l\x1b[?1;2004h\x1b[?1000;1006h",
        b"\x1b[1;24r\x1b7\x1b8\x1bM\x1b(0lqk\x1b(B\x1b=\x1b>",
        b"\x1b[6n\x1b[c\x1b[>c\x1b[2 q\x1b[!p",
        "中文 é 🙂".encode(),
        b"\x1b[38;2;1;2;3mx\x1b[38:2::1:2:3mx",
    ],
)
def test_what_a_screen_needs_passes(harmless: bytes) -> None:
    assert passed(harmless) == harmless


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x1b]0;title\x07",
        b"\x1b]52;c;cHduZWQ=\x1b\\",
        b"\x1b]8;;http://x/\x1b\\",
        b"\x1bP$qm\x1b\\",
        b"\x1bP+q544e\x1b\\",
        b"\x1b_Gi=1;AAAA\x1b\\",
        b"\x1b^privacy\x1b\\",
        b"\x1bXstring\x1b\\",
        b"\x1b[21t",
        b"\x1b[8;50;100t",
        b"\x1b[5i",
        b"\x1b[>4;2m",
        b"\x1b[>1u",
        b"\x1b[?3h",
        b"\x1b[1;1;1;1;1;1*y",
        b"\x1b[>q",
        b"\x1bZ",
        b"\x1b%@",
        b"\x05",
        "\x9b21t".encode()[:2],
    ],
)
def test_what_speaks_to_the_terminal_itself_does_not(hostile: bytes) -> None:
    assert passed(b"a" + hostile + b"b") == b"ab"


@pytest.mark.parametrize("whole", [b"\x1b]0;a long title\x1b\\", b"\x1b[21t", b"\x1bP$qm\x1b\\"])
def test_it_is_the_same_however_it_is_cut(whole: bytes) -> None:
    for cut in range(1, len(whole)):
        assert passed(b"a" + whole[:cut], whole[cut:] + b"b") == b"ab"


def test_a_letter_in_two_pieces_stays_one() -> None:
    euro = "€".encode()
    assert passed(euro[:1], euro[1:2], euro[2:]) == euro


def test_what_is_no_utf8_cannot_be_a_c1_sequence() -> None:
    assert passed(b"a\x9b21tb") == b"a\xef\xbf\xbd21tb"


def test_a_string_without_an_end_hides_no_later_sequence() -> None:
    assert passed(b"a\x1b]0;title \x1b[31mred") == b"a\x1b[31mred"
    assert passed(b"a\x1b]0;ti", b"tle \x1b[31mred") == b"a\x1b[31mred"


def test_an_endless_string_takes_no_memory() -> None:
    sieve = EscapeFilter()
    sieve.feed(b"\x1b]0;")
    for _ in range(100):
        assert sieve.feed(b"x" * 65536) == b""
    assert len(sieve._held) < 100
    assert sieve.feed(b"\x07ok") == b"ok"


def test_characters_that_reorder_others_become_numbers() -> None:
    assert passed("a\u202eb\u2067c שלום".encode()).decode() == "a\\u202eb\\u2067c שלום"
