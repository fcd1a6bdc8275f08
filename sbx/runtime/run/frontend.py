"""A Jupyter front end of a context: cells with Jupyter's options, questions to the kernel, comms.

    on_published   all output in order: of a cell, of the handler of a comm, or of a thread or task
                   that an earlier cell left
    on_ended       the kernel ended without a request; the reason in words

A kernel that ends is not replaced by the next request: the front end decides. Until then every
request raises Conflict `kernel_gone`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct, field

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames
from sbx.kernels.command import KernelDied
from sbx.kernels.kernel import Kernel
from sbx.protocol.runs import Run, RunError, Status, quarantine_notice
from sbx.run_methods import OnInput
from sbx.runtime.run import checks
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import kernel_gone
from sbx.runtime.run.execution import ForwardedRun, OnPublished, Published, publish

_log = logging.getLogger(__name__)
# Output between requests comes from threads and tasks that a cell left behind. It is read under the
# same lock as requests, so that only one task reads, and a waiting request goes first. A kernel may
# write as much between two requests as in one run. More output stays in the socket until the next
# request, and blocks its writer.
_AT_ONCE = 64  # frames of a turn
_AROUND = 1 << 20  # bytes of the frames around this output


class IdleOutputReader:
    """Passes on the output between the requests to this kernel, until `close`."""

    def __init__(self, context: Context, kernel: Kernel, on_published: OnPublished) -> None:
        self._context = context
        self._kernel = kernel
        self._publish = on_published
        self._room = 0
        self._reading: asyncio.Task[None] | None = None
        kernel.on_unsolicited(self._arrived)
        self.reset()

    def reset(self) -> None:
        """Start a new allowance of output: a request is over."""
        self._room = self._context.output_max + _AROUND
        if self._kernel.has_next:
            self._arrived()

    async def close(self) -> None:
        self._kernel.on_unsolicited(None)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def _arrived(self) -> None:
        if self._room > 0 and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            with contextlib.suppress(KernelDied):
                while self._has_next:
                    async with self._context.turn:
                        await self._read_some()
        except frames.MalformedFrame as error:
            _log.warning("a kernel was cut off: %s", error)
            self._kernel.cut_off = f"it sent an invalid frame: {error}"
            await self._kernel.kill()

    async def _read_some(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_next:
                return
            frame = await self._kernel.next_unsolicited()
            self._room -= frame.size
            if isinstance(frame.content, Published):
                await publish(self._publish, frame.content)

    @property
    def _has_next(self) -> bool:
        return self._room > 0 and self._kernel.has_next


CommKind = Literal["comm_open", "comm_msg", "comm_close"]
_QUESTION_S = 10.0  # for a completion or similar; then it is interrupted, as a cell is
_COMM_MAX = 64 << 20  # bytes of a comm's message as JSON
_STOPPED_FOR_GOOD = (Status.TIMEOUT, Status.KILLED)
_STOPPED = RunError("KernelStopped", "the kernel was stopped meanwhile", "")
_RESTARTED = RunError("KernelRestarted", "the kernel was restarted meanwhile", "")


async def ask_kernel(
    context: Context, kind: str, content: Mapping[str, Any], timeout_s: float
) -> frames.ReplyFrame:
    """Return the reply of the live kernel to a question about code; start nothing.

    Raise Conflict `busy` while a cell runs, and `kernel_gone` without a kernel; Denied, BadRequest
    and TooLarge for the code, and Unavailable `timeout`.
    """
    context.check_open()
    context.checked(content["code"], None)
    if not context.alive:
        raise kernel_gone()
    if context.busy:
        raise errors.Conflict("the kernel runs a cell", code="busy", hint="ask when it has ended")

    async def discard(_: Published) -> None:
        """Ignore what code of an object prints while it is asked."""

    kernel, _ = await context.ready()
    live = context.new_forwarded(discard)
    context.start_request(live, kernel, kind, content, timeout_s, None)
    await context.wait_for(live)
    if live.reply is None:
        raise errors.Unavailable("the kernel did not answer in time", code="timeout")
    return live.reply


class Cell(Struct, frozen=True):
    """The content of an `execute_request`. Libraries inside read its `msg_id`."""

    code: str
    silent: bool = False
    store_history: bool = True
    user_expressions: Mapping[str, str] = field(default_factory=dict)
    msg_id: str = ""


class CellEnd(Struct, frozen=True):
    """The end of a cell. `reply` is the reply of the kernel; None if the kernel ended first. The
    last two fields are decoded parts of the reply."""

    run: Run
    reply: frames.ExecuteReply | None
    payload: Sequence[Mapping[str, Any]] = ()
    user_expressions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class JupyterFrontend:
    """See the module. Requests are served in order; only `interrupt`, `restart` and `stop` do not
    wait. A context has one front end at a time.

    `on_published` is awaited for each frame, which slows only this kernel. It may raise
    frames.MalformedFrame, which ends the kernel.
    """

    def __init__(
        self,
        context: Context,
        on_published: OnPublished,
        on_ended: Callable[[RunError], None],
    ) -> None:
        self._context = context
        self._publish = on_published
        self._on_ended = on_ended
        self._kernel: Kernel | None = None
        self._watch: asyncio.Task[None] | None = None
        self._between: IdleOutputReader | None = None
        self._requests: set[ForwardedRun] = set()
        self._fatal: RunError | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> frames.KernelReady:
        """Start the kernel if necessary. Raise as `Context.start`."""
        async with self._changing:
            return await self._start()

    async def execute(
        self, cell: Cell, *, on_input: OnInput | None = None, timeout: float | None = None
    ) -> CellEnd:
        """Run a cell; with `on_input` it may ask for input. Raise Denied, TooLarge, BadRequest,
        Closed, Conflict `kernel_gone`. A cancelled call interrupts the cell."""
        timeout_s = self._context.checked(cell.code, timeout)
        for text in (*cell.user_expressions, *cell.user_expressions.values(), cell.msg_id):
            checks.check_text(text, "expression")
        content = {
            "code": cell.code,
            "silent": cell.silent,
            "store_history": cell.store_history and not cell.silent,
            "user_expressions": dict(cell.user_expressions),
            "allow_stdin": on_input is not None,
            "takes_payload": True,
            "output_max": self._context.output_max,
            "msg_id": cell.msg_id,
        }
        run, live = await self._ask("execute_request", content, timeout_s, on_input)
        reply = cast("frames.ExecuteReply | None", live.reply)
        return CellEnd(run, reply, live.payload, live.expressions)

    async def complete(self, code: str, cursor: int) -> frames.CompleteReply:
        content = {"code": code, "cursor_pos": cursor}
        return cast("frames.CompleteReply", await self._question("complete_request", content))

    async def inspect(self, code: str, cursor: int, detail: int) -> frames.InspectReply:
        content = {"code": code, "cursor_pos": cursor, "detail_level": detail}
        return cast("frames.InspectReply", await self._question("inspect_request", content))

    async def is_complete(self, code: str) -> frames.IsCompleteReply:
        content = {"code": code}
        return cast("frames.IsCompleteReply", await self._question("is_complete_request", content))

    async def comm(
        self,
        kind: CommKind,
        content: Mapping[str, object],
        metadata: Mapping[str, object],
        buffers: Sequence[bytes],
        msg_id: str = "",
    ) -> None:
        """Send a message of a comm to the kernel, and wait for its handler, at most as long as for
        a cell. Raise as `execute`."""
        timeout_s = self._context.checked("", None)
        _check_comm([content, metadata, msg_id], buffers)
        message = {
            **content,
            "metadata": metadata,
            "buffers": buffers,  # bytes are sent as base64
            "output_max": self._context.output_max,
            "msg_id": msg_id,
        }
        run, live = await self._ask(kind, message, timeout_s)
        if live.reply is None:
            raise _gone_in(run)
        if run.error is not None and run.status in _STOPPED_FOR_GOOD:  # the reply does not state it
            await publish(self._publish, frames.Stream("stderr", f"{run.error.value}\n"))

    async def interrupt(self) -> bool:
        """Interrupt the current cell or handler of a comm. Return False without one."""
        return await self._context.interrupt()

    async def restart(self) -> frames.KernelReady:
        """Start a clean namespace over the same files. Interrupt all requests."""
        async with self._changing:
            await self._stop(_RESTARTED)
            return await self._start()

    async def stop(self) -> None:
        """End the kernel without a call of `on_ended`. The files stay."""
        async with self._changing:
            await run_to_completion(self._stop(_STOPPED))

    async def _question(self, kind: str, content: Mapping[str, Any]) -> frames.ReplyFrame:
        self._context.checked(content["code"], None)
        run, live = await self._ask(kind, content, _QUESTION_S)
        if live.reply is None:
            raise _gone_in(run)
        return live.reply

    async def _ask(
        self,
        kind: str,
        content: Any,
        timeout_s: float,
        on_input: OnInput | None = None,
    ) -> tuple[Run, ForwardedRun]:
        self._context.check_open()
        kernel, between = self._kernel, self._between
        if kernel is None or between is None:
            raise kernel_gone()
        live = self._context.new_forwarded(self._publish)
        self._requests.add(live)
        try:
            self._context.start_request(live, kernel, kind, content, timeout_s, on_input)
            run = await self._context.wait_for(live)
            if notice := quarantine_notice(run.quarantined):
                await publish(self._publish, frames.Stream("stderr", notice))
            return run, live
        finally:
            self._requests.discard(live)
            self._fatal = self._fatal or live.fatal
            between.reset()

    async def _start(self) -> frames.KernelReady:
        kernel, _ = await self._context.ready()
        if kernel is not self._kernel:
            await self._let_go()
            self._kernel = kernel
            self._fatal = None
            self._between = IdleOutputReader(self._context, kernel, self._publish)
            self._watch = asyncio.create_task(self._watch_over(kernel))
        return kernel.versions

    async def _stop(self, why: RunError) -> None:
        await self._let_go()
        await self._context.halt(why)

    async def _let_go(self) -> None:
        watch, between = self._watch, self._between
        self._kernel = self._watch = self._between = None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        if between is not None:
            await between.close()

    async def _watch_over(self, kernel: Kernel) -> None:
        """Wait for the end of the kernel and of its requests, and report it."""
        reason = await self._context.ended(kernel)
        self._kernel = None
        requests = list(self._requests)
        for live in requests:
            await live.ended()
        reasons = (self._fatal, *(live.fatal for live in requests), reason)
        reason = next(filter(None, reasons))
        try:
            self._on_ended(reason)
        except Exception:  # noqa: BLE001  # the border to the listener
            _log.exception("a front end failed at the end of its kernel")


def _check_comm(message: object, buffers: Sequence[bytes]) -> None:
    """Raise BadRequest `invalid_comm`, TooLarge `comm_too_large`."""
    try:
        encoded = msgspec.json.encode(message)
        bad = frames.nested_deeper(encoded, frames.DEPTH_MAX)
    except (TypeError, ValueError, OverflowError, RecursionError):
        bad = True
    if bad:
        raise errors.BadRequest(
            "the message of a comm is not JSON that a kernel can be sent",
            code="invalid_comm",
            hint=f"text that UTF-8 can carry, nested at most {frames.DEPTH_MAX} levels deep",
        )
    size = len(encoded) + sum(map(len, buffers)) * 4 // 3
    if size > _COMM_MAX:
        raise errors.TooLarge(
            f"the message of a comm of {size} bytes is longer than the limit of {_COMM_MAX} bytes",
            code="comm_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": _COMM_MAX},
        )


def _gone_in(run: Run) -> errors.Conflict:
    return kernel_gone(run.error.value if run.error is not None else "the kernel ended meanwhile")
