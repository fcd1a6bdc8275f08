"""The last screen of a terminal, for clients that attach later: bytes that show the same screen.

The emulator (pyte) takes about 0.9 s for a MiB, so it does not process output at once. The newest
`KEPT` bytes are kept as they are, and of older ones only the modes that they set. For a client, a
worker thread draws the last screen with the later output. The result is the new last screen: again
bytes, which take no more room than the screen.

The output is hostile. Only known sequences with a valid number of parameters reach the emulator. No
sequence costs much more than a letter, and there is a limit for all of them together. The emulator
never replies.
"""

import asyncio
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from sbx.protocol.terminals import TerminalScreen

KEPT = 128 << 10
_RAW_MAX = 4096  # bytes that are sent unchanged: the first client loses no line
_RESIZED = 64  # bytes that a change of the size counts as
_MODES_MAX = 64
_PIECE_MAX = 1 << 14
_UNFINISHED_MAX = 4096

_MODE = re.compile(rb"\x1b(?:\[\?[\d;]{1,40}[hl]|[=>])")
_FINISHED = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-OQ-WYZ\\`-~])"
)
# Sequences that a terminal would answer, or that hide its content.
_NOT_RAW = re.compile(
    rb"\x1b\[[?>=]?[\d;]*[cn]|\x1b\[\?[\d;]*\$p|\x1b[Z\]P_^X]|\x05|\x1b\[\?(?:47|1047|1049)h"
)

# One for all, and none that others wait for: each of several drawers would slow the loop down.
_drawer = ThreadPoolExecutor(1, "sbx-screens")

_Parts = list[bytearray | tuple[int, int]]


class ScreenDump(Struct, frozen=True):
    """A screen as bytes for a terminal of the same size, and as text."""

    data: bytes
    shown: TerminalScreen


class ScreenBuffer:
    """The output of a terminal, and its screen. Use it from one event loop."""

    def __init__(self, rows: int, columns: int, drawing: asyncio.Lock | None = None) -> None:
        """`drawing` is held by the one that is drawn, of all that share it."""
        self.size = (rows, columns)
        self._drawn = b""
        self._drawn_size = self.size
        self._modes: dict[bytes, None] = {}  # set by the dropped output, the newest last
        self._since: deque[bytearray | tuple[int, int]] = deque()
        self._held = 0
        self._told = 0
        self._drawing = drawing or asyncio.Lock()

    def add(self, data: bytes) -> None:
        self._told += len(data)
        last = self._since[-1] if self._since else None
        if isinstance(last, bytearray) and len(last) + len(data) <= _PIECE_MAX:
            last += data
        else:
            self._since.append(bytearray(data[-KEPT:]))
        self._held += min(len(data), KEPT)
        self._drop()

    def resize(self, rows: int, columns: int) -> None:
        self.size = (rows, columns)
        self._since.append(self.size)
        self._held += _RESIZED
        self._drop()

    async def drawn(self) -> tuple[bytes, TerminalScreen]:
        """Return bytes that draw the screen with all output until now, and the screen.

        Nothing is awaited between the moment of the screen and the return: later output follows
        without a gap.
        """
        async with self._drawing:
            taken = list(self._since)
            self._since.clear()
            kept_size, self._held = self._held, 0
            modes, self._modes = b"".join(self._modes), {}
            unfinished = _unfinished(taken)
            before, size = self._drawn, self._drawn_size
            loop = asyncio.get_running_loop()
            try:
                result = await loop.run_in_executor(_drawer, _draw, before, size, modes, taken)
            except asyncio.CancelledError:
                # The next call draws it again from the same output.
                self._since.extendleft(reversed(taken))
                self._held += kept_size
                self._modes = {**_modes_of(modes), **self._modes}
                if unfinished:
                    self._since.insert(len(taken), bytearray(unfinished))
                    self._held += len(unfinished)
                self._drop()
                raise
            self._drawn = result.data
            self._drawn_size = (result.shown.rows, result.shown.columns)
            if unfinished:
                self._since.appendleft(bytearray(unfinished))
                self._held += len(unfinished)
            return result.data + self._later(), result.shown

    async def restored(self) -> bytes:
        """Do the same as `drawn` for a new client, but return little output as it was written: this
        keeps the content of the client's own screen."""
        raw = self._later()
        if self._told <= _RAW_MAX and self._told == len(raw) and not _NOT_RAW.search(raw):
            return raw
        return (await self.drawn())[0]

    def _later(self) -> bytes:
        return b"".join(part for part in self._since if isinstance(part, bytearray))

    def _drop(self) -> None:
        dropped = False
        while self._held > KEPT:
            part = self._since.popleft()
            dropped = True
            if isinstance(part, tuple):
                self._drawn_size = part
                self._held -= _RESIZED
                continue
            self._held -= len(part)
            for match in _MODE.finditer(part):
                self._modes.pop(match[0], None)
                self._modes[bytes(match[0])] = None
            while len(self._modes) > _MODES_MAX:
                del self._modes[next(iter(self._modes))]
        if dropped and self._since and isinstance(first := self._since[0], bytearray):
            # It may begin within a sequence or a letter: at a line's end it does not.
            cut = first.find(b"\n", 0, 4096)
            del first[: cut + 1]
            self._held -= cut + 1


def _modes_of(data: bytes) -> dict[bytes, None]:
    return {bytes(match[0]): None for match in _MODE.finditer(data)}


def _unfinished(parts: _Parts) -> bytes:
    """Cut an incomplete sequence or UTF-8 letter off the end of the last part, and return it."""
    if not parts or not isinstance(last := parts[-1], bytearray):
        return b""
    cut = len(last)
    start = last.rfind(b"\x1b", max(0, cut - _UNFINISHED_MAX))
    if start >= 0 and _FINISHED.match(last, start) is None:
        cut = start
    else:
        for back in range(1, min(4, len(last) + 1)):
            byte = last[-back]
            if byte >= 0xC0:
                whole = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                cut = len(last) - back if back < whole else cut
                break
            if byte < 0x80:
                break
    taken = bytes(last[cut:])
    del last[cut:]
    return taken


def _draw(before: bytes, size: tuple[int, int], modes: bytes, parts: _Parts) -> ScreenDump:
    """Draw the screen `before` with the later output, in a thread."""
    from sbx.runtime.processes.emulator import Emulator  # 15 ms, only with a terminal

    emulator = Emulator(*size)
    emulator.feed(before)
    emulator.feed(modes)
    for part in parts:
        if isinstance(part, tuple):
            emulator.resize(*part)
        else:
            emulator.feed(bytes(part))
    return ScreenDump(emulator.redraw(), emulator.shown())
