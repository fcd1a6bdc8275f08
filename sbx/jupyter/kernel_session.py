"""One kernel's life behind the sockets, from its start to its end.

    shell      requests are received at once, and served one after the other
    control    urgent requests are served in parallel; the others get in line
    end        requested, or the kernel's own: abort the waiting requests, then call `on_exit`

Each request gets a reply or a line in the log, also if it is invalid, and the next one is served.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from sbx.aio import run_to_completion
from sbx.jupyter import serialize
from sbx.jupyter.channels import Channels
from sbx.jupyter.handlers import KILLED, UNANSWERED, RequestHandlers
from sbx.jupyter.history import CellHistory
from sbx.jupyter.parse import KernelRequest
from sbx.jupyter.serialize import JupyterMessage
from sbx.runtime.run.context import Context

_log = logging.getLogger(__name__)
_LAST_REPLY_S = 10.0  # to answer the request that was running when the kernel ended
_MOST = 10_000  # requests in line
_BYTES_MAX = 64 << 20
_AT_ONCE = frozenset(
    (
        *("interrupt_request", "shutdown_request", "kernel_info_request", "connect_request"),
        *("debug_request", "create_subshell_request", "delete_subshell_request"),
        "list_subshell_request",
    )
)


class QueuedRequest(Struct, frozen=True):
    """A request, and the channel that its reply goes to."""

    channel: str
    request: KernelRequest


class PendingRequests:
    """The requests that wait for the kernel, in their order.

    They are received while a cell runs, so that a cell that fails can abort all requests sent after
    it. If too many requests wait, no more are read from the clients until there is room again.
    """

    def __init__(self) -> None:
        self._entries: deque[QueuedRequest] = deque()
        self._size = 0
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, entry: QueuedRequest) -> None:
        await self._room.wait()
        self.add(entry)

    def add(self, entry: QueuedRequest) -> None:
        """Add a request even if the line is full."""
        self._entries.append(entry)
        self._count(entry.request.size)

    async def take(self) -> QueuedRequest:
        """Wait for the next request and remove it from the line."""
        await self._some.wait()
        entry = self._entries.popleft()
        self._count(-entry.request.size)
        return entry

    def remove(self, kind: str | None = None) -> list[QueuedRequest]:
        """Remove and return all requests, or those of one kind."""
        removed = [entry for entry in self._entries if kind in (None, entry.request.kind)]
        self._entries = deque(
            entry for entry in self._entries if kind not in (None, entry.request.kind)
        )
        self._count(-sum(entry.request.size for entry in removed))
        return removed

    def _count(self, size: int) -> None:
        self._size += size
        self._some.set() if self._entries else self._some.clear()
        full = self._size >= _BYTES_MAX or len(self._entries) >= _MOST
        self._room.clear() if full else self._room.set()


class KernelSession:
    """See the module. `on_exit` receives the exit code, once, as the last step."""

    def __init__(
        self,
        channels: Channels,
        history: CellHistory,
        context: Context,
        on_exit: Callable[[int], None],
    ) -> None:
        self._channels = channels
        self._answers = RequestHandlers(channels, history, context, self._is_over)
        self._on_exit = on_exit
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._serving: asyncio.Task[None] | None = None
        self._waiting = PendingRequests()
        self._free = asyncio.Event()  # whether no request from the line is being served
        self._free.set()

    async def begin(self) -> None:
        """Start the kernel and serve it. Raise the errors of a start."""
        # Beat from now on: a client that connects takes a silent heart for a dead kernel.
        beating = asyncio.create_task(self._channels.beat())
        try:
            await self._answers.begin()
        except BaseException:
            beating.cancel()
            await run_to_completion(self._answers.frontend.stop())
            raise
        self._serving = asyncio.create_task(self._serve(beating))

    async def interrupt(self) -> None:
        """Interrupt the running cell, if there is one."""
        await self._answers.frontend.interrupt()

    async def end(self) -> None:
        """End the kernel if it still runs, and wait until all of it has ended."""
        self._is_over(0)
        if self._serving is not None:
            await run_to_completion(asyncio.wait([self._serving]))

    async def _serve(self, *tasks: asyncio.Task[None]) -> None:
        works = (self._take_in(), self._control(), self._work())
        tasks += tuple(asyncio.create_task(work) for work in works)
        try:
            ends: list[asyncio.Future[Any]] = [self._over, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_over(KILLED)  # if no exit code is set, a task failed or the loop ends
            await run_to_completion(self._wind_up(tasks))
            self._on_exit(self._over.result())

    async def _wind_up(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        try:
            await self._answers.frontend.stop()
            async with asyncio.timeout(_LAST_REPLY_S):
                await self._free.wait()
        except Exception:  # noqa: BLE001  # the boundary of a background task: end the rest as well
            _log.exception("the kernel of a notebook did not end cleanly")
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.error("the service of a kernel ended with an error", exc_info=outcome)
        self._take_what_is_there()
        for entry in self._waiting.remove():
            await self._abort(entry)

    def _is_over(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    # -- requests ---------------------------------------------------------------------------------

    async def _take_in(self) -> None:
        while True:
            await self._waiting.put(QueuedRequest("shell", await self._channels.receive("shell")))

    def _take_what_is_there(self) -> None:
        for request in self._channels.arrived("shell"):
            self._waiting.add(QueuedRequest("shell", request))

    async def _control(self) -> None:
        while True:
            entry = QueuedRequest("control", await self._channels.receive("control"))
            if entry.request.kind in _AT_ONCE:
                await self._answer(entry)
            else:
                await self._waiting.put(entry)

    async def _work(self) -> None:
        """Serve the line. Abort the requests that are left when the kernel has ended."""
        while True:
            entry = await self._waiting.take()
            if self._over.done():
                await self._abort(entry)
                continue
            self._free.clear()
            try:
                await self._answer(entry)
            finally:
                self._free.set()

    async def _answer(self, entry: QueuedRequest) -> None:
        try:
            await self._serve_one(entry)
        except Exception:  # noqa: BLE001  # the boundary: a failed request does not end the others
            _log.exception("a request of a notebook could not be answered")

    async def _serve_one(self, entry: QueuedRequest) -> None:
        """Serve a request between its `busy` and its `idle`."""
        request = entry.request
        await self._channels.publish(serialize.status("busy"), request.header)
        content = await self._answers.content(request)
        failed = content is not None and content.get("status") == "error"
        behind: list[QueuedRequest] = []
        if failed and _stops_on_error(request):
            self._take_what_is_there()  # before the client gets the error and sends more
            behind = self._waiting.remove("execute_request")
        if content is not None:
            await self._reply(entry, content)
        await self._channels.publish(serialize.status("idle"), request.header)
        for waiting in behind:
            await self._abort(waiting)
        if request.kind == "shutdown_request" and not failed:
            self._is_over(0)

    async def _abort(self, entry: QueuedRequest) -> None:
        """Reply that a request is not served.

        No client waits for an answer to a comm message. A client repeats a kernel_info request, and
        accepts only a complete answer to it.
        """
        request = entry.request
        if request.kind in UNANSWERED or request.kind == "kernel_info_request":
            return
        await self._channels.publish(serialize.status("busy"), request.header)
        await self._reply(entry, {"status": "aborted"})
        await self._channels.publish(serialize.status("idle"), request.header)

    async def _reply(self, entry: QueuedRequest, content: dict[str, Any]) -> None:
        kind = entry.request.kind.removesuffix("_request") + "_reply"
        await self._channels.reply(entry.channel, entry.request, JupyterMessage(kind, content))


def _stops_on_error(request: KernelRequest) -> bool:
    """Return whether the cells that were sent after this one are aborted when it fails."""
    content = request.content
    return (
        request.kind == "execute_request"
        and bool(content.get("stop_on_error", True))
        and not content.get("silent")
    )
