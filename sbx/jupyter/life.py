"""One kernel's life behind the sockets, from its start to its end.

    shell      taken in at once, and served one after the other
    control    what must not wait is served beside them; the rest gets in line
    end        asked for, or the kernel's own: who waits is told, and then whoever started it

Whatever a client sends, it gets an answer or a line in the log, and the next one is served.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from sbx.isolation.patience import to_the_end
from sbx.jupyter import messages
from sbx.jupyter.answers import KILLED, UNANSWERED, Answers
from sbx.jupyter.channels import Channels
from sbx.jupyter.history import History
from sbx.jupyter.messages import Message
from sbx.jupyter.requests import Request
from sbx.jupyter.waiting import Asked, Waiting
from sbx.runtime.context import Context

_log = logging.getLogger(__name__)
_LAST_REPLY_S = 10.0  # in which the request that was under way when the kernel ended is answered
_AT_ONCE = frozenset(
    (
        *("interrupt_request", "shutdown_request", "kernel_info_request", "connect_request"),
        *("debug_request", "create_subshell_request", "delete_subshell_request"),
        "list_subshell_request",
    )
)


class Life:
    """See the module. `on_exit` is told the exit code, once, as the last thing."""

    def __init__(
        self,
        channels: Channels,
        history: History,
        context: Context,
        on_exit: Callable[[int], None],
    ) -> None:
        self._channels = channels
        self._answers = Answers(channels, history, context, self._is_over)
        self._on_exit = on_exit
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._serving: asyncio.Task[None] | None = None
        self._waiting = Waiting()
        self._free = asyncio.Event()  # whether no request from the line is being served
        self._free.set()

    async def begin(self) -> None:
        """Start the kernel and serve it. Raises what starting one raises."""
        # From now on: to a client that connects meanwhile, a silent heart is a dead kernel.
        beating = asyncio.create_task(self._channels.beat())
        try:
            await self._answers.begin()
        except BaseException:
            beating.cancel()
            await to_the_end(self._answers.frontend.stop())
            raise
        self._serving = asyncio.create_task(self._serve(beating))

    async def interrupt(self) -> None:
        """What runs now, if anything does."""
        await self._answers.frontend.interrupt()

    async def end(self) -> None:
        """End the kernel, unless it has ended, and wait until all of it has."""
        self._is_over(0)
        if self._serving is not None:
            await to_the_end(asyncio.wait([self._serving]))

    async def _serve(self, *tasks: asyncio.Task[None]) -> None:
        works = (self._take_in(), self._control(), self._work())
        tasks += tuple(asyncio.create_task(work) for work in works)
        try:
            ends: list[asyncio.Future[Any]] = [self._over, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_over(KILLED)  # where nobody said so, a task failed or the loop ends
            await to_the_end(self._wind_up(tasks))
            self._on_exit(self._over.result())

    async def _wind_up(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        try:
            await self._answers.frontend.stop()
            async with asyncio.timeout(_LAST_REPLY_S):
                await self._free.wait()
        except Exception:  # noqa: BLE001  # the border of a background task: the rest is to end too
            _log.exception("the kernel of a notebook did not end well")
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.error("a kernel is not served any more", exc_info=outcome)
        self._take_what_is_there()
        for asked in self._waiting.remove():
            await self._abort(asked)

    def _is_over(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    # -- requests ---------------------------------------------------------------------------------

    async def _take_in(self) -> None:
        while True:
            await self._waiting.put(Asked("shell", await self._channels.receive("shell")))

    def _take_what_is_there(self) -> None:
        for request in self._channels.arrived("shell"):
            self._waiting.add(Asked("shell", request))

    async def _control(self) -> None:
        while True:
            asked = Asked("control", await self._channels.receive("control"))
            if asked.request.kind in _AT_ONCE:
                await self._answer(asked)
            else:
                await self._waiting.put(asked)

    async def _work(self) -> None:
        """Serve the line; what is left in it when the kernel has ended is not served."""
        while True:
            asked = await self._waiting.take()
            if self._over.done():
                await self._abort(asked)
                continue
            self._free.clear()
            try:
                await self._answer(asked)
            finally:
                self._free.set()

    async def _answer(self, asked: Asked) -> None:
        try:
            await self._serve_one(asked)
        except Exception:  # noqa: BLE001  # the border: one that cannot be answered ends no others
            _log.exception("a request of a notebook is not answered")

    async def _serve_one(self, asked: Asked) -> None:
        """Between its `busy` and its `idle`."""
        request = asked.request
        await self._channels.publish(messages.status("busy"), request.header)
        content = await self._answers.content(request)
        failed = content is not None and content.get("status") == "error"
        behind: list[Asked] = []
        if failed and _stops_on_error(request):
            self._take_what_is_there()  # before the client knows, and sends more
            behind = self._waiting.remove("execute_request")
        if content is not None:
            await self._reply(asked, content)
        await self._channels.publish(messages.status("idle"), request.header)
        for one in behind:
            await self._abort(one)
        if request.kind == "shutdown_request" and not failed:
            self._is_over(0)

    async def _abort(self, asked: Asked) -> None:
        """Say of a request that it is not served. Nobody waits for an answer to a comm's message;
        and who asks what kernel this is asks again, and knows no answer but the whole."""
        request = asked.request
        if request.kind in UNANSWERED or request.kind == "kernel_info_request":
            return
        await self._channels.publish(messages.status("busy"), request.header)
        await self._reply(asked, {"status": "aborted"})
        await self._channels.publish(messages.status("idle"), request.header)

    async def _reply(self, asked: Asked, content: dict[str, Any]) -> None:
        kind = asked.request.kind.removesuffix("_request") + "_reply"
        await self._channels.reply(asked.channel, asked.request, Message(kind, content))


def _stops_on_error(request: Request) -> bool:
    """Whether the cells that were sent behind this one shall not run when it fails."""
    said = request.content
    return (
        request.kind == "execute_request"
        and bool(said.get("stop_on_error", True))
        and not said.get("silent")
    )
