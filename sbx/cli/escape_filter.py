"""Filter the output of a program inside before it reaches the user's own terminal.

A full-screen program must move the cursor, set colours, scroll and query the cursor position. It
does not need to set the window's title or size, write the clipboard, print, or read the screen. It
must not make the terminal send text that the user's shell later reads as typed input.

So known sequences pass, and all others are removed: every string (OSC, DCS, APC, PM, SOS), queries
for more than a position, and C1 characters. Bytes that are not UTF-8 become U+FFFD, and characters
that reorder others become their numbers.
"""

import codecs
import re

from sbx.protocol.invisible import in_order

_TOKEN = re.compile(
    r"\x1b\[(?P<private>[<=>?]?)(?P<numbers>[\d;:]*)(?P<between>[ -/]*)(?P<final>[@-~])"
    r"|\x1b(?P<string>[\]PX^_])[^\x07\x18\x1a\x1b]*(?P<over>[\x07\x18\x1a]|\x1b\\|(?=\x1b))?"
    r"|\x1b(?P<kind>[ -/]*)(?P<single>[0-~])"
    r"|[\x05\x80-\x9f]"
    r"|\x1b"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]{0,128}[ -/]{0,4}|[ -/]{0,4})\Z")
_STRING_ENDS = re.compile(r"[\x07\x18\x1a\x1b]")
_FINALS = frozenset("@ABCDEFGHIJKLMPSTXZ`abcdefghlmnrsu")
_MODES = frozenset(
    (1, 5, 6, 7, 12, 25, 45, 47, 66, 1000, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1047, 1048,
     1049, 2004, 2026)
)  # fmt: skip
_SINGLES = frozenset("78DEHMNO=>c")
_CHARSETS = frozenset("()*+")


class EscapeFilter:
    """A filter for the bytes of one terminal, which arrive in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._in_string = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may be shown. An incomplete sequence waits for its rest."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if self._in_string:
            text = self._after_string(text)
        if (unfinished := _UNFINISHED.search(text)) is not None:
            self._held = unfinished[0]
            text = text[: unfinished.start()]
        return in_order(_TOKEN.sub(self._passed, text)).encode(errors="replace")

    def _after_string(self, text: str) -> str:
        end = _STRING_ENDS.search(text)
        if end is None:
            return ""
        self._in_string = False
        # ESC ends the string: with a backslash, or as the first character of another sequence.
        return text[end.start() :] if end[0] == "\x1b" else text[end.end() :]

    def _passed(self, match: re.Match[str]) -> str:
        if match["final"] is not None:
            return match[0] if _is_harmless(match) else ""
        if match["string"] is not None:
            self._in_string = match["over"] is None
            return ""
        if (single := match["single"]) is not None:
            kind = match["kind"]
            passes = single in _SINGLES if not kind else kind in _CHARSETS or match[0] == "\x1b#8"
            return match[0] if passes else ""
        return ""


def _is_harmless(match: re.Match[str]) -> bool:
    private, between, final = match["private"], match["between"], match["final"]
    if between:
        return not private and (between + final in (" q", "!p"))
    if private == "?":
        if final in "JKn":
            return True
        numbers = match["numbers"].split(";")
        return final in "hlrs" and all(
            number.isdigit() and int(number) in _MODES for number in numbers
        )
    if private == ">":
        return final == "c"
    return not private and final in _FINALS
