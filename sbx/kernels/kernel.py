"""One live kernel: the jail's two sockets made into cells, commands, interrupts and one end.

    attach     take over the sockets of a jail, parked or not
    boot       boot frame →
    ready      → `ready` from PID 1 and from the kernel, or the wall that was refused
    begin      one cell at a time, and `ask` any other request; `next` gives the frames that it
               causes in order, the last one is its reply
    unasked    between two of them: what threads and tasks of an earlier one show
    spawn      a command beside it, through PID 1
    kill       SIGKILL to everything inside; `ended` says why it died, whoever killed it

Whatever does not fit the turn (a reply nobody asked for, a second one, a request for input that was
not allowed) is treated as any other malformed frame: the kernel is killed, the runtime lives.
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
from sbx.isolation.facts import own_namespaces
from sbx.isolation.launch import End, Jail
from sbx.isolation.masking import Masks
from sbx.isolation.patience import to_the_end
from sbx.isolation.receipt import Receipt, make_receipt, read_again
from sbx.kernels import frames
from sbx.kernels.budget import FrameBudget
from sbx.kernels.channel import Channel, ChannelClosed
from sbx.protocol.runs import Cause, RunError
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
_BEYOND_WINDOW = 2 << 20  # bytes: what a pipe held when a command ended comes beyond its window
_REHEARSED = 1 << 10
_TERMINAL_WINDOW = 256 << 10  # bytes of a terminal that may be on their way
_UNREAD_MAX = 256 << 10  # bytes typed that nobody inside has read
_ACTIVE_S = 2.0  # for how long a terminal counts as busy after the last byte
_UNGUESSED = 10**16
_LAST_COUNT_S = 1.0  # for the counters of a jail that does not end
_LAST_WORDS_S = 0.1  # in which to read what was sent by one who has ended
_REPLIES: Mapping[str, type[frames.Reply]] = {
    "execute_request": frames.ExecuteReply,
    "complete_request": frames.CompleteReply,
    "inspect_request": frames.InspectReply,
    "is_complete_request": frames.IsCompleteReply,
    "comm_open": frames.CommReply,
    "comm_msg": frames.CommReply,
    "comm_close": frames.CommReply,
}


class KernelDied(Exception):
    """The kernel ended while it was asked something; `Kernel.ended` tells how."""


_Told = frames.Output | frames.Tty | frames.Exited


class Command:
    """A command running inside, beside the kernel."""

    speaks: tuple[type[_Told], ...] = (frames.Output, frames.Exited)

    def __init__(self, kernel: "Kernel", name: str, window: int | None = None) -> None:
        """`window`: bytes that it may write before `took` is called for them. Without one its
        reader, the task of a run, stops it at its output limit."""
        self._kernel = kernel
        self._name = name
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self._most = None if window is None else 2 * window + _BEYOND_WINDOW
        self._held = 0
        self.unread = 0  # bytes of its standard input that it has not read yet
        self.reads = True  # whether its standard input is open, as far as is known here
        self.killed_with_kernel = False

    async def next(self) -> frames.Output | frames.Exited:
        """What it writes; an Exited is the last. Raises KernelDied when the jail ends first."""
        told: frames.Output | frames.Exited = await self._next()
        return told

    async def _next(self) -> Any:
        frame = await self._frames.get()
        if frame is None:
            raise KernelDied
        self._held -= _size(frame)
        return frame

    @property
    def has_next(self) -> bool:
        """Whether `next` will give something without waiting."""
        return not self._frames.empty()

    async def took(self, size: int) -> None:
        """So many bytes of what it wrote were taken: it may write as many again."""
        await self._kernel._tell("took", {"bytes": size}, self._name)

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        await self._kernel._tell("signal", {"signal": number}, self._name)

    async def write(self, text: str | None) -> None:
        """Feed its standard input; None closes it. Whoever calls minds `unread`."""
        if text is None:
            self.reads = False
        else:
            self.unread += len(text.encode())
        await self._kernel._tell("stdin", {"text": text}, self._name)

    @property
    def busy(self) -> bool:
        """Whether what it does is to be watched now."""
        return True

    def _put(self, frame: _Told | None) -> None:
        if frame is not None:
            self._held += _size(frame)
        self._frames.put_nowait(frame)

    def _fed(self, told: frames.Fed) -> None:
        self.unread = max(0, self.unread - told.bytes)
        self.reads = self.reads and told.open

    @property
    def _overran(self) -> bool:
        """Whether more came than its window lets through: PID 1 is not ours any more."""
        return self._most is not None and self._held > self._most


class TerminalCommand(Command):
    """A command on a pty of its own: what it writes comes as bytes, on credit."""

    speaks = (frames.Tty, frames.Exited)

    def __init__(self, kernel: "Kernel", name: str) -> None:
        super().__init__(kernel, name, _TERMINAL_WINDOW)
        self._active_at = float("-inf")
        self._was_read = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether anything was written or typed a short while ago: a shell that waits is idle."""
        return asyncio.get_running_loop().time() - self._active_at < _ACTIVE_S

    async def read(self) -> frames.Tty | frames.Exited:
        """As `next`."""
        told: frames.Tty | frames.Exited = await self._next()
        return told

    async def type(self, data: bytes) -> None:
        """Feed what somebody typed; waits while nobody inside reads what came before."""
        while self.unread >= _UNREAD_MAX and self.reads:
            self._was_read.clear()
            await self._was_read.wait()
        self.unread += len(data)
        self._is_active()
        await self._kernel._tell("type", {"data": data}, self._name)

    async def resize(self, rows: int, columns: int) -> None:
        """The foreground group is told by SIGWINCH."""
        await self._kernel._tell("resize", {"rows": rows, "columns": columns}, self._name)

    async def hang_up(self) -> None:
        """Close the pty: SIGHUP to its session's leader and its foreground group."""
        await self._kernel._tell("hang_up", {}, self._name)

    def _put(self, frame: _Told | None) -> None:
        if isinstance(frame, frames.Tty):
            self._is_active()
        else:
            self.reads = False
            self._was_read.set()
        super()._put(frame)

    def _fed(self, told: frames.Fed) -> None:
        super()._fed(told)
        self._was_read.set()

    def _is_active(self) -> None:
        was, self._active_at = self.busy, asyncio.get_running_loop().time()
        if not was:
            self._kernel._becomes_busy()


class Kernel:
    """A kernel that said `ready`. One cell at a time; the caller sees to that."""

    def __init__(self, jail: Jail, control: Channel, cells: Channel) -> None:
        self._jail = jail
        self._control = control
        self._cells = cells
        self._names = itertools.count(1)
        self._commands: dict[str, Command] = {}
        self._listening: asyncio.Task[None] | None = None
        self._turn = ""
        self._wanted: type[frames.Reply] = frames.ExecuteReply
        self._allow_stdin = False
        self._in_turn = False
        self.on_busy: Callable[[], None] | None = None
        self.on_output: Callable[[frames.Frame], bool] | None = None  # True: it ends for this
        self.killed_for: Cause | None = None
        self.cut_off: str | None = None
        self.left: RunError | None = None  # why its owner ended it, where that was no limit
        self.seen = (0, 0)
        self._left_with: End | None = None  # the counters of a jail that does not end
        self.receipt: Receipt
        self.versions: frames.KernelReady

    @classmethod
    async def start(cls, jail: Jail, config: Mapping[str, Any], deadline_s: float) -> "Kernel":
        """Boot the guest of a launched jail and wait until it is sealed and can run cells.

        Raises CannotEnforce for a wall that could not be put up inside, Broken when the guest died
        or did not get ready in time; the jail is gone in every such case.
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
            return await to_the_end(attaching)
        except asyncio.CancelledError:
            if not attaching.cancelled() and attaching.exception() is None:
                await to_the_end(attaching.result().kill())
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
        """Send what makes the jail, whose plan is known, one that runs cells.

        It waits in the sockets until somebody inside reads. A channel that is closed already shows
        in `ready`.
        """
        boot = {"walls": self._jail.walls(), "kernel": config}
        with contextlib.suppress(ChannelClosed):
            self._control.post("boot", boot)
            if self._jail.zygote is not None:  # a kernel that was there before its supervisor
                self._cells.post("boot", boot)

    async def ready(self, deadline_s: float) -> None:
        """Wait until it is sealed and can run cells, and make the receipt. Raises as `start`."""
        control, cells, jail = self._control, self._cells, self._jail
        try:
            async with asyncio.timeout(deadline_s):
                masks = await self._mask() if jail.plan.masks else None
                sealed = _expect(await _first(control, cells), frames.SupervisorReady)
                ready = _expect(await cells.receive(), frames.KernelReady)
                facts = await jail.inspect()
            self.versions = ready
            self.receipt = make_receipt(
                jail.plan,
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
            await to_the_end(self.kill())
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
        # Also between two runs, when nobody reads: who was cut off, or hung up, must not live on.
        cells.on_closed = lambda: control.close("the kernel hung up")
        if cells.closed:
            control.close("the kernel hung up")
        self._listening = asyncio.create_task(self._listen(), context=background_context())

    async def _mask(self) -> Masks:
        """Cover the host's sockets and FIFOs before the guest seals itself and runs any code."""
        _expect(await _first(self._control, self._cells), frames.SupervisorMounted)
        places = self._jail.plan.host_directories
        masks = await self._jail.mask(places)
        if masks.masked:
            _log.info("%d sockets and FIFOs of the host are covered in %s", masks.masked, places)
        if not masks.complete:
            _log.warning("sockets of the host in %s may be left: not all of it was seen", places)
        self._control.post("masked", {})
        return masks

    async def read_receipt(self) -> Receipt | None:
        """The receipt by what linux says now; None when the kernel has ended meanwhile."""
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
        """Let go of the sockets; the jail ends by that."""
        self._control.close()
        self._cells.close()

    @property
    def alive(self) -> bool:
        return not (self._cells.closed or self._control.closed or self._jail.gone)

    @property
    def busy(self) -> bool:
        """Whether a request or a command runs; `on_busy` is called when one begins."""
        return self._in_turn or any(command.busy for command in self._commands.values())

    @property
    def jail(self) -> Jail:
        """The walls around it."""
        return self._jail

    @property
    def pid(self) -> int | None:
        """The jail's PID 1, as the host numbers it."""
        return self._jail.pid

    def processes(self) -> list[int]:
        """Every process of the jail, as the host numbers them, PID 1 first."""
        return self._jail.processes()

    async def unlinked(self, device: int) -> tuple[int, int]:
        """Bytes and number of its files without a name on a file system, as the broker sees it."""
        return await self._jail.unlinked(device)

    async def begin(
        self, code: str, *, allow_stdin: bool, output_max: int, silent: bool = False
    ) -> None:
        """Start a cell; `next` gives what it causes. Raises KernelDied."""
        request = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "allow_stdin": allow_stdin,
            "output_max": output_max,
        }
        await self.ask("execute_request", request, allow_stdin=allow_stdin)

    async def ask(self, kind: str, content: Any, *, allow_stdin: bool = False) -> None:
        """Start a request of any kind; `next` gives what it causes. Raises KernelDied."""
        self._turn = self._name()
        self._wanted = _REPLIES[kind]
        self._allow_stdin = allow_stdin
        self._in_turn = True
        self._becomes_busy()
        await self._ask(kind, content, self._turn)

    async def rehearse(self) -> None:
        """Run a cell that does nothing: the pages that a first one writes to are copied by then,
        which takes longer than all the rest of it. Raises as `next`."""
        await self.begin("None", allow_stdin=False, output_max=_REHEARSED, silent=True)
        while not isinstance((await self.next()).content, frames.ExecuteReply):
            pass

    @property
    def has_next(self) -> bool:
        """Whether `next` will give a frame without waiting."""
        return self._cells.has_frame

    async def next(self) -> frames.Frame:
        """The next frame of the request; a Reply is the last one. May be cancelled safely.

        Raises KernelDied when the kernel ends, or is ended for what it sent.
        """
        frame = await self._answer(self._turn)
        if isinstance(frame.content, frames.InputRequest) and not self._allow_stdin:
            raise await self._cut_off("it asked for input that was not allowed")
        if isinstance(frame.content, frames.Reply):
            if frame.id is None:
                raise await self._cut_off("its reply names no request")
            if not isinstance(frame.content, self._wanted):
                raise await self._cut_off("its reply is one to something else")
            self._in_turn = False
        return frame

    async def unasked(self) -> frames.Frame:
        """As `next`, while no request goes on: what came is not due to any."""
        frame = await self._answer("")
        if isinstance(frame.content, frames.InputRequest | frames.Reply):
            raise await self._cut_off("it spoke out of turn")
        return frame

    def on_unasked(self, told: Callable[[], None] | None) -> None:
        """From now on call this when frames have arrived that nobody waits for."""
        self._cells.on_unread = told

    async def answer_input(self, value: str) -> None:
        await self._ask("input_reply", {"value": value}, None)

    async def interrupt(self) -> None:
        """SIGINT to the kernel's process group, by PID 1. A kernel that is dead stays so."""
        await self._tell("interrupt", {}, None)

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
        """Start a command inside the same walls. `stdin` is all that it will read; None leaves its
        standard input open for `Command.write`. With a `window` its output comes on credit: so many
        bytes, and as many more as `Command.took` is told. `files` are pairs of a path, one
        directory and a name below /tmp, and a text; they are gone when it has ended."""
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
            content["files"] = [list(one) for one in files]
        await self._tell("spawn", content, name)
        if not self.alive:
            command._put(None)
        return command

    async def spawn_at_terminal(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str], rows: int, columns: int
    ) -> TerminalCommand:
        """Start a command inside the same walls, on a pty of its own that it controls."""
        name = str(next(self._names))
        command = TerminalCommand(self, name)
        self._commands[name] = command
        self._becomes_busy()
        tty = {"rows": rows, "columns": columns, "window": _TERMINAL_WINDOW}
        content = {"argv": list(argv), "cwd": cwd, "env": dict(env), "tty": tty}
        await self._tell("spawn", content, name)
        if not self.alive:
            command._put(None)
        return command

    async def kill(self, cause: Cause | None = None) -> End:
        """End everything inside and wait until it is gone. `cause`: the limit it crossed.

        What takes too long to die is left to the broker, which buries it then: whoever ended it, or
        is told of its end, goes on.
        """
        self.killed_for = self.killed_for or cause
        by_us = self.alive
        self._note_fault()
        self.close()
        if self._listening is not None:
            self._listening.cancel()
        self._end_commands(by_us=by_us)
        return await self._end_jail()

    async def _end_jail(self) -> End:
        try:
            return await self._jail.kill()
        except errors.Broken as error:
            cause = error
        if self._left_with is None:
            _log.warning("a jail is left to the broker: %s", cause)
            self._left_with = End("", *self.seen)
            with contextlib.suppress(errors.SbxError, TimeoutError):
                async with asyncio.timeout(_LAST_COUNT_S):
                    self._left_with = await self._jail.counters()
        return self._left_with

    async def ended(self) -> End:
        """Wait until it has ended, whoever ended it, and nothing of it is left."""
        assert self._listening is not None
        await asyncio.wait([self._listening])
        return await self.kill()

    async def counters(self) -> End:
        """The jail's counters now; `seen` keeps those of one that lives, to be compared with the
        next ones."""
        counters = await self._jail.counters()
        if self.alive:
            self.seen = (counters.oom_kills, counters.pids_max_hits)
        return counters

    # -- requests -------------------------------------------------------------------------------

    def _name(self) -> str:
        """Of a request to the kernel: nobody can answer it who has not read it."""
        return f"{next(self._names)}{secrets.randbelow(_UNGUESSED):016d}"

    async def _ask(self, kind: str, content: Any, name: str | None) -> None:
        try:
            self._cells.post(kind, content, name)
        except ChannelClosed:
            raise KernelDied from None

    async def _answer(self, name: str) -> frames.Frame:
        try:
            frame = await self._cells.receive()
        except ChannelClosed:
            raise KernelDied from None
        if isinstance(frame.content, frames.KernelReady | frames.Refused):
            raise await self._cut_off("it said `ready` twice")
        if frame.id is not None and frame.id != name:
            raise await self._cut_off("it answered what was not asked")
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

    async def _tell(self, kind: str, content: Any, name: str | None) -> None:
        try:
            self._control.post(kind, content, name)
        except ChannelClosed:
            self._end_commands()

    async def _listen(self) -> None:
        """What PID 1 has to say, until it hangs up; the end of either ends both."""
        try:
            while True:
                frame = await self._control.receive()
                if self.on_output is not None and self.on_output(frame):
                    self.killed_for = self.killed_for or Cause.TRIPWIRE
                    break
                match frame.content:
                    case frames.Output() | frames.Tty() | frames.Exited() as told:
                        command = self._commands.get(frame.id or "")
                        if command is not None:
                            if not isinstance(told, command.speaks):
                                self.cut_off = "a command spoke as one of another kind"
                                break
                            command._put(told)
                            if command._overran:
                                self.cut_off = "a command wrote more than it may at once"
                                break
                        if isinstance(told, frames.Exited):
                            self._commands.pop(frame.id or "", None)
                    case frames.Fed() as fed:
                        if (reader := self._commands.get(frame.id or "")) is not None:
                            reader._fed(fed)
                    case frames.KernelExited():
                        break
                    case _:
                        self.cut_off = "its supervisor spoke out of turn"
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


def _size(told: _Told) -> int:
    match told:
        case frames.Output():
            return len(told.text)
        case frames.Tty():
            return len(told.data)
    return 0


async def _first(control: Channel, cells: Channel) -> frames.Frame:
    """What PID 1 says first. One that ends without a word may have done so because its kernel did,
    and that one's last words say why."""
    try:
        return await control.receive()
    except ChannelClosed:
        with contextlib.suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                said = await cells.receive()
            if isinstance(said.content, frames.Refused):
                return said
        raise


def _expect(frame: frames.Frame, wanted: type[Any]) -> Any:
    if isinstance(frame.content, wanted):
        return frame.content
    if isinstance(frame.content, frames.Refused):
        raise errors.CannotEnforce(
            f"the guest could not put up a wall: {frame.content.message}",
            hint="run `sbx doctor` to see what this host can enforce",
            details={"layer": frame.content.layer},
        )
    raise errors.Broken("the guest spoke out of turn before it was ready")
