"""The link to the project process: one socket with calls and replies."""

import asyncio
import itertools
import logging
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Self, TypeVar

import msgspec
from msgspec import Struct

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.isolation.broker import watchdog
from sbx.isolation.broker.pulse import RETRY_AFTER_S, Pulse
from sbx.isolation.broker.watchdog import Watchdog
from sbx.service.projects import calls

T = TypeVar("T")
_log = logging.getLogger(__name__)
_START_S = 60.0  # its broker looks at the host first
_END_S = 30.0


class ProjectProcess(Struct, frozen=True):
    """A project server that was started, for `ProjectServerLink`, once."""

    process: subprocess.Popen[bytes]
    sock: socket
    watchdog: Watchdog

    def close(self) -> None:
        """End a server that no `ProjectServerLink` uses."""
        self.sock.close()
        watchdog.end(self.process, self.watchdog, _END_S)


class ProjectServerLink:
    """`async with ProjectServerLink(process) as link`. Its methods may be called concurrently from
    one event loop; they raise Unavailable `project_server_died` once the process or its broker has
    ended, and `project_server_silent` once it answers nothing."""

    def __init__(self, process: ProjectProcess) -> None:
        self._process = process
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[calls.CallReply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pulse = Pulse(self._ping, lambda: self._give_up(_silent))
        self._why: Callable[[], errors.Unavailable] = _died

    async def __aenter__(self) -> Self:
        """Wait until it is ready; raises why it is not."""
        loop = asyncio.get_running_loop()
        ready = self._waiting[0] = loop.create_future()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.sock)
        self._reading = loop.create_task(self._read(reader))
        try:
            async with asyncio.timeout(_START_S):
                reply = await ready
            if reply.error is not None:
                raise calls.revived(reply)
        except TimeoutError:
            await self._close()
            raise _died() from None
        except BaseException:
            await self._close()
            raise
        self._pulse.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_to_completion(self._close())

    @property
    def failure(self) -> errors.Unavailable | None:
        """Return why no call can be answered; None while the server answers."""
        if self._reading is not None and not self._reading.done():
            return None
        return self._why()

    async def call(self, request: calls.Request, result_type: type[T]) -> T:
        """Return the result of a request. Raise the error of the server."""
        return await self.ask(request, result_type, lambda _: None)

    async def resolve(self, path: str) -> Path:
        return Path(await self.call(calls.Resolve(path), str))

    async def names_in(self, path: str, limit: int) -> list[str]:
        return await self.call(calls.NamesIn(path, limit), list[str])

    async def look_at(self, directory: Path) -> None:
        await self.call(calls.Look(str(directory)), type(None))

    async def obtain(self, call: Awaitable[int], undo: Callable[[int], calls.Request]) -> int:
        """Return the number of the thing that the server opens in this call. If the caller is
        cancelled, the server still opens it; then send `undo`."""
        reply = asyncio.ensure_future(call)

        def give_back(done: "asyncio.Future[int]") -> None:
            if not done.cancelled() and done.exception() is None:
                self._send(calls.Call(next(self._ids), undo(done.result())))

        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            reply.add_done_callback(give_back)
            raise

    async def ask(
        self,
        request: calls.Request,
        result_type: type[T],
        note: Callable[[calls.CallReply], None],
    ) -> T:
        """Return the result of a request. `note` gets each reply, also one with an error."""
        number = next(self._ids)
        if (failure := self.failure) is not None:
            raise failure
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(calls.Call(number, request))
            assert self._writer is not None
            with suppress(ConnectionError):  # the end of the reading reports it
                await self._writer.drain()
            reply = await waiting
        except asyncio.CancelledError:
            self._send(calls.Cancel(number))
            raise
        finally:
            del self._waiting[number]
        note(reply)
        if reply.error is not None:
            raise calls.revived(reply)
        return msgspec.msgpack.decode(reply.result, type=result_type)

    def _send(self, message: calls.Call | calls.Cancel) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(calls.framed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (body := await calls.read_frame(reader)) is not None:
                self._pulse.answered()
                reply = calls.REPLIES.decode(body)
                waiting = self._waiting.get(reply.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except ValueError as error:
            _log.error("the project server sent an invalid reply: %s", error)
        finally:
            self._pulse.stop()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._why())

    async def _ping(self) -> None:
        if not await self.call(calls.Ping(), bool):
            _log.error("the broker of the project server has ended")
            self._give_up(_died)

    def _give_up(self, why: "Callable[[], errors.Unavailable]") -> None:
        self._why = why
        _log.error("the project server is killed: %s", why().message)
        if self._reading is not None:
            self._reading.cancel()
        watchdog.kill(self._process.process, self._process.watchdog)

    async def _close(self) -> None:
        self._pulse.stop()
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        server = self._process
        await in_thread(watchdog.end, server.process, server.watchdog, _END_S)


def _died() -> errors.Unavailable:
    return errors.Unavailable(
        "the process that has the directories of projects has ended",
        code="project_server_died",
        hint="start the service again: projects and their files are as they were",
        details={"retry_after_s": RETRY_AFTER_S},
    )


def _silent() -> errors.Unavailable:
    return errors.Unavailable(
        "the process that has the directories of projects does not answer",
        code="project_server_silent",
        hint="try again: the service ends, so that it is started again; projects are as they were",
        details={"retry_after_s": RETRY_AFTER_S},
    )
