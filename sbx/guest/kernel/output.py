"""The output of a cell as `stream` frames: in order, soon, and never beyond the limit.

Output leaves a cell in two ways. `sys.stdout` and `sys.stderr` are those of streams.py. File
descriptors 1 and 2 are pipes into this process, for writers that bypass Python: C libraries,
children, os.write. Both meet in `OutputWriter`. The first line after a silence is sent at once, by
the thread that wrote it, because a busy cell lets no other thread run for 5 ms. Text that follows
is gathered, for 10 ms or up to 8 KiB, and so is a part of a line: a crash must not cut it. Fast
output is never dropped: a send blocks until the host has read, so a flood slows the cell down and
fills no memory.

One thread (`OutputWriter.start`; the process must have only one thread until it is sealed) waits
for the pipes and for gathered text or held frames to become due. A thread that writes, displays or
ends a cell first empties the pipes, under the same lock, so the output of a finished child comes
before later output.
"""

import codecs
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from sbx.guest import frames
from sbx.guest.frames import FrameWriter
from sbx.linux import libc, timerfd

StreamName = Literal["stdout", "stderr"]

INTERVAL_S = 0.010
"""While a cell continues to print, send a frame at most this often …"""
FULL = 8 * 1024
"""… or whenever this many characters have gathered."""
PIECE = 64 * 1024
"""Characters of the longest text in one frame."""

DESCRIPTORS: dict[StreamName, int] = {"stdout": 1, "stderr": 2}
_PIPE_CAPACITY = 65536
_AT_ONCE_S = 1e-6
_PART_S = 0.002  # the rest of a line usually follows within microseconds
_AFTER_THE_LIMIT = "\n[output after the end of a run and beyond its limit is not shown]\n"
_UNCOUNTED = frozenset({"error", "input_request"})


class OutputWriter:
    """Everything a kernel publishes goes through here; may be used from any thread."""

    def __init__(self, writer: FrameWriter, sock: socket.socket) -> None:
        self._writer = writer
        self._sock = sock
        self._lock = threading.RLock()
        self._gathered: list[tuple[StreamName, str]] = []
        self._size = 0
        self._alarm_set = False  # for the thread to send gathered text or held frames
        self._sent_at = 0.0
        self._held_since = 0.0
        self._watches_held = False  # an alarm for held frames is set
        self._in_run = False
        self._limit: int | None = None
        self._remaining: float = float("inf")
        self._pipes: dict[int, StreamName] = {}
        self._decoders: dict[StreamName, codecs.IncrementalDecoder] = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in DESCRIPTORS
        }
        self._filled = select.poll()
        self._alarm = -1
        self._forked = False
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.in_lines = False  # send each line at once: a crash loses none

    def take_over(self) -> None:
        """Replace descriptors 0, 1 and 2 of this process."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        for name, descriptor in DESCRIPTORS.items():
            reader, writer = os.pipe()
            os.dup2(writer, descriptor)
            os.close(writer)
            self._pipes[reader] = name
            self._filled.register(reader, select.POLLIN)
        self._alarm = timerfd.create()  # setting it does not wake the thread: most runs end before
        os.register_at_fork(after_in_child=self._after_fork)

    def start(self) -> None:
        """Start the thread, in a process that has called `take_over` and is sealed."""
        self._thread = threading.Thread(target=self._deliver, name="sbx-output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, before the interpreter is finalised. From then on each text is sent by
        the thread that writes it, and writers that bypass Python write to /dev/null."""
        if self._forked or self._thread is None:
            return
        thread, self._thread, self._stopped = self._thread, None, True
        timerfd.expires_in(self._alarm, _AT_ONCE_S)
        thread.join()
        self.end_run()
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in DESCRIPTORS.values():
            os.dup2(null, descriptor)
        os.close(null)

    def close_readers(self) -> None:
        """Close the reading ends of the pipes, in a fork whose parent reads them."""
        for reader in self._pipes:
            os.close(reader)

    def begin_run(self, limit: int | None) -> None:
        """Begin a run that may send `limit` bytes of output; None is unlimited."""
        with self._lock:
            self._sent_at = 0.0  # the first text of every run goes out at once
            self._in_run = True
            self._limit = limit
            self._remaining = float("inf") if limit is None else limit

    def end_run(self) -> None:
        """Send all output, including the buffers of C and the output of finished children.

        Held frames are sent with the reply, which comes next. Threads may later write the rest of
        the run's limit. Output beyond it is dropped, and does not stop the next run.
        """
        if not self._forked:
            for stream in (sys.__stdout__, sys.__stderr__):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or gone
                    stream.flush()  # type: ignore[union-attr]
            libc.call("fflush", None)
            with self._lock:
                self._empty_pipes()
                for name in self._decoders:  # a part of a character does not begin the next run
                    self._gather_bytes(name, b"", final=True)
                self._send_gathered()
                self._in_run = False

    def write(self, name: StreamName, text: str) -> None:
        if self._forked:
            _write_all(DESCRIPTORS[name], text.encode(errors="backslashreplace"))
            return
        with self._lock:
            self._empty_pipes()
            self._gather(name, text)
            self._send_or_schedule()

    def write_bytes(self, name: StreamName, data: bytes) -> None:
        """Write bytes, which may end within a character."""
        if self._forked:
            _write_all(DESCRIPTORS[name], data)
            return
        with self._lock:
            self._empty_pipes()
            self._gather_bytes(name, data)
            self._send_or_schedule()

    def flush(self) -> None:
        """Send all output so far to the host, and return after that."""
        if self._forked:
            return
        with self._lock:
            self._empty_pipes()
            self._send_gathered()
            self._writer.flush()

    def publish(self, kind: str, content: Mapping[str, Any], hold: bool = False) -> None:
        """Send a frame after all text written before it. Raise FrameError for invalid content.

        With `hold`, send it together with the next frame if that follows within INTERVAL_S, and
        alone after that.

        A frame that exceeds the run's limit is dropped as a whole, except errors and questions.
        """
        if self._forked:
            if kind == "error":  # as CPython reports the end of a process
                text = content.get("exit_text")
                exits = text is not None or content["ename"] == SystemExit.__name__
                lines = [text] if text is not None else [] if exits else content["traceback"]
                self.write("stderr", "".join(f"{line}\n" for line in lines))
            elif (text := content.get("data", {}).get("text/plain")) is not None:
                self.write("stdout", f"{text}\n")
            return
        frame = frames.encode(kind, content)
        with self._lock:
            self._empty_pipes()
            self._send_gathered()
            if kind in _UNCOUNTED or self._take(len(frame)) == len(frame):
                if hold and not self._stopped:
                    self._hold(frame)
                else:
                    self._writer.send_encoded(frame)
            else:
                self._report_limit()

    def _gather(self, name: StreamName, text: str) -> None:
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        allowed = self._take(size)
        if allowed < size:
            head = text.encode(errors="surrogatepass")[:allowed]
            text = head.decode(errors="ignore")
        if text:
            self._gathered.append((name, text))
            self._size += len(text)
        if allowed < size:
            self._report_limit()

    def _gather_bytes(self, name: StreamName, data: bytes, *, final: bool = False) -> None:
        if text := self._decoders[name].decode(data, final):
            self._gather(name, text)

    def _take(self, size: int) -> int:
        """Return how many of `size` bytes may still be sent."""
        if size <= self._remaining:
            self._remaining -= size
            return size
        allowed, self._remaining = int(self._remaining), 0
        return allowed

    def _report_limit(self) -> None:
        """Report the limit once a run, after all text within it: the host then interrupts the
        cell."""
        self._send_gathered()
        if self._limit is not None:
            limit, self._limit = self._limit, None
            if self._in_run:
                self._writer.send("output_limit", {"limit": limit})
            else:
                self._writer.send("stream", {"name": "stderr", "text": _AFTER_THE_LIMIT})

    def _send_or_schedule(self) -> None:
        if not self._gathered:
            return
        now = time.monotonic()
        due = self._sent_at + INTERVAL_S
        is_line = self._gathered[-1][1].endswith("\n")
        if self._size >= FULL or self._stopped or (is_line and (due <= now or self.in_lines)):
            self._send_gathered()
        elif not self._alarm_set:
            self._set_alarm(max(due - now, _PART_S))

    def _hold(self, frame: bytes) -> None:
        self._writer.hold(frame)
        self._held_since = time.monotonic()
        if not self._watches_held:  # an alarm of an earlier frame is enough: setting one is 20 µs
            self._watches_held = True
            self._set_alarm(INTERVAL_S)

    def _send_overdue(self) -> None:
        """Send held frames for which no next frame came. Called by the alarm."""
        self._watches_held = False
        remaining_s = self._held_since + INTERVAL_S - time.monotonic()
        if not self._writer.holds:
            return
        if remaining_s > 0:
            self._watches_held = True
            self._set_alarm(remaining_s)
        else:
            self._writer.flush()

    def _set_alarm(self, seconds: float) -> None:
        timerfd.expires_in(self._alarm, seconds)
        self._alarm_set = True

    def _send_gathered(self) -> None:
        self._alarm_set = False
        gathered, self._gathered, self._size = self._gathered, [], 0
        if not gathered:
            return
        for name, text in _joined(gathered):
            for start in range(0, len(text), PIECE):
                self._writer.send("stream", {"name": name, "text": text[start : start + PIECE]})
        self._sent_at = time.monotonic()

    def _empty_pipes(self) -> None:
        """Read once from each pipe: a pipe holds no more, and a child may never stop writing."""
        for reader, _ in self._filled.poll(0):
            data = os.read(reader, _PIPE_CAPACITY)
            if not data:  # user code closed descriptor 1 or 2
                self._filled.unregister(reader)
            self._gather_bytes(self._pipes[reader], data)

    def _deliver(self) -> None:
        waiting = select.poll()
        waiting.register(self._alarm, select.POLLIN)
        waiting.register(self._sock, select.POLLRDHUP)  # also while a cell keeps the loop busy
        for reader in self._pipes:
            waiting.register(reader, select.POLLIN)
        while True:
            is_due = False
            for descriptor, event in waiting.poll():
                if descriptor == self._alarm:
                    is_due = timerfd.clear(self._alarm)
                elif descriptor == self._sock.fileno():
                    os._exit(0)  # the runtime is gone
                elif not event & select.POLLIN:
                    waiting.unregister(descriptor)
            try:
                with self._lock:
                    self._empty_pipes()
                    if is_due:
                        self._alarm_set = False
                        self._send_gathered()
                        self._send_overdue()
                    else:
                        self._send_or_schedule()
            except OSError:
                os._exit(0)
            if self._stopped:
                return

    def _after_fork(self) -> None:
        self._forked = True


def _joined(gathered: list[tuple[StreamName, str]]) -> list[tuple[StreamName, str]]:
    joined: list[tuple[StreamName, list[str]]] = []
    for name, text in gathered:
        if joined and joined[-1][0] == name:
            joined[-1][1].append(text)
        else:
            joined.append((name, [text]))
    return [(name, "".join(texts)) for name, texts in joined]


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
