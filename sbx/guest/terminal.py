"""The pty of a command: its master side, which PID 1 holds, of the jail's own devpts.

What the command writes goes out on credit (`took` gives more of it): a flood then fills the pty,
and stops whoever writes there, not PID 1 nor another command's words. What is typed waits here
until the command reads it; `fed` tells the runtime, from time to time, how much has gone in.
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
_TELL_FED = 1 << 15

Tell = Callable[[str, Mapping[str, Any]], None]


class Terminal:
    """A pty, until `close`. `slave` is the command's side, for `os.login_tty` in the child."""

    def __init__(self, rows: int, columns: int, window: int) -> None:
        """`window`: bytes that may be told before the runtime has taken any. Raises OSError."""
        self._master, self.slave = os.openpty()
        self._window = window
        self._unsent = bytearray()
        self._fed = 0
        self._events = 0
        self.hung_up = False  # by order
        os.set_blocking(self._master, False)
        self.resize(rows, columns)

    def serve(self, selector: selectors.BaseSelector, tell: Tell) -> None:
        """Begin to carry bytes, in the parent: the other side is the child's from now on."""
        os.close(self.slave)
        self._selector = selector
        self._tell = tell
        self._watch()

    def discard(self) -> None:
        """No child came of it."""
        os.close(self.slave)
        os.close(self._master)

    def resize(self, rows: int, columns: int) -> None:
        """Linux tells the foreground group by SIGWINCH."""
        if self._master >= 0:
            termios.tcsetwinsize(self._master, (rows, columns))

    def took(self, size: int) -> None:
        """The runtime has taken so many bytes."""
        self._window += size
        self._watch()

    def type(self, data: bytes) -> None:
        """Feed what somebody typed."""
        if self._master >= 0:
            self._unsent += data
            self._write()

    def close(self) -> None:
        """Hang up: linux sends SIGHUP to the session's leader and to the foreground group."""
        if self._master < 0:
            return
        if self._events:
            self._selector.unregister(self._master)
        os.close(self._master)
        self._master, self._events = -1, 0

    def last_words(self) -> None:
        """Tell what was written before now, whatever the window."""
        told = 0
        while self._master >= 0 and told < _LAST_WORDS and (size := self._read(_CHUNK)):
            told += size

    def _watch(self) -> None:
        """For what there is something to do about; beyond the window nothing is read."""
        if self._master < 0:
            return
        wanted = (selectors.EVENT_READ if self._window > 0 else 0) | (
            selectors.EVENT_WRITE if self._unsent else 0
        )
        if wanted == self._events:
            return
        if not wanted:
            self._selector.unregister(self._master)
        elif self._events:
            self._selector.modify(self._master, wanted, self._ready)
        else:
            self._selector.register(self._master, wanted, self._ready)
        self._events = wanted

    def _ready(self) -> None:
        if self._unsent:
            self._write()
        if self._window > 0 and self._master >= 0:
            self._read(min(self._window, _CHUNK))
            self._watch()

    def _read(self, most: int) -> int:
        """A read(2) of a pty gives a page at most: several make one frame. 0 without any."""
        pieces: list[bytes] = []
        size, over = 0, False
        while size < most:
            try:
                piece = os.read(self._master, most - size)
            except BlockingIOError:
                break
            except OSError:  # EIO: nobody holds the other side any more
                piece = b""
            if not piece:
                over = True
                break
            pieces.append(piece)
            size += len(piece)
        if size:
            self._window -= size
            self._tell("tty", {"data": b"".join(pieces)})
        if over:
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
        except OSError:  # nobody reads any more
            self._fed += len(self._unsent)
            self._unsent.clear()
        if self._fed >= _TELL_FED:
            self._tell("fed", {"bytes": self._fed, "open": True})
            self._fed = 0
        self._watch()


def kill_session(leader: int) -> None:
    """SIGKILL to every process that is still in the session: a job that ignores SIGHUP, and has a
    process group of its own."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and _session_of(name) == leader:
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)


def _session_of(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command's name may hold anything, also a bracket: proc_pid_stat(5).
            return int(stat.read().rpartition(b")")[2].split()[3])
    except (OSError, ValueError, IndexError):
        return None
