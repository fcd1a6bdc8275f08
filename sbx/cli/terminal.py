"""What may reach a terminal, and what is read from it.

Text out of a sandbox is hostile: an escape sequence can retitle a window, answer into the shell's
input, hide what comes after it, or forge a line of a log (OSC 52, DECRQSS, SGR 8). One rule, for a
terminal, a pipe and a file alike: `\\n`, `\\t` and `\\r` stay, colours (SGR) stay where colours are
shown and are dropped elsewhere, and every other control character is written out as `\\x1b`. The
exact text is in `--json`, where JSON escapes it.
"""

import os
import re
import select
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sbx.cli.exits import ReaderGone
from sbx.errors import SbxError, Unavailable
from sbx.protocol.invisible import escaped

STDIN, STDOUT, STDERR = 0, 1, 2
END_OF_INPUT = "\x04"  # what a kernel takes as EOF in an answer, as Jupyter has it
_SGR = r"\x1b\[[0-9;:]{0,32}m"
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")
# C1 (0x80-0x9f) are escape sequences of one character; a lone surrogate is not UTF-8.
_CONTROL = re.compile(rf"({_SGR})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SEEN = " \n\r\t\u3000"  # U+3000 is the space of Chinese and Japanese text, as wide as a character
_RESET = "\x1b[0m"
_LINE_MAX = 1 << 16


def colours(fd: int) -> bool:
    """Whether colours are shown there: a terminal that is not dumb, and no NO_COLOR."""
    return (
        os.isatty(fd)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def scrub(text: str, *, colour: bool = False) -> str:
    """The text as it may be shown."""

    def shown(found: re.Match[str]) -> str:
        if found[1]:
            return found[1] if colour else ""
        return found[0].encode("unicode_escape").decode()

    return _CONTROL.sub(shown, text)


def one_line(text: str) -> str:
    """The text as it may stand in a line of ours, where nothing in it may reorder the rest."""
    return re.sub(r"[\r\n\t]+", " ", _in_order(text)).strip()


def lines_of(text: str) -> list[str]:
    """The lines of a text as a person may be asked about them: none hides, reorders or leaves its
    place, and each is indented as it was."""
    return [
        line.expandtabs(4).replace("\r", "\\r") for line in _in_order(text).strip("\n").split("\n")
    ]


def _in_order(text: str) -> str:
    return escaped(scrub(text), keep=_SEEN)


class Channel:
    """stdout or stderr, for the text of one run, which comes in pieces."""

    def __init__(self, fd: int) -> None:
        self.tty = os.isatty(fd)
        self._fd = fd
        self._colour = colours(fd)
        self._held = ""
        self._at_line_start = True
        self._coloured = False

    def write(self, text: str) -> None:
        """Show it. A colour that may go on in the next piece waits for that."""
        text = self._held + text
        unfinished = _UNFINISHED.search(text)
        self._held = unfinished[0] if unfinished else ""
        self._put(text.removesuffix(self._held))

    def fresh_line(self) -> None:
        """Begin a line, if the last one is not ended yet."""
        if not self._at_line_start:
            self.write("\n")

    def end(self) -> None:
        """Show what waits, and take back colours: SGR 8 would hide what the shell prints next."""
        held, self._held = self._held, ""
        self._put(held)
        if self._coloured:
            write(self._fd, _RESET)

    def _put(self, text: str) -> None:
        shown = scrub(text, colour=self._colour)
        if shown:
            self._at_line_start = shown.endswith("\n")
            self._coloured = self._coloured or "\x1b" in shown
            write(self._fd, shown)


def write(fd: int, text: str) -> None:
    """Write all of it, unbuffered. Raises ReaderGone, and Unavailable for a full disk."""
    data = memoryview(text.encode(errors="backslashreplace"))
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # whoever shares the terminal made it non-blocking
            select.select([], [fd], [])
        except BrokenPipeError:
            raise ReaderGone("nobody reads the output any more") from None
        except OSError as error:
            raise Unavailable(
                f"the output cannot be written: {error.strerror}",
                code="output_failed",
                hint="free some space, or write it to another place",
            ) from error


async def read_line() -> str:
    """A line typed at the terminal of stdin, or `END_OF_INPUT`. Cancelled, it reads nothing."""
    await _readable()
    try:
        line = os.read(STDIN, _LINE_MAX)
    except OSError:  # the terminal was hung up
        return END_OF_INPUT
    return line.decode(errors="replace").removesuffix("\n") if line else END_OF_INPUT


class InputLines:
    """The lines of stdin where it is no terminal: a pipe, a file, or nothing at all."""

    def __init__(self) -> None:
        self._held = b""
        self._over = False

    async def read_line(self) -> str:
        """The next one, or `END_OF_INPUT` from the end on. Reads no further than it must."""
        while b"\n" not in self._held and not self._over and len(self._held) < _LINE_MAX:
            await _readable()
            try:
                piece = os.read(STDIN, _LINE_MAX)
            except OSError:
                piece = b""
            self._held += piece
            self._over = not piece
        if not self._held:
            return END_OF_INPUT
        line, _, self._held = self._held.partition(b"\n")
        return line.decode(errors="replace")


async def _readable() -> None:
    """Wait until stdin has something. A regular file always has, and epoll(7) refuses it."""
    import asyncio  # not for `sbx --help`

    loop = asyncio.get_running_loop()
    typed = asyncio.Event()
    try:
        loop.add_reader(STDIN, typed.set)
    except OSError:
        return
    try:
        await typed.wait()
    finally:
        loop.remove_reader(STDIN)


@contextmanager
def hidden() -> Iterator[None]:
    """What is typed is not shown; from before the prompt on, as whoever pastes is quick."""
    before = termios.tcgetattr(STDIN)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(STDIN, termios.TCSAFLUSH, silent)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSAFLUSH, before)
        with suppress(SbxError):
            write(STDERR, "\n")
