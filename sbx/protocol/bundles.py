"""MIME bundles whose JSON stays encoded until the caller reads it.

A short JSON text can allocate much memory: `{},` has three bytes and costs about eighty as a Python
value. A `Bundle` therefore keeps each JSON part as bytes. The service copies these bytes to its
replies and to its store. Only a program that embeds sbx and reads such a part decodes it.

    count_values    count the values of a JSON text at the speed of C
    ValueCounter    the same for a text that arrives in pieces
    Part            one checked JSON text
    Bundle          a dict whose Parts look like the values that they stand for
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

_BLANKS = b" \t\n\r"
_CLASSES = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_DIGITS = b"0" * 300  # a float may overflow from 309 digits on
_HUGE_DIGITS = b"0" * 3_900  # an int of 13,000 bits, see `sbx.protocol.events`
# Text that `sbx.protocol.events` writes in another form. A letter may be written as an escape.
_MARKS = re.compile(rb'\xef\xb7\x90|\\u[fF][dD][dD]0|"(?:\$|\\u0024)+(?:float"|int"|[floatin]*\\u)')


def outline(encoded: bytes) -> bytes:
    """Return a valid JSON text with one quote in place of each string."""
    if b"\\" in encoded:
        encoded = encoded.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b'"'.join(encoded.split(b'"')[::2])


def count_values(encoded: bytes) -> int:
    """Return the number of values and keys in a valid JSON text, without building any of them.

    A container that is not empty has one value more than it has commas.
    """
    text = outline(encoded).translate(None, delete=_BLANKS)
    opened = text.count(b"[") + text.count(b"{")
    empty = text.count(b"[]") + text.count(b"{}")
    return 1 + opened - empty + text.count(b",") + text.count(b":")


class ValueCounter:
    """Counts the values and keys of a JSON text that arrives in pieces. An empty container counts
    as two. In UTF-16 and UTF-32, which some parsers detect, each byte counts: there the
    byte of a quote may be half of another character. JSON has zero bytes only in these."""

    __slots__ = ("_in_string", "_rest", "count")

    def __init__(self) -> None:
        self.count = 1
        self._in_string = False
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        if b"\0" in piece:
            self.count += len(piece)
        piece = self._rest + piece
        cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2  # the next byte is escaped
        piece, self._rest = piece[: len(piece) - cut], piece[len(piece) - cut :]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.count += sum(map(outside.count, (b",", b":", b"[", b"{")))


class BundlePart:
    """One JSON text, valid and in UTF-8.

    `marked` is 0 if `sbx.protocol.events` writes the text unchanged. If it writes some values in
    another form, `marked` is the number of values.
    """

    __slots__ = ("encoded", "marked")

    def __init__(self, encoded: bytes) -> None:
        """Raise ValueError for bytes that are not JSON in UTF-8, and for numbers out of range."""
        import msgspec  # takes 15 ms, which a program that only connects does not need

        msgspec.json.decode(encoded, type=msgspec.Raw)  # everything but UTF-8 and ranges
        if not encoded.isascii():
            encoded.decode()
        digits = encoded.translate(_CLASSES)
        if _LONG_DIGITS in digits or b"e000" in digits or b"e+000" in digits:
            msgspec.json.decode(encoded)
        marked = _HUGE_DIGITS in digits or (
            (b"$" in encoded or b"\\u" in encoded or b"\xef\xb7\x90" in encoded)
            and _MARKS.search(encoded) is not None
        )
        if b"\n" in encoded or b"\r" in encoded:  # outside of strings: an event is one line
            encoded = encoded.replace(b"\n", b" ").replace(b"\r", b" ")
        self.encoded = encoded
        self.marked = count_values(encoded) if marked else 0

    def value(self) -> Any:
        """Decode the text."""
        import msgspec

        return msgspec.json.decode(self.encoded)


class Bundle(dict[str, Any]):
    """A MIME bundle, or its metadata. Reading a Part decodes it once and keeps the value."""

    __slots__ = ()

    def stored(self) -> Iterable[tuple[str, Any]]:
        """Return the items without decoding: a Part stays a Part."""
        return dict.items(self)

    def __getitem__(self, mime: str) -> Any:
        part = dict.__getitem__(self, mime)
        if type(part) is BundlePart:
            part = part.value()
            dict.__setitem__(self, mime, part)
        return part

    def _decoded(self) -> dict[str, Any]:
        return {mime: self[mime] for mime in dict.keys(self)}

    def __iter__(self) -> Iterator[str]:  # overridden: otherwise `dict(bundle)` copies the Parts
        return dict.__iter__(self)

    def get(self, mime: str, default: Any = None) -> Any:
        return self[mime] if dict.__contains__(self, mime) else default

    def items(self) -> Any:
        return self._decoded().items()

    def values(self) -> Any:
        return self._decoded().values()

    def pop(self, mime: str, *default: Any) -> Any:
        if mime in self:
            self[mime]
        return dict.pop(self, mime, *default)

    def popitem(self) -> tuple[str, Any]:
        self._decoded()
        return dict.popitem(self)

    def setdefault(self, mime: str, default: Any = None) -> Any:
        return self[mime] if mime in self else dict.setdefault(self, mime, default)

    def copy(self) -> dict[str, Any]:
        return self._decoded()

    def __or__(self, other: Any) -> Any:
        return self._decoded() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._decoded()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return self.keys() == other.keys() and all(self[mime] == other[mime] for mime in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self._decoded())

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        return dict, (self._decoded(),)


def stored(bundle: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the items of any bundle without decoding a Part."""
    return bundle.stored() if isinstance(bundle, Bundle) else bundle.items()


def text_of(bundle: Mapping[str, Any], mime: str) -> str | None:
    """Return the part of this type if it is text. Decode nothing: the sender may be hostile."""
    part = dict.get(bundle, mime) if isinstance(bundle, Bundle) else bundle.get(mime)
    return part if isinstance(part, str) else None


def weight(bundles: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of values that Python code visits when these bundles are written as
    JSON."""
    return sum(
        1 + len(bundle) + sum(part.marked for _, part in stored(bundle) if type(part) is BundlePart)
        for bundle in bundles
    )
