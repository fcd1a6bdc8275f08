"""What becomes of a request: the kernel's answer, ours, or a refusal in words; and what the kernel
shows meanwhile, as messages to every client.

Cells run one after the other, so what is shown belongs to the last one that was begun, also when a
thread of it shows it later; while a comm's handler runs, it belongs to that comm's message.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from sbx.errors import BadRequest, Broken, SbxError, Unavailable
from sbx.jupyter import messages, requests
from sbx.jupyter.channels import Channels
from sbx.jupyter.comms import Comms
from sbx.jupyter.connection import CHANNELS
from sbx.jupyter.history import History
from sbx.jupyter.messages import Message
from sbx.jupyter.requests import Request
from sbx.kernels import frames
from sbx.protocol.runs import RunError, Status
from sbx.runtime.context import Context
from sbx.runtime.frontend import Cell, CommKind, Frontend, Told

_log = logging.getLogger(__name__)
KILLED = 128 + 9  # as a shell says SIGKILL
UNANSWERED = frozenset({"comm_open", "comm_msg", "comm_close"})
_CUT_OFF = RunError("KernelDied", "the kernel sent what no kernel of ours sends, and was ended", "")
_ENDED = RunError("KernelDied", "the kernel ended", "")
_ENDED_BY_US = frozenset({Status.TIMEOUT, Status.KILLED})
_Content = dict[str, Any]


class Answers:
    """Of one kernel. `over` is told the exit code when it dies, or is ended for what it sent."""

    def __init__(
        self,
        channels: Channels,
        history: History,
        context: Context,
        over: Callable[[int], None],
    ) -> None:
        self.frontend = Frontend(context, self._told, self._died)
        self._channels = channels
        self._history = history
        self._over = over
        self._ready: frames.KernelReady | None = None
        self._comms = Comms()
        self._parent: Mapping[str, Any] = {}  # of what the kernel shows
        self._count = 1  # of the cell that runs, or of the next one
        self._result: str | None = None
        self._asking = asyncio.Lock()
        self._password = False
        self._handlers: dict[str, Callable[[Request, Any], Awaitable[_Content | None]]] = {
            "execute_request": self._execute,
            "complete_request": self._complete,
            "inspect_request": self._inspect,
            "is_complete_request": self._is_complete,
            "history_request": self._recall,
            "comm_info_request": self._comm_info,
            "comm_open": self._comm,
            "comm_msg": self._comm,
            "comm_close": self._comm,
            "kernel_info_request": self._kernel_info,
            "connect_request": self._connect,
            "interrupt_request": self._interrupt,
            "shutdown_request": self._shut_down,
            "debug_request": self._refuse_debugger,
            "create_subshell_request": self._refuse_subshells,
            "delete_subshell_request": self._refuse_subshells,
            "list_subshell_request": self._refuse_subshells,
        }

    async def begin(self) -> None:
        """Start the kernel. Raises what starting one raises."""
        self._ready = await self.frontend.start()
        self._history.begin_session()
        await self._channels.publish(messages.status("starting"), {})

    async def content(self, request: Request) -> _Content | None:
        """Of the reply; None for what gets none."""
        handler = self._handlers.get(request.kind)
        if handler is None:
            _log.info("no kernel knows what %.80r is", request.kind)
            return None
        if request.kind == "execute_request":
            self._parent = request.header
        try:
            return await handler(request, requests.shape(request))
        except frames.Malformed as error:
            _log.warning("a kernel was cut off: %s", error)
            self._over(KILLED)
            content = messages.ended(_CUT_OFF)
        except SbxError as error:
            content = messages.refused(error)
        except Exception:  # noqa: BLE001  # the border: the client gets words, and the log the rest
            _log.exception("a request of a notebook failed")
            content = messages.refused(Broken("the request failed; the log of sbx says why"))
        if request.kind in UNANSWERED:
            _log.warning("%s: %s", request.kind, content["evalue"])
            return None
        return await self._failed(content) if request.kind == "execute_request" else content

    # -- cells ------------------------------------------------------------------------------------

    async def _execute(self, request: Request, said: requests.Execute) -> _Content:
        self._result = None
        if not said.silent:
            entered = messages.execute_input(said.code, self._count)
            await self._channels.publish(entered, self._parent)
        cell = Cell(
            code=said.code,
            silent=said.silent,
            store_history=said.store_history,
            user_expressions=said.user_expressions or {},
            msg_id=request.msg_id,
        )
        on_input = partial(self._ask, request) if said.allow_stdin else None
        end = await self.frontend.execute(cell, on_input=on_input)
        count = self._counted(end.reply)
        if said.store_history and not said.silent:
            self._history.add(count, said.code, self._result)
        if end.reply is None or end.run.status in _ENDED_BY_US:
            content = await self._failed(messages.ended(end.run.error or _ENDED))
        else:
            content = messages.executed(end, end.reply)
        return {**content, "execution_count": count}

    def _counted(self, reply: frames.ExecuteReply | None) -> int:
        """The number of the cell that has ended; from now on `_count` is that of the next."""
        if reply is None or reply.execution_count is None:
            return self._count
        self._count = reply.execution_count + 1
        return reply.execution_count

    async def _failed(self, content: _Content) -> _Content:
        """A cell's error in our own words, which the kernel has not shown."""
        await self._channels.publish(messages.error(content), self._parent)
        return content

    async def _ask(self, request: Request, prompt: str) -> str:
        """Ask the client whose cell asks; nobody else's answer counts, and none from before."""
        async with self._asking:
            self._channels.arrived("stdin")
            question = {"prompt": prompt, "password": self._password}
            await self._channels.reply("stdin", request, Message("input_request", question))
            while True:
                answer = await self._channels.receive("stdin")
                if answer.names != request.names:
                    continue
                try:
                    said = requests.shape(answer)
                except BadRequest as error:
                    _log.warning("an answer that cannot be read: %s", error)
                    continue
                if isinstance(said, requests.InputReply):
                    return said.value

    # -- what the kernel shows --------------------------------------------------------------------

    async def _told(self, told: Told) -> None:
        if isinstance(told, frames.InputRequest):
            self._password = told.password  # `_ask` comes next
            return
        message = messages.shown(told, self._count)
        if isinstance(told, frames.CommOpen | frames.CommMsg):
            self._comms.note(message)
        elif isinstance(told, frames.ExecuteResult):
            plain = message.content["data"].get("text/plain")
            self._result = plain if isinstance(plain, str) else None
        await self._channels.publish(message, self._parent)

    def _died(self, error: RunError) -> None:
        _log.info("the kernel of a notebook ended: %s", error.value)
        self._over(KILLED)

    # -- what else a kernel is asked --------------------------------------------------------------

    async def _complete(self, _: Request, said: requests.Complete) -> _Content:
        position = len(said.code) if said.cursor_pos is None else said.cursor_pos
        reply = await self.frontend.complete(said.code, min(position, len(said.code)))
        return messages.completed(reply, said.code)

    async def _inspect(self, _: Request, said: requests.Inspect) -> _Content:
        position = len(said.code) if said.cursor_pos is None else said.cursor_pos
        position = min(position, len(said.code))
        return messages.inspected(
            await self.frontend.inspect(said.code, position, said.detail_level)
        )

    async def _is_complete(self, _: Request, said: requests.IsComplete) -> _Content:
        return messages.is_complete(await self.frontend.is_complete(said.code))

    async def _comm(self, request: Request, said: requests.CommOpen | requests.CommMsg) -> None:
        content: _Content = {"comm_id": said.comm_id, "data": said.data}
        if isinstance(said, requests.CommOpen):
            content["target_name"] = said.target_name
        self._comms.note(Message(request.kind, content))
        earlier, self._parent = self._parent, request.header
        try:
            kind = cast("CommKind", request.kind)
            await self.frontend.comm(
                kind, content, request.metadata, request.buffers, request.msg_id
            )
        finally:
            self._parent = earlier

    # -- what is known here -----------------------------------------------------------------------

    async def _recall(self, _: Request, said: requests.History) -> _Content:
        return self._history.asked(said)

    async def _comm_info(self, _: Request, said: requests.CommInfo) -> _Content:
        return self._comms.listed(said.target_name)

    async def _kernel_info(self, _: Request, __: object) -> _Content:
        assert self._ready is not None
        return messages.kernel_info(self._ready)

    async def _connect(self, _: Request, __: object) -> _Content:
        bound = self._channels.connection
        return {"status": "ok", **{f"{name}_port": bound.port(name) for name in CHANNELS}}

    async def _interrupt(self, _: Request, __: object) -> _Content:
        await self.frontend.interrupt()
        return {"status": "ok"}

    async def _shut_down(self, request: Request, said: requests.Shutdown) -> _Content:
        content = {"status": "ok", "restart": said.restart}
        await self._channels.publish(Message("shutdown_reply", content), request.header)
        return content

    async def _refuse_debugger(self, request: Request, said: requests.Debug) -> _Content:
        return messages.no_debugger(said.seq, said.command)

    async def _refuse_subshells(self, _: Request, __: object) -> _Content:
        raise Unavailable("a sandbox has no subshells", code="no_subshells")
