"""Clean text before it is written to a terminal, and read typed input.

Text from a sandbox is hostile: an escape sequence can change the title of a window, send an answer
to the shell's input, hide the text after it, or forge a line of a log (OSC 52, DECRQSS, SGR 8). The
same rule applies to a terminal, a pipe and a file: `\\n`, `\\t` and `\\r` stay. Colours (SGR) stay
if the output shows colours, and are dropped elsewhere. Every other control character is printed as
`\\x1b`. The exact text is in `--json`, where JSON escapes it.
"""

import os
import re
import select
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sbx.cli.exits import ReaderGone
from sbx.errors import SbxError, Unavailable
from sbx.protocol.invisible import escaped, in_order

STDIN, STDOUT, STDERR = 0, 1, 2
END_OF_INPUT = "\x04"  # a kernel reads this answer as EOF, as in Jupyter
_SGR = r"\x1b\[[0-9;:]{0,32}m"
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")
# C1 (0x80-0x9f) are escape sequences of one character; a lone surrogate is not UTF-8.
_CONTROL = re.compile(rf"({_SGR})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SEEN = " \n\r\t\u3000"  # U+3000 is the space of Chinese and Japanese text, as wide as a character
_RESET = "\x1b[0m"
_LINE_MAX = 1 << 16


def colours(fd: int) -> bool:
    """Return whether to show colours: the fd is a terminal that is not dumb, without NO_COLOR."""
    return (
        os.isatty(fd)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def scrub(text: str, *, colour: bool = False) -> str:
    """Return the text with its control characters escaped. With `colour`, keep colours."""

    def shown(match: re.Match[str]) -> str:
        if match[1]:
            return match[1] if colour else ""
        return match[0].encode("unicode_escape").decode()

    return _CONTROL.sub(shown, text)


def one_line(text: str) -> str:
    """Return the text as a part of one line. It cannot reorder the rest of the line."""
    return re.sub(r"[\r\n\t]+", " ", _in_order(text)).strip()


def lines_of(text: str) -> list[str]:
    """Return the lines of a text for a question to the user.

    No line can hide, reorder or leave its place. Each line keeps its indentation. A colour is
    shown as its characters: the user approves them, too.
    """
    shown = escaped(text, keep=_SEEN).strip("\n").replace("\r", "\\r")
    return [line.expandtabs(4) for line in shown.split("\n")]


def _in_order(text: str) -> str:
    return escaped(scrub(text), keep=_SEEN)


class OutputStream:
    """stdout or stderr, for the text of one run, which arrives in pieces."""

    def __init__(self, fd: int) -> None:
        self.tty = os.isatty(fd)
        self._fd = fd
        self._colour = colours(fd)
        self._pending = ""
        self._at_line_start = True
        self._coloured = False

    def write(self, text: str) -> None:
        """Write a piece. An incomplete colour sequence at its end waits for the next piece."""
        text = self._pending + text
        unfinished = _UNFINISHED.search(text)
        self._pending = unfinished[0] if unfinished else ""
        self._put(text.removesuffix(self._pending))

    def fresh_line(self) -> None:
        """Begin a new line if the current one is not empty."""
        if not self._at_line_start:
            self.write("\n")

    def end(self) -> None:
        """Write the pending text and reset colours: SGR 8 would hide later output of the shell."""
        pending, self._pending = self._pending, ""
        self._put(pending)
        if self._coloured:
            write(self._fd, _RESET)

    def _put(self, text: str) -> None:
        shown = scrub(text, colour=self._colour)
        if self.tty:
            shown = in_order(shown)
        if shown:
            self._at_line_start = shown.endswith("\n")
            self._coloured = self._coloured or "\x1b" in shown
            write(self._fd, shown)


def write(fd: int, text: str) -> None:
    """Write the whole text, unbuffered. Raise ReaderGone, and Unavailable for a full disk."""
    data = memoryview(text.encode(errors="backslashreplace"))
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process that shares the terminal made it non-blocking
            select.select([], [fd], [])
        except BrokenPipeError:
            raise ReaderGone("the reader of the output closed it") from None
        except OSError as error:
            raise Unavailable(
                f"the output cannot be written: {error.strerror}",
                code="output_failed",
                hint="free some space, or write it to another place",
            ) from error


async def read_line() -> str:
    """Read a line from the terminal of stdin, or return `END_OF_INPUT`.

    If cancelled, read nothing.
    """
    await _readable()
    try:
        line = os.read(STDIN, _LINE_MAX)
    except OSError:  # the terminal was hung up
        return END_OF_INPUT
    return line.decode(errors="replace").removesuffix("\n") if line else END_OF_INPUT


class InputLines:
    """The lines of stdin if it is not a terminal: a pipe, a file, or closed."""

    def __init__(self) -> None:
        self._pending = b""
        self._over = False

    async def read_line(self) -> str:
        """Return the next line, or `END_OF_INPUT` after the last one. Read no more than needed."""
        while b"\n" not in self._pending and not self._over and len(self._pending) < _LINE_MAX:
            await _readable()
            try:
                piece = os.read(STDIN, _LINE_MAX)
            except OSError:
                piece = b""
            self._pending += piece
            self._over = not piece
        if not self._pending:
            return END_OF_INPUT
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")


async def _readable() -> None:
    """Wait until stdin is readable. A regular file always is, and epoll(7) refuses it."""
    import asyncio  # a lazy import keeps `sbx --help` fast

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
    """Hide typed input. Enter this before the prompt, because a user may paste at once."""
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


def confirmed(question: str) -> bool:
    """Ask at the terminal and return whether the answer is yes. Discard text typed before."""
    forget_typed()
    write(STDERR, f"{question} [y/N] ")
    try:
        answer = os.read(STDIN, 1 << 16)
    except OSError:  # the terminal was hung up
        return False
    return answer.strip().lower() in (b"y", b"yes")


def forget_typed() -> None:
    """Discard text that was typed before a question."""
    with suppress(termios.error):
        termios.tcflush(STDIN, termios.TCIFLUSH)
