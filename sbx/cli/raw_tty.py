"""The user's own terminal: raw while attached to a terminal of a sandbox, and restored afterwards.

It is restored after an exception, a signal and a lost connection. If this process cannot restore it
(SIGKILL, out of memory), a child process that waits for its end does so.
"""

import os
import signal
import sys
import termios
import tty
from contextlib import suppress
from typing import Any, Self

from sbx.cli.terminal import STDIN, STDOUT
from sbx.errors import BadRequest
from sbx.protocol.terminals import fitting

# Reset the alternate screen, mouse, focus, paste, keypad, cursor keys, margins, colours, charset
# and cursor. Setting the margins moves the cursor, so its position is saved and restored.
_AS_USUAL = (
    b"\x1b[?1049l\x1b[?1000;1002;1003;1004;1005;1006;1015;2004;2026l\x1b[?1;66l\x1b>\x1b[4l"
    b"\x1b7\x1b[r\x1b8\x1b[?6l\x1b[?7;25h\x1b(B\x0f\x1b[0m"
)


class RawTty:
    """stdin and stdout as one terminal: `with OwnTerminal() as own`, and call `raw` inside.

    Create it while this process has one thread, since it forks. Raise BadRequest `not_a_terminal`.
    """

    def __init__(self) -> None:
        if not (os.isatty(STDIN) and os.isatty(STDOUT)):
            raise BadRequest(
                "stdin and stdout are not a terminal",
                code="not_a_terminal",
                hint="to run a command without a terminal: sbx exec --shell",
            )
        self._before = termios.tcgetattr(STDIN)
        self._raw = False
        self._guard, self._end_guard = _guard(self._before)

    @property
    def size(self) -> tuple[int, int]:
        """The rows and columns, limited to the sizes that a terminal of a sandbox may have."""
        try:
            rows, columns = termios.tcgetwinsize(STDOUT)
        except OSError:
            rows, columns = 0, 0
        return fitting(rows or 24, columns or 80)

    def raw(self) -> None:
        """Deliver every key as a byte, including Ctrl-C. A second call is harmless."""
        tty.setraw(STDIN, termios.TCSADRAIN)
        self._raw = True

    def restore(self) -> None:
        """Restore the terminal. Discard unread input: it may be the terminal's answer to an escape
        sequence from inside."""
        if self._raw:
            self._raw = False
            _restore(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        with suppress(OSError):
            os.write(self._end_guard, b"!")
        os.close(self._end_guard)
        with suppress(ChildProcessError):
            os.waitpid(self._guard, 0)


def _restore(before: list[Any]) -> None:
    with suppress(OSError, termios.error):
        os.write(STDOUT, _AS_USUAL)
    with suppress(OSError, termios.error):
        termios.tcsetattr(STDIN, termios.TCSAFLUSH, before)


def _guard(before: list[Any]) -> tuple[int, int]:
    """Start a child that restores the terminal if the pipe closes without a byte.

    The child is in a new session, so that no signal for this process ends it, too. Return its pid
    and the writing end of the pipe.
    """
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
