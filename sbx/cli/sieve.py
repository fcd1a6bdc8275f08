"""What of a program inside may reach the caller's own terminal, while he is attached to one.

A full-screen program must move the cursor, colour, scroll and ask where the cursor is. It need not
set the window's title or size, write the clipboard, print, read back what stands on the screen, or
put a text into the terminal that comes back as typed later, when the caller's shell reads it again.
So known sequences pass, and all others are taken out: every string (OSC, DCS, APC, PM, SOS), what
asks for more than a position, C1 characters. What is no UTF-8 becomes U+FFFD.
"""

import codecs
import re

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


class Sieve:
    """For the bytes of one terminal, which come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._in_string = False

    def feed(self, data: bytes) -> bytes:
        """What of it may be shown. A sequence that is not whole yet waits for the rest."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if self._in_string:
            text = self._after_string(text)
        if (unfinished := _UNFINISHED.search(text)) is not None:
            self._held = unfinished[0]
            text = text[: unfinished.start()]
        return _TOKEN.sub(self._passed, text).encode(errors="replace")

    def _after_string(self, text: str) -> str:
        end = _STRING_ENDS.search(text)
        if end is None:
            return ""
        self._in_string = False
        # An ESC ends it, with the backslash of its own or as the first of another sequence.
        return text[end.start() :] if end[0] == "\x1b" else text[end.end() :]

    def _passed(self, found: re.Match[str]) -> str:
        if found["final"] is not None:
            return found[0] if _is_harmless(found) else ""
        if found["string"] is not None:
            self._in_string = found["over"] is None
            return ""
        if (single := found["single"]) is not None:
            kind = found["kind"]
            passes = single in _SINGLES if not kind else kind in _CHARSETS or found[0] == "\x1b#8"
            return found[0] if passes else ""
        return ""


def _is_harmless(found: re.Match[str]) -> bool:
    private, between, final = found["private"], found["between"], found["final"]
    if between:
        return not private and (between + final in (" q", "!p"))
    if private == "?":
        if final in "JKn":
            return True
        numbers = found["numbers"].split(";")
        return final in "hlrs" and all(one.isdigit() and int(one) in _MODES for one in numbers)
    if private == ">":
        return final == "c"
    return not private and final in _FINALS
