"""Replace characters that are invisible, or that reorder others, with their numbers.

`str.isprintable` detects control and format characters. It treats some letters and marks without a
shape as printable: the Hangul fillers, the variation selectors, the combining grapheme joiner.
"""

import re

_SHAPELESS = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
_SHAPELESS += "\U000e0100-\U000e01ef"
_HIDDEN = re.compile(f"[{_SHAPELESS}]")
_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")
_BYTE = range(0xDC80, 0xDD00)  # a byte that is not UTF-8, as `surrogateescape` decodes it


def escaped(text: str, *, keep: str = " ") -> str:
    """Return the text with each invisible character written as `\\u200b`, except those in `keep`.

    Each byte that is not UTF-8 (a lone surrogate) is written as `\\xff`.
    """
    if text.isprintable() and not _HIDDEN.search(text):
        return text
    return "".join(
        char if char in keep or (char.isprintable() and not _HIDDEN.match(char)) else number(char)
        for char in text
    )


def in_order(text: str) -> str:
    """Return the text with each character that reorders others written as `\\u202e`.

    Other invisible characters stay: they belong to languages, and to emoji.
    """
    return _REORDERING.sub(lambda match: number(match[0]), text)


def number(char: str) -> str:
    """Return a character by its number. A byte has two digits, any other character four or
    eight."""
    code = ord(char)
    if code in _BYTE:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return char.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
