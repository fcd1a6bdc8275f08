"""Answer each request: by the kernel, by the bridge, or with an error. Publish the kernel's output.

Cells run one after the other. Output belongs to the cell that began last, even if a thread of that
cell prints it later. While a comm's handler runs, output belongs to that comm's message.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from sbx.errors import BadRequest, Broken, SbxError, Unavailable
from sbx.jupyter import parse, serialize
from sbx.jupyter.channels import Channels
from sbx.jupyter.connection import CHANNELS
from sbx.jupyter.history import CellHistory
from sbx.jupyter.parse import KernelRequest
from sbx.jupyter.serialize import JupyterMessage
from sbx.kernels import frames
from sbx.protocol.runs import RunError, Status
from sbx.runtime.run.context import Context
from sbx.runtime.run.execution import Published
from sbx.runtime.run.frontend import Cell, CommKind, JupyterFrontend

_log = logging.getLogger(__name__)
KILLED = 128 + 9  # a shell's exit code for SIGKILL
UNANSWERED = frozenset({"comm_open", "comm_msg", "comm_close"})
_CUT_OFF = RunError("KernelDied", "the kernel sent an invalid frame and was ended", "")
_ENDED = RunError("KernelDied", "the kernel ended", "")
_ENDED_BY_US = frozenset({Status.TIMEOUT, Status.KILLED})
_Content = dict[str, Any]


# The open comms, tracked on the host: a front end may ask while the kernel is busy.
_COMMS_MAX = 20_000  # a large dashboard has some thousands
_NAME_MAX = 256  # characters of an id, and of a target


class Comms:
    """Tracks the messages of both sides. Comms beyond the limits work, but are not listed."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def note(self, message: JupyterMessage) -> None:
        """Record that one side opened or closed a comm."""
        name = message.content["comm_id"]
        if message.kind == "comm_close":
            self._targets.pop(name, None)
        elif message.kind == "comm_open" and len(self._targets) < _COMMS_MAX:
            target = message.content["target_name"]
            if max(len(name), len(target)) <= _NAME_MAX:
                self._targets[name] = target

    def listed(self, target: str | None) -> dict[str, Any]:
        """Return the content of the reply: all comms, or those of one target."""
        return {
            "status": "ok",
            "comms": {
                name: {"target_name": own_target}
                for name, own_target in self._targets.items()
                if target in (None, own_target)
            },
        }


class RequestHandlers:
    """The answers of one kernel. `over` receives the exit code if the kernel dies or is ended for
    an invalid frame."""

    def __init__(
        self,
        channels: Channels,
        history: CellHistory,
        context: Context,
        over: Callable[[int], None],
    ) -> None:
        self.frontend = JupyterFrontend(context, self._publish_frame, self._died)
        self._channels = channels
        self._history = history
        self._over = over
        self._ready: frames.KernelReady | None = None
        self._comms = Comms()
        self._parent: Mapping[str, Any] = {}  # the parent header of the kernel's output
        self._count = 1  # the number of the running cell, or of the next one
        self._result: str | None = None
        self._asking = asyncio.Lock()
        self._password = False
        self._handlers: dict[str, Callable[[KernelRequest, Any], Awaitable[_Content | None]]] = {
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
        """Start the kernel. Raise the errors of a start."""
        self._ready = await self.frontend.start()
        self._history.begin_session()
        await self._channels.publish(serialize.status("starting"), {})

    async def content(self, request: KernelRequest) -> _Content | None:
        """Return the content of the reply; None for a request without a reply."""
        handler = self._handlers.get(request.kind)
        if handler is None:
            _log.info("unknown request type %.80r", request.kind)
            return None
        if request.kind == "execute_request":
            self._parent = request.header
        try:
            return await handler(request, parse.shape(request))
        except frames.MalformedFrame as error:
            _log.warning("a kernel was cut off: %s", error)
            self._over(KILLED)
            content = serialize.ended(_CUT_OFF)
        except SbxError as error:
            content = serialize.refused(error)
        except Exception:  # noqa: BLE001  # the boundary: the client gets a message, the log the rest
            _log.exception("a request of a notebook failed")
            content = serialize.refused(Broken("the request failed; see the log of sbx"))
        if request.kind in UNANSWERED:
            _log.warning("%s: %s", request.kind, content["evalue"])
            return None
        return await self._failed(content) if request.kind == "execute_request" else content

    # -- cells ------------------------------------------------------------------------------------

    async def _execute(self, request: KernelRequest, body: parse.Execute) -> _Content:
        self._result = None
        if not body.silent:
            entered = serialize.execute_input(body.code, self._count)
            await self._channels.publish(entered, self._parent)
        cell = Cell(
            code=body.code,
            silent=body.silent,
            store_history=body.store_history,
            user_expressions=body.user_expressions or {},
            msg_id=request.msg_id,
        )
        on_input = partial(self._ask, request) if body.allow_stdin else None
        end = await self.frontend.execute(cell, on_input=on_input)
        count = self._counted(end.reply)
        if body.store_history and not body.silent:
            self._history.add(count, body.code, self._result)
        if end.reply is None or end.run.status in _ENDED_BY_US:
            content = await self._failed(serialize.ended(end.run.error or _ENDED))
        else:
            content = serialize.executed(end, end.reply)
        return {**content, "execution_count": count}

    def _counted(self, reply: frames.ExecuteReply | None) -> int:
        """Return the number of the cell that has ended. Set `_count` to that of the next one."""
        if reply is None or reply.execution_count is None:
            return self._count
        self._count = reply.execution_count + 1
        return reply.execution_count

    async def _failed(self, content: _Content) -> _Content:
        """Publish an error of sbx for a cell; the kernel has not shown it."""
        await self._channels.publish(serialize.error(content), self._parent)
        return content

    async def _ask(self, request: KernelRequest, prompt: str) -> str:
        """Ask the client whose cell wants input. Ignore answers of other clients and older ones."""
        async with self._asking:
            self._channels.arrived("stdin")
            question = {"prompt": prompt, "password": self._password}
            await self._channels.reply("stdin", request, JupyterMessage("input_request", question))
            while True:
                answer = await self._channels.receive("stdin")
                if answer.names != request.names:
                    continue
                try:
                    body = parse.shape(answer)
                except BadRequest as error:
                    _log.warning("an input reply is invalid: %s", error)
                    continue
                if isinstance(body, parse.InputReply):
                    return body.value

    # -- the output of the kernel -----------------------------------------------------------------

    async def _publish_frame(self, frame: Published) -> None:
        if isinstance(frame, frames.InputRequestFrame):
            self._password = frame.password  # `_ask` comes next
            return
        message = serialize.shown(frame, self._count)
        if isinstance(frame, frames.CommOpenFrame | frames.CommMsgFrame):
            self._comms.note(message)
        elif isinstance(frame, frames.ExecuteResult):
            plain = message.content["data"].get("text/plain")
            self._result = plain if isinstance(plain, str) else None
        await self._channels.publish(message, self._parent)

    def _died(self, error: RunError) -> None:
        _log.info("the kernel of a notebook ended: %s", error.value)
        self._over(KILLED)

    # -- other requests to the kernel -------------------------------------------------------------

    async def _complete(self, _: KernelRequest, body: parse.Complete) -> _Content:
        position = len(body.code) if body.cursor_pos is None else body.cursor_pos
        reply = await self.frontend.complete(body.code, min(position, len(body.code)))
        return serialize.completed(reply, body.code)

    async def _inspect(self, _: KernelRequest, body: parse.Inspect) -> _Content:
        position = len(body.code) if body.cursor_pos is None else body.cursor_pos
        position = min(position, len(body.code))
        return serialize.inspected(
            await self.frontend.inspect(body.code, position, body.detail_level)
        )

    async def _is_complete(self, _: KernelRequest, body: parse.IsComplete) -> _Content:
        return serialize.is_complete(await self.frontend.is_complete(body.code))

    async def _comm(self, request: KernelRequest, body: parse.CommOpen | parse.CommMsg) -> None:
        content: _Content = {"comm_id": body.comm_id, "data": body.data}
        if isinstance(body, parse.CommOpen):
            content["target_name"] = body.target_name
        self._comms.note(JupyterMessage(request.kind, content))
        earlier, self._parent = self._parent, request.header
        try:
            kind = cast("CommKind", request.kind)
            await self.frontend.comm(
                kind, content, request.metadata, request.buffers, request.msg_id
            )
        finally:
            self._parent = earlier

    # -- requests that the bridge answers ---------------------------------------------------------

    async def _recall(self, _: KernelRequest, body: parse.HistoryRequest) -> _Content:
        return self._history.reply(body)

    async def _comm_info(self, _: KernelRequest, body: parse.CommInfo) -> _Content:
        return self._comms.listed(body.target_name)

    async def _kernel_info(self, _: KernelRequest, __: object) -> _Content:
        assert self._ready is not None
        return serialize.kernel_info(self._ready)

    async def _connect(self, _: KernelRequest, __: object) -> _Content:
        bound = self._channels.connection
        return {"status": "ok", **{f"{name}_port": bound.port(name) for name in CHANNELS}}

    async def _interrupt(self, _: KernelRequest, __: object) -> _Content:
        await self.frontend.interrupt()
        return {"status": "ok"}

    async def _shut_down(self, request: KernelRequest, body: parse.Shutdown) -> _Content:
        content = {"status": "ok", "restart": body.restart}
        await self._channels.publish(JupyterMessage("shutdown_reply", content), request.header)
        return content

    async def _refuse_debugger(self, request: KernelRequest, body: parse.Debug) -> _Content:
        return serialize.no_debugger(body.seq, body.command)

    async def _refuse_subshells(self, _: KernelRequest, __: object) -> _Content:
        raise Unavailable("a sandbox has no subshells", code="no_subshells")
