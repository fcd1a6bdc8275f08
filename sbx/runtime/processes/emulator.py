"""A terminal in memory: it gets bytes, and returns its screen and the bytes that draw the same
screen.

pyte, with additions (the alternate screen of vi and less, repeated letters, requested scrolling)
and without sequences that hostile bytes could make expensive or endless: see `_pass`.
"""

import copy
import re
import time
import unicodedata
from typing import Any

import pyte
from pyte import charsets, modes
from pyte.screens import Char, Margins, StaticDefaultDict

from sbx.protocol.terminals import TerminalScreen

_CPU_S = 1.0  # for all that one emulator is fed
_SLICE = 1024
_COMBINED_MAX = 8
_SAVED_MAX = 8
_COLOURED_MAX = 512 << 10

# The modes that a terminal gets before its screen is drawn.
_FRESH = (
    b"\x1b[?1049l\x1b[?1;6;66;1000;1002;1003;1004;1005;1006;1015;2004l\x1b[?7;25h\x1b[4;20l"
    b"\x1b[r\x1b(B\x1b)B\x0f\x1b[0m\x1b[H\x1b[2J"
)
_KEPT_MODES = (1, 66, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 2004)
_OTHER_SCREEN = frozenset({47, 1047, 1049})
_DROPPED_MODES = frozenset({3, 5})  # 132 columns, and all of it in reverse

_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[(?P<private>[<=>?]?)(?P<numbers>[\d;:]*)(?P<between>[ -/]*)(?P<final>[@-~])"
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # texts to the terminal itself
    r"|(?P<set>[()][0BUK])"
    r"|(?P<single>[cDEMH78])"
    r"|(?P<keypad>[=>])"
    r"|[ -/]*[0-~]?"
    r")|[\x80-\x9f]"
)
_REPEATED = re.compile(r"([^\x00-\x1f\x7f-\x9f])\x1b\[(\d{1,4})b")
_NUMBERS_OF = {
    **dict.fromkeys("@ABCDEFGIJKLMPSTXZ`adeg", 1),
    **dict.fromkeys("Hfr", 2),
    **dict.fromkeys("mhl", 32),
}
_COLOURS = {
    "black": 0, "red": 1, "green": 2, "brown": 3, "blue": 4, "magenta": 5, "cyan": 6, "white": 7,
}  # fmt: skip
_SCROLLED = {"S": "scroll_up", "T": "scroll_down"}


class Emulator:
    """Rows and columns of letters. Not for the event loop: a MiB takes a second."""

    def __init__(self, rows: int, columns: int) -> None:
        self._screen = _Screen(columns, rows)
        self._stream = _Stream(self._screen)
        self._stream.use_utf8 = False  # the texts are decoded already, and line drawing is heeded
        self._left_s = _CPU_S

    def feed(self, data: bytes) -> None:
        """Process output. Beyond a second of CPU time, drop all of it but its end: the screen of a
        flood is then approximate."""
        text = _without_scrolled(data.decode(errors="replace"), self._screen.lines)
        text = _REPEATED.sub(self._repeat, text)
        text = _ESCAPE.sub(_pass, text)
        start = 0
        while start < len(text):
            if self._left_s < 0:
                start = max(start, len(text) - _SLICE)
            end = start + _SLICE
            began = time.thread_time()
            try:
                self._stream.feed(text[start:end])
            except Exception:  # noqa: BLE001  # a sequence that the library cannot take, left out
                self._screen.ensure_hbounds()
                self._screen.ensure_vbounds()
            self._left_s -= time.thread_time() - began
            start = end

    def resize(self, rows: int, columns: int) -> None:
        """Resize the screen. Lines without room are lost at the top."""
        screen = self._screen
        screen.resize(rows, columns)
        screen.ensure_hbounds()
        screen.ensure_vbounds()

    def shown(self) -> TerminalScreen:
        screen = self._screen
        lines = tuple(
            "".join(screen.buffer[y][x].data for x in range(screen.columns)).rstrip()
            for y in range(screen.lines)
        )
        cursor = (screen.cursor.y, min(screen.cursor.x, screen.columns - 1))
        return TerminalScreen(screen.lines, screen.columns, lines, cursor)

    def redraw(self) -> bytes:
        """Return bytes that give any terminal of this size the same screen and modes."""
        data = self._redraw(coloured=True)
        return data if len(data) <= _COLOURED_MAX else self._redraw(coloured=False)

    def _redraw(self, *, coloured: bool) -> bytes:
        screen = self._screen
        out = [_FRESH.decode("ascii")]
        if screen.main is not None:
            out += _lines(screen.main.buffer, screen, coloured)
            out += [_move(screen.main.cursor.y, screen.main.cursor.x), "\x1b[?1049h\x1b[H\x1b[2J"]
        out += _lines(screen.buffer, screen, coloured)
        out += self._state()
        return "".join(out).encode(errors="replace")

    def _state(self) -> list[str]:
        """Modes, margins and the cursor: what decides where the next letter goes."""
        screen, cursor = self._screen, self._screen.cursor
        out = []
        if screen.savepoints:
            saved = screen.savepoints[-1].cursor
            out += [_move(saved.y, saved.x), _rendition(saved.attrs), "\x1b7"]
        top = 0
        if screen.margins is not None:
            out.append(f"\x1b[{screen.margins.top + 1};{screen.margins.bottom + 1}r")
        out += [f"\x1b[?{number}h" for number in _KEPT_MODES if number << 5 in screen.mode]
        if modes.IRM in screen.mode:
            out.append("\x1b[4h")
        if modes.DECOM in screen.mode:
            out.append("\x1b[?6h")
            top = screen.margins.top if screen.margins is not None else 0
        x = min(cursor.x, screen.columns - 1)
        out.append(_move(cursor.y - top, x))
        if cursor.x >= screen.columns:  # the next letter goes to the next line
            last = screen.buffer[cursor.y][x]
            out += [_rendition(last), last.data or " "]
        if modes.DECAWM not in screen.mode:
            out.append("\x1b[?7l")
        if cursor.hidden:
            out.append("\x1b[?25l")
        if screen.g0_charset is charsets.VT100_MAP:
            out.append("\x1b(0")
        if screen.charset:
            out.append("\x1b)0\x0e" if screen.g1_charset is charsets.VT100_MAP else "\x0e")
        out.append(_rendition(cursor.attrs))
        return out

    def _repeat(self, match: re.Match[str]) -> str:
        return match[1] * (1 + min(int(match[2]), self._screen.columns))


class _Main:
    """The main screen, while the other one is shown."""

    def __init__(self, screen: "_Screen") -> None:
        self.buffer = screen.buffer
        self.cursor = copy.copy(screen.cursor)


class _Screen(pyte.Screen):
    def __init__(self, columns: int, lines: int) -> None:
        self.main: _Main | None = None
        super().__init__(columns, lines)

    def reset(self) -> None:
        self.main = None
        self.savepoints.clear()
        super().reset()

    def set_mode(self, *numbers: int, **named: Any) -> None:
        if named.get("private"):
            numbers = tuple(number for number in numbers if number not in _DROPPED_MODES)
            if not _OTHER_SCREEN.isdisjoint(numbers) and self.main is None:
                self.main = _Main(self)
                self.buffer = copy.copy(self.buffer)
                self.buffer.clear()
        super().set_mode(*numbers, **named)

    def reset_mode(self, *numbers: int, **named: Any) -> None:
        if named.get("private"):
            numbers = tuple(number for number in numbers if number not in _DROPPED_MODES)
            if not _OTHER_SCREEN.isdisjoint(numbers) and self.main is not None:
                self.buffer, self.cursor, self.main = self.main.buffer, self.main.cursor, None
                self.margins = None
                self.ensure_hbounds()
                self.ensure_vbounds()
        super().reset_mode(*numbers, **named)

    def draw(self, data: str) -> None:
        if data.isascii():
            super().draw(data)
            return
        for letter in data:  # one at a time: pyte drops the letters after one without a width
            if not (unicodedata.combining(letter) and self._is_full()):
                super().draw(letter)

    def _is_full(self) -> bool:
        """Whether more was put over one letter than any language has."""
        if self.cursor.x:
            return len(self.buffer[self.cursor.y][self.cursor.x - 1].data) >= _COMBINED_MAX
        return not self.cursor.y or (
            len(self.buffer[self.cursor.y - 1][self.columns - 1].data) >= _COMBINED_MAX
        )

    def save_cursor(self) -> None:
        super().save_cursor()
        del self.savepoints[:-_SAVED_MAX]

    def erase_in_display(self, how: int = 0, *args: Any, **named: Any) -> None:
        """Erase whole lines: letter by letter, a few bytes could cost as much as the whole
        screen."""
        if how == 0:
            lines = range(self.cursor.y + 1, self.lines)
        elif how == 1:
            lines = range(self.cursor.y)
        else:
            lines = range(self.lines)
        blank = self.cursor.attrs._replace(data=" ", underscore=False, strikethrough=False)
        for y in lines:
            self.buffer[y] = StaticDefaultDict(blank)
        if how in (0, 1):
            self.erase_in_line(how)

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        if how in (0, 1, 2):
            super().erase_in_line(how)

    def scroll_up(self, count: int = 1) -> None:
        self._scrolled(count or 1, self.delete_lines)

    def scroll_down(self, count: int = 1) -> None:
        self._scrolled(count or 1, self.insert_lines)

    def _scrolled(self, count: int, move: Any) -> None:
        top, _ = self.margins or Margins(0, self.lines - 1)
        x, y = self.cursor.x, self.cursor.y
        self.cursor.y = top
        move(count)
        self.cursor.x, self.cursor.y = x, y


class _Stream(pyte.Stream):
    csi = {**pyte.Stream.csi, **_SCROLLED}  # noqa: RUF012  # as the library has its own
    events = pyte.Stream.events | frozenset(_SCROLLED.values())


def _pass(match: re.Match[str]) -> str:
    """Return a sequence in the form that the emulator may get; an empty one if it must not get
    it."""
    if (final := match["final"]) is not None:
        private, numbers = match["private"], match["numbers"]
        if match["between"] or ":" in numbers or private not in ("", "?"):
            return ""
        if private and final not in "hl":
            return ""
        values = numbers.split(";")
        if not private and final in "hl":  # the library knows private ones by other numbers
            values = [number for number in values if number in ("4", "20")] or ["0"]
        if len(values) > _NUMBERS_OF.get(final, 0):
            return ""
        return f"\x1b[{private}{';'.join(number[:4] for number in values)}{final}"
    if match["set"] or match["single"]:
        return match[0]
    if keypad := match["keypad"]:
        return "\x1b[?66h" if keypad == "=" else "\x1b[?66l"
    return ""


def _without_scrolled(text: str, rows: int) -> str:
    """Without lines that are scrolled away by the ones after them, where nothing else happens."""
    if text.count("\n") <= 2 * rows:
        return text
    pieces = text.split("\x1b")
    for index, piece in enumerate(pieces):
        if piece.count("\n") > 2 * rows:
            head, _, rest = piece.partition("\n")
            kept = rest.rsplit("\n", 2 * rows)[1:]
            pieces[index] = "\n".join((head, *kept))
    return "\x1b".join(pieces)


def _lines(buffer: Any, screen: _Screen, coloured: bool) -> list[str]:
    out: list[str] = []
    plain = Char(" ")
    for y in range(screen.lines):
        line = buffer[y]
        width = screen.columns
        while width and line[width - 1] == plain:
            width -= 1
        if not width:
            continue
        out.append(_move(y, 0))
        last = plain
        for x in range(width):
            char = line[x]
            if coloured and char[1:] != last[1:]:
                out.append(_rendition(char))
                last = char
            out.append(char.data)
        if last[1:] != plain[1:]:
            out.append("\x1b[0m")
    return out


def _move(y: int, x: int) -> str:
    return f"\x1b[{y + 1};{x + 1}H"


def _rendition(char: Char) -> str:
    codes = ["0"]
    for on, code in (
        (char.bold, "1"), (char.italics, "3"), (char.underscore, "4"),
        (char.blink, "5"), (char.reverse, "7"), (char.strikethrough, "9"),
    ):  # fmt: skip
        if on:
            codes.append(code)
    codes += _colour(char.fg, 30, 90, "38")
    codes += _colour(char.bg, 40, 100, "48")
    return f"\x1b[{';'.join(codes)}m"


def _colour(name: str, normal: int, bright: int, exact: str) -> list[str]:
    if name == "default":
        return []
    if name in _COLOURS:
        return [str(normal + _COLOURS[name])]
    light = name.removeprefix("bright").removeprefix("bfight")  # as pyte spells one of them
    if light in _COLOURS:
        return [str(bright + _COLOURS[light])]
    try:
        red, green, blue = bytes.fromhex(name)
    except ValueError:
        return []
    return [exact, "2", str(red), str(green), str(blue)]
