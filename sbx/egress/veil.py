r"""Find the values of secrets in a reply, in every spelling that servers are known to echo.

A form is a sequence of letters, and a letter a set of spellings: the value `k1` in plain text is
found as `k1`, `K1`, `%6b1`, `&#107;1`, `\u006B%31` and so on, because each letter may be spelled
in a different way. Spellings are in lower case and compared with a reply in lower case.

    forms    the plain text, hex, UTF-16, and base64 at its three alignments
    Search           a first regular expression for the beginning of any form, then each letter
    RedactingStream  a stream with placeholders in the place of values
    Sniffer          refuses a compressed body without a declaration

The work is bounded by the length of the reply times the length of a value: each letter is tried at
each byte at most once for each beginning.
"""

import base64
import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html.entities import html5
from typing import Any

Letter = Mapping[int, tuple[bytes, ...]]  # the spellings by their first byte
Form = tuple[Letter, ...]

_FIRST = 8  # letters of a form that the regular expression looks for
_DIGITS_MAX = 7  # of a numeric entity
_HEX_BETWEEN = ("", ":", "-", "_", " ", ",", ", ", "0x", ",0x", ", 0x", " 0x", "\n", "\r\n")
_MAGICS = (
    *(b"\x1f\x8b", b"\x1f\x9d", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"\x04\x22\x4d\x18"),
    *(b"x\x01", b"x\x9c", b"x\xda"),
    *(b"BZh%d1AY&SY" % level for level in range(1, 10)),
)
_ZLIB = b"x^"  # its header with the levels 2 to 5; a text may begin with it, too
_ZLIB_SEEN = 10  # bytes that identify it


class Search:
    """Finds the forms of some values, each of which stands for a placeholder."""

    def __init__(self, hidden: Iterable[tuple[str, bytes]]) -> None:
        self._forms = [(form, instead) for value, instead in hidden for form in _forms(value)]
        self._begin: Any = _expression([form for form, _ in self._forms]) if self._forms else None
        beginnings = [sum(map(_longest, form[:_FIRST])) for form, _ in self._forms]
        self._overlap = max(beginnings, default=0)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def replaced(self, data: bytes, *, last: bool) -> tuple[bytes, int]:
        """Return `data` with placeholders in it, up to the second value: what follows may be the
        beginning of a form. With `last` nothing follows."""
        if self._begin is None:
            return data, len(data)
        low = data.lower()
        out, done = [], 0
        for start in self._beginnings(low, last=last):
            if start < done:
                continue
            end, instead = self._at(low, start)
            if instead is not None:
                out += [data[done:start], instead]
                done = end
            elif end and not last:
                out.append(data[done:start])
                return b"".join(out), start
        out.append(data[done:])
        return b"".join(out), len(data)

    def _beginnings(self, low: bytes, *, last: bool) -> Iterator[int]:
        """Yield where a form could begin. Near the end, where the expression cannot see its first
        letters whole, that is everywhere."""
        near = len(low) if last else max(0, len(low) - self._overlap)
        at = 0
        while (match := self._begin.search(low, at)) is not None and match.start() < near:
            yield match.start()
            at = match.start() + 1
        yield from range(near, len(low))

    def _at(self, low: bytes, start: int) -> tuple[int, bytes | None]:
        """Return the end of the longest form that begins here, and its placeholder. Without one the
        end is not 0 where the data ends within a form."""
        best, instead, cut = 0, None, False
        for form, placeholder in self._forms:
            if low[start] in form[0]:
                end, is_cut = _end(form, low, start)
                cut |= is_cut
                if end > best:
                    best, instead = end, placeholder
        return (best, instead) if instead is not None else (int(cut), None)


class RedactingStream:
    """Replace values with placeholders. Keep the possible beginning of a value until the next
    piece; return everything else at once, because clients wait for streams of events."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._pending = b""

    def over(self, text: bytes) -> bytes:
        """Return a whole text with placeholders."""
        return self._search.replaced(text, last=True)[0]

    def feed(self, piece: bytes) -> bytes:
        if not self._search:
            return piece
        data = self._pending + piece
        shown, end = self._search.replaced(data, last=False)
        self._pending = data[end:]
        return shown

    def end(self) -> bytes:
        """Return the rest at the end of the stream."""
        pending, self._pending = self._pending, b""
        return self.over(pending)


class Compressed(Exception):
    """A body that cannot be searched."""


class Sniffer:
    def __init__(self) -> None:
        self._head: bytes | None = b""

    def feed(self, piece: bytes, *, last: bool = False) -> bytes:
        """Return the bytes that can be passed on. Raise Compressed."""
        if self._head is None:
            return piece
        head = self._head + piece
        if any(head.startswith(magic) for magic in _MAGICS) or _is_zlib(head):
            raise Compressed
        is_short = head.startswith(_ZLIB) and len(head) < _ZLIB_SEEN
        if not last and (is_short or any(magic.startswith(head) for magic in (*_MAGICS, _ZLIB))):
            self._head = head
            return b""
        self._head = None
        return head


def _is_zlib(head: bytes) -> bool:
    """Return whether the bytes begin with the header of zlib that is text, and are not text."""
    if not head.startswith(_ZLIB):
        return False
    seen = head[len(_ZLIB) : _ZLIB_SEEN]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(seen)
    except UnicodeDecodeError:
        return True
    return any(byte < ord("\t") or byte == 0x7F for byte in seen)


def _end(form: Form, low: bytes, start: int) -> tuple[int, bool]:
    """Return where the form that begins at `start` ends, 0 where none does, and whether the data
    ends within one."""
    places, cut = {start}, False
    for letter in form:
        following = set()
        for place in places:
            if place == len(low):
                cut = True
                continue
            for spelling in letter.get(low[place], ()):
                if low.startswith(spelling, place):
                    following.add(place + len(spelling))
                elif spelling.startswith(low[place:]):
                    cut = True
        if not following:
            return 0, cut
        places = following
    return max(places), cut


# -- forms -----------------------------------------------------------------------------------------


def _forms(value: str) -> Iterator[Form]:
    yield tuple(map(_plain, value))
    yield tuple(_hex(letter, bool(number)) for number, letter in enumerate(value))
    yield tuple(map(_raw, value.lower().encode("utf-16-le")[:-1]))  # it occurs in both byte orders
    for shift in range(3):  # at any place of a longer text, as in user:password
        padded = b"\0" * shift + value.encode()
        first, end = (0, 2, 3)[shift], len(padded) * 8 // 6
        coded = base64.b64encode(padded)[first:end].decode()
        yield tuple(_base64(letter, bool(number)) for number, letter in enumerate(coded))


@cache
def _plain(letter: str) -> Letter:
    return _letter(_spellings(letter))


@cache
def _hex(letter: str, follows: bool) -> Letter:
    codes = [f"{ord(form):02x}" for form in {letter.lower(), letter.upper()}]
    between = _HEX_BETWEEN if follows else ("", "0x")
    return _letter({sign + code for sign in between for code in codes})


@cache
def _raw(byte: int) -> Letter:
    return _letter({chr(byte)})


@cache
def _base64(letter: str, follows: bool) -> Letter:
    spelled = {letter.lower()}
    if not letter.isalnum():
        spelled = _spellings(letter) | {{"+": "-", "/": "_"}[letter]}
    between = ("", "\n", "\r\n", r"\n", r"\r\n") if follows else ("",)
    return _letter({sign + spelling for sign in between for spelling in spelled})


def _spellings(letter: str) -> set[str]:
    """Return how one letter of ASCII is written in text, URLs, JSON, HTML and the like."""
    spellings = {letter.lower()}
    for form in {letter.lower(), letter.upper()}:
        number = ord(form)
        code = f"{number:02x}"
        spellings |= {f"%{code}", f"%25{code}", f"={code}", rf"\x{code}", rf"\u{{{code}}}"}
        spellings |= {rf"\u00{code}", rf"\\u00{code}", f"%u00{code}", rf"\{number:03o}"}
        for width in range(1, _DIGITS_MAX + 1):
            for entity in (f"#{number:0{width}d};", f"#x{number:0{width}x};"):
                spellings |= {f"&{entity}", f"&amp;{entity}"}
    names = [name for name, text in html5.items() if text == letter and name.endswith(";")]
    spellings |= {f"{sign}{name.lower()}" for name in names for sign in ("&", "&amp;")}
    if not letter.isalnum():
        spellings |= {f"\\{letter}", rf"\\\{letter}"}
    if letter in "\"'":
        spellings.add(letter * 2)
    if letter == " ":
        spellings.add("+")
    return spellings


def _letter(spellings: Iterable[str]) -> Letter:
    by_first: dict[int, list[bytes]] = {}
    for spelling in sorted(spellings):
        by_first.setdefault(spelling.encode("latin-1")[0], []).append(spelling.encode("latin-1"))
    return {first: tuple(group) for first, group in by_first.items()}


def _longest(letter: Letter) -> int:
    return max(len(spelling) for spellings in letter.values() for spelling in spellings)


def _expression(forms: Iterable[Form]) -> Any:
    """Return an expression for the first letters of any of the forms, in linear time."""
    import re2  # 10 ms, for the first sandbox with a secret

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors = False
    parts = []
    for form in forms:
        letters = (
            b"|".join(
                re.escape(spelling) for spellings in letter.values() for spelling in spellings
            )
            for letter in form[:_FIRST]
        )
        parts.append(b"".join(b"(?:" + letter + b")" for letter in letters))
    return re2.compile(b"|".join(parts), options)
