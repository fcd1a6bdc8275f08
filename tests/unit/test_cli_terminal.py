"""Hostile text on its way to a terminal, and to a file."""

import os
import pty
import tty

import pytest

from sbx.cli.terminal import OutputStream, one_line, scrub, write


def written(pieces: list[str], *, terminal: bool) -> bytes:
    """What a channel writes for text that comes in pieces."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as end, os.fdopen(writer, "wb"):
        if terminal:
            tty.setraw(writer)
        channel = OutputStream(writer)
        for piece in pieces:
            channel.write(piece)
        channel.end()
        write(writer, "END")
        got = b""
        while not got.endswith(b"END"):
            got += end.read(4096)
    return got.removesuffix(b"END")


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),  # retitles the window
        ("\x1b]52;c;cm0gLXJm\x07", "\\x1b]52;c;cm0gLXJm\\x07"),  # writes the clipboard
        ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),  # clears what came before
        ("\x1b[6n", "\\x1b[6n"),  # answers into the shell's input
        ("\x9b31m", "\\x9b31m"),  # CSI as one character
        ("\x1bP$qm\x1b\\", "\\x1bP$qm\\x1b\\"),
        ("a\x08b\x00\x7f", "a\\x08b\\x00\\x7f"),
        ("\ud800", "\\ud800"),
    ],
)
def test_a_control_sequence_is_written_out(hostile: str, shown: str) -> None:
    assert scrub(hostile) == shown
    assert scrub(hostile, colour=True) == shown


def test_lines_tabs_and_other_scripts_stay() -> None:
    text = "tab\there\r\nGrüße, שלום, 日本語 🐧\n"
    assert scrub(text) == text


def test_colours_reach_a_terminal_and_are_taken_back() -> None:
    assert written(["\x1b[8mhidden"], terminal=True) == b"\x1b[8mhidden\x1b[0m"


def test_colours_do_not_reach_a_file() -> None:
    assert written(["\x1b[31mred\x1b[0m"], terminal=False) == b"red"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(["\x1b[31mred"], terminal=True) == b"red"


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_colour_may_come_in_pieces(cut: int) -> None:
    whole = "\x1b[31mred"
    assert written([whole[:cut], whole[cut:]], terminal=True).startswith(b"\x1b[31mred")


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_hostile_sequence_in_pieces_is_still_written_out(cut: int) -> None:
    whole = "\x1b]0;title\x07"
    assert written([whole[:cut], whole[cut:]], terminal=True) == b"\\x1b]0;title\\x07"


def test_a_sequence_that_never_ends_is_written_out_at_the_end() -> None:
    assert written(["x\x1b[3"], terminal=True) == b"x\\x1b[3"


def test_a_message_is_one_line() -> None:
    assert one_line("no\nerror: forged\t\x1b[2K") == "no error: forged \\x1b[2K"


@pytest.mark.parametrize("mark", ["\u202a", "\u202e", "\u2066", "\u2069"])
def test_text_on_a_terminal_cannot_be_reordered(mark: str) -> None:
    """The output of `sbx run` could show another text than it had (holes 13). A pipe gets it as it
    is."""
    number = f"\\u{ord(mark):04x}"
    assert written([f"a{mark}b שלום"], terminal=True).decode() == f"a{number}b שלום"
    assert written([f"a{mark}b"], terminal=False).decode() == f"a{mark}b"
