"""Write characters that are invisible, or that move others, by their numbers. Pure.

`str.isprintable` knows control and format characters. It takes some letters and marks for printable
that have no shape: the Hangul fillers, the variation selectors, the combining grapheme joiner.
"""

import re

_SHAPELESS = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
_SHAPELESS += "\U000e0100-\U000e01ef"
_HIDDEN = re.compile(f"[{_SHAPELESS}]")
_BYTE = range(0xDC80, 0xDD00)  # a byte that is not UTF-8, as `surrogateescape` decodes it


def escaped(text: str, *, keep: str = " ") -> str:
    """Return the text with each invisible character but those of `keep` written as `\\u200b`, and
    each byte that is not UTF-8 (a lone surrogate) as `\\xff`."""
    if text.isprintable() and not _HIDDEN.search(text):
        return text
    return "".join(
        char if char in keep or (char.isprintable() and not _HIDDEN.match(char)) else number(char)
        for char in text
    )


def number(char: str) -> str:
    """Return a character by its number: a byte has two digits, and any other has four or eight."""
    code = ord(char)
    if code in _BYTE:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return char.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
