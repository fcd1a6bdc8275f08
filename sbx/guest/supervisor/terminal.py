"""The pty of a command, on the jail's own devpts. PID 1 holds its master side.

The command may write within a window (`took` extends it). A flood fills the pty and blocks the
writer, but neither PID 1 nor the output of other commands. Typed input waits here until the command
reads it; `fed` reports from time to time how many bytes were read.
"""

import os
import selectors
import signal
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_CHUNK = 1 << 16
_LAST_WORDS = 1 << 20  # a pty holds less
_FED_STEP = 1 << 15

Tell = Callable[[str, Mapping[str, Any]], None]


class Pty:
    """A pty, until `close`. `slave` is the command's side, for `os.login_tty` in the child."""

    def __init__(self, rows: int, columns: int, window: int) -> None:
        """Open a pty. It may send `window` bytes before the first `took`. Raise OSError."""
        self._master, self.slave = os.openpty()
        self._window = window
        self._unsent = bytearray()
        self._fed = 0
        self._events = 0
        self.hung_up = False  # on the runtime's request
        os.set_blocking(self._master, False)
        self.resize(rows, columns)

    def serve(self, selector: selectors.BaseSelector, tell: Tell) -> None:
        """Begin to carry bytes, in the parent. The other side belongs to the child from now on."""
        os.close(self.slave)
        self._selector = selector
        self._send = tell
        self._watch()

    def discard(self) -> None:
        """Close both sides; no child was started."""
        os.close(self.slave)
        os.close(self._master)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size. Linux sends SIGWINCH to the foreground group."""
        if self._master >= 0:
            termios.tcsetwinsize(self._master, (rows, columns))

    def took(self, size: int) -> None:
        """Extend the window by bytes that the runtime has read."""
        self._window += size
        self._watch()

    def type(self, data: bytes) -> None:
        """Write terminal input."""
        if self._master >= 0:
            self._unsent += data
            self._write()

    def close(self) -> None:
        """Hang up: Linux sends SIGHUP to the session's leader and to the foreground group."""
        if self._master < 0:
            return
        if self._events:
            self._selector.unregister(self._master)
        os.close(self._master)
        self._master, self._events = -1, 0

    def last_words(self) -> None:
        """Send all output written before now, also beyond the window."""
        sent = 0
        while self._master >= 0 and sent < _LAST_WORDS and (size := self._read(_CHUNK)):
            sent += size

    def _watch(self) -> None:
        """Wait for the events that are needed now; beyond the window nothing is read."""
        if self._master < 0:
            return
        events = (selectors.EVENT_READ if self._window > 0 else 0) | (
            selectors.EVENT_WRITE if self._unsent else 0
        )
        if events == self._events:
            return
        if not events:
            self._selector.unregister(self._master)
        elif self._events:
            self._selector.modify(self._master, events, self._ready)
        else:
            self._selector.register(self._master, events, self._ready)
        self._events = events

    def _ready(self) -> None:
        if self._unsent:
            self._write()
        if self._window > 0 and self._master >= 0:
            self._read(min(self._window, _CHUNK))
            self._watch()

    def _read(self, size_max: int) -> int:
        """Send up to `size_max` bytes, and return their number.

        A read(2) of a pty returns at most a page, so several of them make one frame.
        """
        pieces: list[bytes] = []
        size, hung_up = 0, False
        while size < size_max:
            try:
                piece = os.read(self._master, size_max - size)
            except BlockingIOError:
                break
            except OSError:  # EIO: no process has the other side open
                piece = b""
            if not piece:
                hung_up = True
                break
            pieces.append(piece)
            size += len(piece)
        if size:
            self._window -= size
            self._send("tty", {"data": b"".join(pieces)})
        if hung_up:
            self.close()
        return size

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = os.write(self._master, memoryview(self._unsent)[:_CHUNK])
                del self._unsent[:sent]
                self._fed += sent
        except BlockingIOError:
            pass
        except OSError:  # no process reads it
            self._fed += len(self._unsent)
            self._unsent.clear()
        if self._fed >= _FED_STEP:
            self._send("fed", {"bytes": self._fed, "open": True})
            self._fed = 0
        self._watch()


def kill_session(leader: int) -> None:
    """Send SIGKILL to every process that is still in the session: a job that ignores SIGHUP, and
    has its own process group."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and _session_of(name) == leader:
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)


def _session_of(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command's name may contain anything, also a bracket: proc_pid_stat(5).
            return int(stat.read().rpartition(b")")[2].split()[3])
    except (OSError, ValueError, IndexError):
        return None
