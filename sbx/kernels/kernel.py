"""One live kernel: cells, commands, interrupts and the end of a jail, over its two sockets.

    attach     take over the sockets of a jail, parked or not
    boot       send the boot frame
    ready      wait for `ready` from PID 1 and from the kernel, or raise for a refused wall
    begin      start a cell. `ask` starts any other request. Only one request runs at a time. `next`
               returns its frames in order; the last one is its reply
    unasked    return a frame that arrived between two requests: output of threads and tasks
    spawn      start a command next to the kernel, through PID 1
    kill       send SIGKILL to everything inside. `ended` returns why the jail died, also when
               something else killed it

A frame that does not fit the current request is treated as malformed: a reply without a request, a
second reply, or a request for input that was not allowed. The kernel is killed and the runtime
continues.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sbx import errors
from sbx.aio import run_to_completion
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.isolation.facts import own_namespaces
from sbx.isolation.masking import Masks
from sbx.isolation.receipt import Receipt, read_again
from sbx.kernels import frames
from sbx.kernels.budget import FrameBudget
from sbx.kernels.channel import Channel, ChannelClosed
from sbx.protocol.runs import Cause, RunError
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
_BEYOND_WINDOW = 2 << 20  # bytes: the pipe's content at the command's end may exceed its window
_REHEARSED = 1 << 10
_TERMINAL_WINDOW = 256 << 10  # bytes of a terminal that may be on their way
_UNREAD_MAX = 256 << 10  # bytes of terminal input that no process inside has read
_ACTIVE_S = 2.0  # for how long a terminal counts as busy after the last byte
_UNGUESSED = 10**16
_LAST_COUNT_S = 1.0  # for the counters of a jail that does not end
_LAST_WORDS_S = 0.1  # time to read the last frame of a kernel that has ended
_REPLIES: Mapping[str, type[frames.ReplyFrame]] = {
    "execute_request": frames.ExecuteReply,
    "complete_request": frames.CompleteReply,
    "inspect_request": frames.InspectReply,
    "is_complete_request": frames.IsCompleteReply,
    "comm_open": frames.CommReply,
    "comm_msg": frames.CommReply,
    "comm_close": frames.CommReply,
}


class KernelDied(Exception):
    """The kernel ended during a request; `Kernel.ended` returns how."""


_CommandFrame = frames.OutputFrame | frames.Tty | frames.Exited


class Command:
    """A command that runs inside, next to the kernel."""

    speaks: tuple[type[_CommandFrame], ...] = (frames.OutputFrame, frames.Exited)

    def __init__(self, kernel: "Kernel", name: str, window: int | None = None) -> None:
        """Set up the command's queue of frames.

        `window` is the number of bytes that the command may write before `took` acknowledges them.
        Without a window, its reader (the task of a run) stops it at its output limit.
        """
        self._kernel = kernel
        self._name = name
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self._pending_max = None if window is None else 2 * window + _BEYOND_WINDOW
        self._pending = 0
        self.unread = 0  # bytes of its standard input that it has not read yet
        self.reads = True  # whether its standard input is open, as far as the host knows
        self.killed_with_kernel = False

    async def next(self) -> frames.OutputFrame | frames.Exited:
        """Return the next output; Exited is the last. Raise KernelDied if the jail ends first."""
        frame: frames.OutputFrame | frames.Exited = await self._next()
        return frame

    async def _next(self) -> Any:
        frame = await self._frames.get()
        if frame is None:
            raise KernelDied
        self._pending -= _size(frame)
        return frame

    @property
    def has_next(self) -> bool:
        """Whether `next` will return a frame without waiting."""
        return not self._frames.empty()

    async def took(self, size: int) -> None:
        """Acknowledge this many bytes of output: the command may write as many again."""
        await self._kernel._control_request("took", {"bytes": size}, self._name)

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        await self._kernel._control_request("signal", {"signal": number}, self._name)

    async def write(self, text: str | None) -> None:
        """Write to its standard input; None closes it. The caller must limit `unread`."""
        if text is None:
            self.reads = False
        else:
            self.unread += len(text.encode())
        await self._kernel._control_request("stdin", {"text": text}, self._name)

    @property
    def busy(self) -> bool:
        """Whether the command is active and has to be watched now."""
        return True

    def _put(self, frame: _CommandFrame | None) -> None:
        if frame is not None:
            self._pending += _size(frame)
        self._frames.put_nowait(frame)

    def _fed(self, frame: frames.Fed) -> None:
        self.unread = max(0, self.unread - frame.bytes)
        self.reads = self.reads and frame.open

    @property
    def _overran(self) -> bool:
        """Whether more output came than the window allows: PID 1 is compromised."""
        return self._pending_max is not None and self._pending > self._pending_max


class TerminalCommand(Command):
    """A command on its own pty. Its output arrives as bytes, within a window."""

    speaks = (frames.Tty, frames.Exited)

    def __init__(self, kernel: "Kernel", name: str) -> None:
        super().__init__(kernel, name, _TERMINAL_WINDOW)
        self._active_at = float("-inf")
        self._was_read = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether there was input or output recently. A shell that waits for input is idle."""
        return asyncio.get_running_loop().time() - self._active_at < _ACTIVE_S

    async def read(self) -> frames.Tty | frames.Exited:
        """Return the next frame, like `next`."""
        frame: frames.Tty | frames.Exited = await self._next()
        return frame

    async def type(self, data: bytes) -> None:
        """Write terminal input. Wait while the processes inside do not read the earlier input."""
        while self.unread >= _UNREAD_MAX and self.reads:
            self._was_read.clear()
            await self._was_read.wait()
        self.unread += len(data)
        self._is_active()
        await self._kernel._control_request("type", {"data": data}, self._name)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal. Linux sends SIGWINCH to the foreground group."""
        await self._kernel._control_request(
            "resize", {"rows": rows, "columns": columns}, self._name
        )

    async def hang_up(self) -> None:
        """Close the pty. Linux sends SIGHUP to the session's leader and the foreground group."""
        await self._kernel._control_request("hang_up", {}, self._name)

    def _put(self, frame: _CommandFrame | None) -> None:
        if isinstance(frame, frames.Tty):
            self._is_active()
        else:
            self.reads = False
            self._was_read.set()
        super()._put(frame)

    def _fed(self, frame: frames.Fed) -> None:
        super()._fed(frame)
        self._was_read.set()

    def _is_active(self) -> None:
        was, self._active_at = self.busy, asyncio.get_running_loop().time()
        if not was:
            self._kernel._becomes_busy()


class Kernel:
    """A kernel that is ready. The caller must run one cell at a time."""

    def __init__(self, jail: Jail, control: Channel, cells: Channel) -> None:
        self._jail = jail
        self._control = control
        self._cells = cells
        self._names = itertools.count(1)
        self._commands: dict[str, Command] = {}
        self._listening: asyncio.Task[None] | None = None
        self._turn = ""
        self._reply_type: type[frames.ReplyFrame] = frames.ExecuteReply
        self._allow_stdin = False
        self._in_turn = False
        self.on_busy: Callable[[], None] | None = None
        self.on_output: Callable[[frames.Frame], bool] | None = None  # True: end the kernel
        self.killed_for: Cause | None = None
        self.cut_off: str | None = None
        self.left: RunError | None = None  # why its owner ended it, if the cause was not a limit
        self.seen = (0, 0)
        self._last_counters: JailExit | None = None  # the counters of a jail that does not end
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
        """Take over the sockets of a jail, which may be parked; `boot` and `ready` come next."""
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
                _log.warning("the policy preloads %r, which cannot be imported: %r", module, why)
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

    def close(self) -> None:
        """Close both sockets, which ends the jail."""
        self._control.close()
        self._cells.close()

    @property
    def alive(self) -> bool:
        return not (self._cells.closed or self._control.closed or self._jail.gone)

    @property
    def busy(self) -> bool:
        """Whether a request or a command runs; `on_busy` is called when one starts."""
        return self._in_turn or any(command.busy for command in self._commands.values())

    @property
    def jail(self) -> Jail:
        """The jail around the kernel."""
        return self._jail

    @property
    def pid(self) -> int | None:
        """The host's pid of the jail's PID 1."""
        return self._jail.pid

    def processes(self) -> list[int]:
        """Return the host's pids of all processes of the jail, PID 1 first."""
        return self._jail.processes()

    async def unlinked(self, device: int) -> tuple[int, int]:
        """Return the bytes and the number of its unlinked files on a file system.

        The broker counts them.
        """
        return await self._jail.unlinked(device)

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

    async def ask(self, kind: str, content: Any, *, allow_stdin: bool = False) -> None:
        """Start a request of any kind; `next` returns its frames. Raise KernelDied."""
        self._turn = self._name()
        self._reply_type = _REPLIES[kind]
        self._allow_stdin = allow_stdin
        self._in_turn = True
        self._becomes_busy()
        await self._post_request(kind, content, self._turn)

    async def rehearse(self) -> None:
        """Run a cell that does nothing, so that the pages a first cell writes are already copied.

        Copying them takes longer than the rest of a first cell. Raise like `next`.
        """
        await self.begin("None", allow_stdin=False, output_max=_REHEARSED, silent=True)
        while not isinstance((await self.next()).content, frames.ExecuteReply):
            pass

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

    async def interrupt(self) -> None:
        """Let PID 1 send SIGINT to the kernel's process group. Has no effect on a dead kernel."""
        await self._control_request("interrupt", {}, None)

    async def spawn(
        self,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        stdin: str | None = None,
        *,
        window: int | None = None,
        files: Sequence[tuple[str, str]] = (),
    ) -> Command:
        """Start a command inside the same walls.

        `stdin` is its whole standard input; None leaves the standard input open for
        `Command.write`. With a `window`, the command may write this many bytes, and as many more
        as `Command.took` acknowledges. `files` are pairs of a path (one directory and a name below
        /tmp) and a text. They are removed when the command has ended.
        """
        name = str(next(self._names))
        command = Command(self, name, window)
        self._commands[name] = command
        self._becomes_busy()
        content: dict[str, Any] = {"argv": list(argv), "cwd": cwd, "env": dict(env)}
        if stdin is not None:
            content["stdin"] = stdin
        if window is not None:
            content["window"] = window
        if files:
            content["files"] = [list(file) for file in files]
        await self._control_request("spawn", content, name)
        if not self.alive:
            command._put(None)
        return command

    async def spawn_at_terminal(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str], rows: int, columns: int
    ) -> TerminalCommand:
        """Start a command inside the same walls, with its own pty as controlling terminal."""
        name = str(next(self._names))
        command = TerminalCommand(self, name)
        self._commands[name] = command
        self._becomes_busy()
        tty = {"rows": rows, "columns": columns, "window": _TERMINAL_WINDOW}
        content = {"argv": list(argv), "cwd": cwd, "env": dict(env), "tty": tty}
        await self._control_request("spawn", content, name)
        if not self.alive:
            command._put(None)
        return command

    async def kill(self, cause: Cause | None = None) -> JailExit:
        """End everything inside and wait until it is gone. `cause` is the limit that it exceeded.

        If the jail does not exit in time, the broker cleans it up later. Callers of `kill` and
        `ended` do not wait for that.
        """
        self.killed_for = self.killed_for or cause
        by_us = self.alive
        self._note_fault()
        self.close()
        if self._listening is not None:
            self._listening.cancel()
        self._end_commands(by_us=by_us)
        return await self._end_jail()

    async def _end_jail(self) -> JailExit:
        try:
            return await self._jail.kill()
        except errors.Broken as error:
            cause = error
        if self._last_counters is None:
            _log.warning("a jail did not end in time and is left to the broker: %s", cause)
            self._last_counters = JailExit("", *self.seen)
            with contextlib.suppress(errors.SbxError, TimeoutError):
                async with asyncio.timeout(_LAST_COUNT_S):
                    self._last_counters = await self._jail.counters()
        return self._last_counters

    async def ended(self) -> JailExit:
        """Wait until the kernel has ended, for any reason, and all its processes are gone."""
        assert self._listening is not None
        await asyncio.wait([self._listening])
        return await self.kill()

    async def counters(self) -> JailExit:
        """Return the jail's counters. `seen` keeps the last ones of a live jail for comparison."""
        counters = await self._jail.counters()
        if self.alive:
            self.seen = (counters.oom_kills, counters.pids_max_hits)
        return counters

    # -- requests -------------------------------------------------------------------------------

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
            self.killed_for = self.killed_for or Cause.TRIPWIRE
            raise await self._cut_off("it used a planted credential")
        return frame

    def _note_fault(self) -> None:
        self.cut_off = self.cut_off or self._cells.fault or self._control.fault

    async def _cut_off(self, cause: str) -> KernelDied:
        _log.warning("a kernel was cut off: %s", cause)
        self.cut_off = cause
        self._cells.close(cause)
        await self.kill()
        return KernelDied(cause)

    def _becomes_busy(self) -> None:
        if self.on_busy is not None:
            self.on_busy()

    # -- PID 1 ----------------------------------------------------------------------------------

    async def _control_request(self, kind: str, content: Any, name: str | None) -> None:
        try:
            self._control.post(kind, content, name)
        except ChannelClosed:
            self._end_commands()

    async def _listen(self) -> None:
        """Handle the frames of PID 1 until it hangs up. The end of either socket ends both."""
        try:
            while True:
                frame = await self._control.receive()
                if self.on_output is not None and self.on_output(frame):
                    self.killed_for = self.killed_for or Cause.TRIPWIRE
                    break
                match frame.content:
                    case frames.OutputFrame() | frames.Tty() | frames.Exited() as content:
                        command = self._commands.get(frame.id or "")
                        if command is not None:
                            if not isinstance(content, command.speaks):
                                self.cut_off = "a command sent a frame of another kind of command"
                                break
                            command._put(content)
                            if command._overran:
                                self.cut_off = "a command wrote more than its window allows"
                                break
                        if isinstance(content, frames.Exited):
                            self._commands.pop(frame.id or "", None)
                    case frames.Fed() as fed:
                        if (reader := self._commands.get(frame.id or "")) is not None:
                            reader._fed(fed)
                    case frames.KernelExited():
                        break
                    case _:
                        self.cut_off = "its supervisor sent an unexpected frame"
                        break
        except ChannelClosed:
            pass
        self._note_fault()
        self._cells.close("the kernel ended")
        self._end_commands()
        await self._end_jail()

    def _end_commands(self, *, by_us: bool = False) -> None:
        for command in self._commands.values():
            command.killed_with_kernel = by_us
            command._put(None)
        self._commands.clear()


def _size(frame: _CommandFrame) -> int:
    match frame:
        case frames.OutputFrame():
            return len(frame.text)
        case frames.Tty():
            return len(frame.data)
    return 0


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
