"""The requests of the host, in order."""

import asyncio
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from sbx.guest.frames import FrameError, FrameReader, RawFrame

BROKEN = 70  # EX_SOFTWARE: only a bug in sbx ends a process with it

_CHUNK = 65536  # larger buffers are mapped and unmapped for every read: 30 µs


class RequestQueue:
    """Frames from the host, in order. Each `input_reply` is kept apart, for the code that asked."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._thread = threading.get_ident()
        self._reader = FrameReader()
        self._reading = threading.Lock()
        self._frames: deque[RawFrame] = deque()
        self._answers: deque[str] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._pid = os.getpid()
        self.interrupted: str | None = None  # the id of a request, before its signal comes
        self.on_answer: Callable[[str], None] | None = None
        self.on_kill: Callable[[], None] | None = None

    async def get(self) -> RawFrame:
        while not self._frames:
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self._frames.popleft()

    def read(self) -> None:
        """Read the available bytes without waiting. The end of the stream ends the process."""
        if os.getpid() != self._pid:  # a fork by user code, which has no socket
            return
        with self._reading:
            try:
                data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
                arrived = self._reader.feed(data)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the host hung up and left something unread
                os._exit(0)
            except (OSError, FrameError):
                os._exit(BROKEN)
            if not data:
                os._exit(0)
            for frame in arrived:
                if frame.type == "input_reply":
                    take = self.on_answer or self._answers.append
                    take(str(frame.content.get("value", "")))
                elif frame.type == "interrupt":
                    self.interrupted = frame.id
                elif frame.type == "kill":
                    if self.on_kill is not None:
                        self.on_kill()
                else:
                    self._frames.append(frame)
        if self._frames and self._arrived is not None:
            if threading.get_ident() == self._thread:
                self._wake()
            else:
                self._loop.call_soon_threadsafe(self._wake)

    def forget_answers(self) -> None:
        """Drop answers before a question: they belong to a question that was interrupted."""
        self.read()
        self._answers.clear()

    def wait_for_answer(self) -> str:
        """Block this thread for an `input_reply`; other frames are queued."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not self._answers:
            poll.poll(100)  # with a timeout: another thread may have read the answer
            self.read()
        return self._answers.popleft()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
