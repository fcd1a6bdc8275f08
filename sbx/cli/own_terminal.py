"""The caller's own terminal: raw while he is attached to another one, and as it was afterwards.

Whatever happens: an exception, a signal, a lost connection; and where this process cannot do it any
more (SIGKILL, no memory), a child that does nothing but wait for its end.
"""

import os
import signal
import sys
import termios
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from sbx.cli.terminal import STDIN, STDOUT
from sbx.errors import BadRequest
from sbx.protocol.terminals import fitting

# Other screen, mouse, focus, paste, keypad, cursor keys, margins, colours, charset, cursor. The
# cursor stays where it is: to set margins moves it.
_AS_USUAL = (
    b"\x1b[?1049l\x1b[?1000;1002;1003;1004;1005;1006;1015;2004;2026l\x1b[?1;66l\x1b>\x1b[4l"
    b"\x1b7\x1b[r\x1b8\x1b[?6l\x1b[?7;25h\x1b(B\x0f\x1b[0m"
)


class OwnTerminal:
    """stdin and stdout as one terminal: `with OwnTerminal() as own`, and `raw` inside.

    To be made while this process has one thread. Raises BadRequest `not_a_terminal`.
    """

    def __init__(self) -> None:
        if not (os.isatty(STDIN) and os.isatty(STDOUT)):
            raise BadRequest(
                "stdin and stdout are no terminal",
                code="not_a_terminal",
                hint="for a command without one: sbx exec --shell",
            )
        self._before = termios.tcgetattr(STDIN)
        self._raw = False
        self._guard, self._tell = _guard(self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns, as near as a terminal of ours may have them."""
        try:
            rows, columns = termios.tcgetwinsize(STDOUT)
        except OSError:
            rows, columns = 0, 0
        return fitting(rows or 24, columns or 80)

    def raw(self) -> None:
        """Every key is a byte to be read, also Ctrl-C; again does no harm."""
        tty.setraw(STDIN, termios.TCSADRAIN)
        self._raw = True

    def restore(self) -> None:
        """As it was. What was typed and is not read is dropped: it may be the terminal's answer to
        what it was asked from inside."""
        if self._raw:
            self._raw = False
            _restore(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()
        with suppress(OSError):
            os.write(self._tell, b"!")
        os.close(self._tell)
        with suppress(ChildProcessError):
            os.waitpid(self._guard, 0)


def _restore(before: list[Any]) -> None:
    with suppress(OSError, termios.error):
        os.write(STDOUT, _AS_USUAL)
    with suppress(OSError, termios.error):
        termios.tcsetattr(STDIN, termios.TCSAFLUSH, before)


def _guard(before: list[Any]) -> tuple[int, int]:
    """A child, in a session of its own so that no signal meant for us ends it too; it restores the
    terminal when the pipe closes without a word."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(reading)
        return child, writing
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(reading, 3)
        os.closerange(4, 1 << 16)
        if not os.read(3, 1):
            _restore(before)
    finally:
        os._exit(0)
