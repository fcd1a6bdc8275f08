"""One live kernel, from its start on: cells and other requests.

    attach            take over the sockets of a jail, idle or not
    boot              send the boot frame
    ready             wait for `ready` from PID 1 and from the kernel, or raise for a refused wall
    begin             start a cell. `ask` starts any other request. Only one request runs at a time.
                      `next` returns its frames in order; the last one is its reply
    next_unsolicited  return a frame that arrived between two requests: output of threads and tasks

A frame that does not fit the current request is treated as malformed: a reply without a request, a
second reply, or a request for input that was not allowed. The kernel is killed and the runtime
continues.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sbx import errors
from sbx.aio import run_to_completion
from sbx.isolation.broker.jail import Jail
from sbx.isolation.masking import Masks
from sbx.isolation.process_state import own_namespaces
from sbx.isolation.receipt import Receipt, read_again
from sbx.kernels import frames
from sbx.kernels.channel import Channel, ChannelClosed, FrameBudget
from sbx.kernels.command import KernelDied
from sbx.kernels.guest import Guest
from sbx.protocol.runs import Cause
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
_REHEARSED = 1 << 10
_UNGUESSED = 10**16
_LAST_WORDS_S = 0.1  # time to read the last frame of a kernel that has ended
_REPLIES: Mapping[str, type[frames.ReplyFrame]] = {
    "execute_request": frames.ExecuteReply,
    "program_request": frames.ProgramReply,
    "complete_request": frames.CompleteReply,
    "inspect_request": frames.InspectReply,
    "is_complete_request": frames.IsCompleteReply,
    "comm_open": frames.CommReply,
    "comm_msg": frames.CommReply,
    "comm_close": frames.CommReply,
}


class Kernel(Guest):
    """A kernel that is ready. The caller must run one cell at a time."""

    def __init__(self, jail: Jail, control: Channel, cells: Channel) -> None:
        super().__init__(jail, control, cells)
        self._turn = ""
        self._reply_type: type[frames.ReplyFrame] = frames.ExecuteReply
        self._allow_stdin = False
        self._has_run = False
        self.receipt: Receipt
        self.versions: frames.KernelReady

    @classmethod
    async def start(cls, jail: Jail, config: Mapping[str, Any], deadline_s: float) -> "Kernel":
        """Boot the guest of a launched jail and wait until it is sealed and can run cells.

        Raise CannotEnforce for a wall that could not be put up inside. Raise Broken if the guest
        died or was not ready in time. After each of these errors, the jail is gone.
        """
        kernel = await cls.attach(jail)
        kernel.boot(config)
        await kernel.ready(deadline_s)
        return kernel

    @classmethod
    async def attach(cls, jail: Jail) -> "Kernel":
        """Take over the sockets of a jail, which may be idle; `boot` and `ready` come next."""
        attaching = asyncio.create_task(cls._attach(jail), context=background_context())
        try:
            # A task that is cancelled before its first step does not release the jail.
            return await run_to_completion(attaching)
        except asyncio.CancelledError:
            if not attaching.cancelled() and attaching.exception() is None:
                await run_to_completion(attaching.result().kill())
            raise

    @classmethod
    async def _attach(cls, jail: Jail) -> "Kernel":
        async with AsyncExitStack() as undo:
            undo.push_async_callback(jail.kill)
            undo.callback(jail.close)
            control = await Channel.open(jail.control, frames.SUPERVISOR)
            undo.callback(control.close)
            cells = await Channel.open(jail.kernel, frames.KERNEL)
            undo.pop_all()
        return cls(jail, control, cells)

    def share(self, budget: FrameBudget) -> None:
        """Read its frames within this budget, which other kernels of its owner share."""
        self._control.share(budget)
        self._cells.share(budget)

    def boot(self, config: Mapping[str, Any]) -> None:
        """Send the boot frames, which turn a jail with a known plan into one that runs cells.

        The frames wait in the sockets until the guest reads them. If a channel is already closed,
        `ready` raises.
        """
        self._generated = config.get("generated")
        boot = {"walls": self._jail.walls(), "kernel": config}
        with contextlib.suppress(ChannelClosed):
            self._control.post("boot", boot)
            if self._jail.zygote is not None:  # a kernel that started before its supervisor
                self._cells.post("boot", boot)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the kernel can run cells, sealed. Make the receipt. Raise like `start`."""
        control, cells, jail = self._control, self._cells, self._jail
        try:
            async with asyncio.timeout(deadline_s):
                places = jail.masked_places
                masks = await self._mask(places) if places else None
                sealed = _expect(await _first(control, cells), frames.SupervisorReady)
                ready = _expect(await cells.receive(), frames.KernelReady)
                facts = await jail.inspect()
            self.versions = ready
            self.receipt = jail.make_receipt(
                facts,
                host=own_namespaces(),
                read_at=time.time(),
                landlock_abi=sealed.landlock,
                masks=masks,
                python=ready.python,
                preload_failed=ready.preload_failed,
            )
            for module, why in ready.preload_failed.items():
                _log.warning("the policy preloads %r, which is not imported: %r", module, why)
        except BaseException as error:
            await run_to_completion(self.kill())
            if isinstance(error, TimeoutError):
                message = f"the kernel was not ready within {deadline_s:g} s"
                raise errors.Broken(message, code="start_timeout") from None
            if isinstance(error, ChannelClosed):
                end = await jail.end()
                why = "its memory ran out" if end.oom_kills else end.stderr or error.cause
                message = f"the kernel ended before it was ready: {why}"
                details = {"oom_kills": end.oom_kills}
                raise errors.Broken(message, code="start_failed", details=details) from None
            raise
        # Also between two runs, when no task reads: a kernel that was cut off, or that hung up,
        # must not live on.
        cells.on_closed = lambda: control.close("the kernel hung up")
        if cells.closed:
            control.close("the kernel hung up")
        self._listening = asyncio.create_task(self._listen(), context=background_context())

    async def _mask(self, places: Sequence[str]) -> Masks:
        """Cover the host's sockets and FIFOs before the guest seals itself and runs any code."""
        _expect(await _first(self._control, self._cells), frames.SupervisorMounted)
        masks = await self._jail.mask(places)
        if masks.masked:
            _log.info("%d sockets and FIFOs of the host are covered in %s", masks.masked, places)
        if not masks.complete:
            _log.warning(
                "sockets of the host in %s may be uncovered: the scan is incomplete", places
            )
        self._control.post("masked", {})
        return masks

    async def read_receipt(self) -> Receipt | None:
        """Return the receipt with the current facts from Linux. None if the kernel has ended."""
        try:
            facts = await self._jail.inspect(fresh=True)
        except errors.Broken:
            if self._jail.gone or not self.alive:
                return None
            raise
        if facts["kernel"] is None:
            return None
        return read_again(self.receipt, facts, host=own_namespaces(), read_at=time.time())

    async def begin(
        self, code: str, *, allow_stdin: bool, output_max: int, silent: bool = False
    ) -> None:
        """Start a cell; `next` returns its frames. Raise KernelDied."""
        request = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "allow_stdin": allow_stdin,
            "output_max": output_max,
        }
        await self.ask("execute_request", request, allow_stdin=allow_stdin)

    async def begin_program(
        self, program: Mapping[str, Any], *, allow_stdin: bool, output_max: int
    ) -> None:
        """Start a program: see `sbx.guest.kernel.program`. Raise KernelDied."""
        request = {**program, "allow_stdin": allow_stdin, "output_max": output_max}
        await self.ask("program_request", request, allow_stdin=allow_stdin)

    async def ask(self, kind: str, content: Any, *, allow_stdin: bool = False) -> None:
        """Start a request of any kind; `next` returns its frames. Raise KernelDied."""
        self._has_run = True
        self._turn = self._name()
        self._reply_type = _REPLIES[kind]
        self._allow_stdin = allow_stdin
        self._in_turn = True
        self._becomes_busy()
        await self._post_request(kind, content, self._turn)

    async def interrupt(self) -> None:
        """Interrupt the request. Has no effect on a dead kernel."""
        with contextlib.suppress(ChannelClosed):
            self._cells.post("interrupt", {}, self._turn)
        await super().interrupt()

    async def kill_program(self) -> None:
        """Kill the program that runs in a process of its own. Has no effect on a dead kernel."""
        with contextlib.suppress(ChannelClosed):
            self._cells.post("kill", {}, self._turn)

    async def finish(self, output_max: int) -> None:
        """Let an idle kernel end by itself, as CPython ends, and wait for that. The caller limits
        the time, and kills the jail in any case."""
        if not self._has_run or self._in_turn or not self.alive:
            return
        room = output_max
        with contextlib.suppress(ChannelClosed, frames.MalformedFrame):
            self._cells.post("finish", {"output_max": output_max}, None)
            while room >= 0:
                room -= (await self._cells.receive()).cost

    async def rehearse(self) -> None:
        """Run a cell that does nothing, so that the pages a first cell writes are already copied.

        Copying them takes longer than the rest of a first cell. Raise like `next`.
        """
        await self.begin("None", allow_stdin=False, output_max=_REHEARSED, silent=True)
        while not isinstance((await self.next()).content, frames.ExecuteReply):
            pass
        self._has_run = False

    @property
    def has_next(self) -> bool:
        """Whether `next` will return a frame without waiting."""
        return self._cells.has_frame

    async def next(self) -> frames.Frame:
        """Return the next frame of the request; a Reply is the last one. May be cancelled safely.

        Raise KernelDied if the kernel ends or is killed for a frame that it sent.
        """
        frame = await self._answer(self._turn)
        if isinstance(frame.content, frames.InputRequestFrame) and not self._allow_stdin:
            raise await self._cut_off("it asked for input that was not allowed")
        if isinstance(frame.content, frames.ReplyFrame):
            if frame.id is None:
                raise await self._cut_off("its reply has no request id")
            if not isinstance(frame.content, self._reply_type):
                raise await self._cut_off("its reply has the wrong type")
            self._in_turn = False
        return frame

    async def next_unsolicited(self) -> frames.Frame:
        """Return the next frame while no request runs. Raise like `next`."""
        frame = await self._answer("")
        if isinstance(frame.content, frames.InputRequestFrame | frames.ReplyFrame):
            raise await self._cut_off("it sent a reply or asked for input without a request")
        return frame

    def on_unsolicited(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` from now on when frames arrive that no task waits for."""
        self._cells.on_unread = callback

    async def answer_input(self, value: str) -> None:
        await self._post_request("input_reply", {"value": value}, None)

    def _name(self) -> str:
        """Return an id that the kernel cannot guess: only code that read the request can answer."""
        return f"{next(self._names)}{secrets.randbelow(_UNGUESSED):016d}"

    async def _post_request(self, kind: str, content: Any, name: str | None) -> None:
        try:
            self._cells.post(kind, content, name)
        except ChannelClosed:
            raise KernelDied from None

    async def _answer(self, name: str) -> frames.Frame:
        try:
            frame = await self._cells.receive()
        except ChannelClosed:
            raise KernelDied from None
        if isinstance(frame.content, frames.KernelReady | frames.RefusedFrame):
            raise await self._cut_off("it sent `ready` twice")
        if frame.id is not None and frame.id != name:
            raise await self._cut_off("it answered a request that was not sent")
        if self.on_output is not None and self.on_output(frame):
            self.killed_for = self.killed_for or Cause.HONEYTOKEN
            raise await self._cut_off("it used a planted credential")
        return frame

    async def _cut_off(self, cause: str) -> KernelDied:
        _log.warning("a kernel was cut off: %s", cause)
        self.cut_off = cause
        self._cells.close(cause)
        await self.kill()
        return KernelDied(cause)


async def _first(control: Channel, cells: Channel) -> frames.Frame:
    """Return the first frame of PID 1.

    If PID 1 ends without a frame, the cause may be the end of its kernel. The kernel's last frame
    then gives the reason.
    """
    try:
        return await control.receive()
    except ChannelClosed:
        with contextlib.suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                frame = await cells.receive()
            if isinstance(frame.content, frames.RefusedFrame):
                return frame
        raise


def _expect(frame: frames.Frame, expected: type[Any]) -> Any:
    if isinstance(frame.content, expected):
        return frame.content
    if isinstance(frame.content, frames.RefusedFrame):
        raise errors.CannotEnforce(
            f"the guest could not put up a wall: {frame.content.message}",
            hint="run `sbx doctor` to see the restrictions that this host can enforce",
            details={"layer": frame.content.layer},
        )
    raise errors.Broken("the guest sent an unexpected frame before it was ready")
