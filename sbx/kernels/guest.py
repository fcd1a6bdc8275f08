"""The life of one guest: its jail, the commands that PID 1 runs in it, and its end.

    spawn      start a command next to the kernel, through PID 1
    kill       send SIGKILL to everything inside. `ended` returns why the jail died, also when
               something else killed it

A frame of PID 1 that does not fit is treated as malformed: the jail is killed, and the runtime
continues.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbx import errors
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.kernels import frames
from sbx.kernels.channel import Channel, ChannelClosed
from sbx.kernels.command import TERMINAL_WINDOW, Command, TerminalCommand
from sbx.protocol.runs import Cause, RunError

_log = logging.getLogger(__name__)
_LAST_COUNT_S = 1.0  # for the counters of a jail that does not end
_LAST_FRAMES_S = 5.0  # for frames that a kernel sent before its end, if they were slowed down


class Guest:
    """The processes of one jail. `control` leads to PID 1, `cells` to the kernel."""

    def __init__(self, jail: Jail, control: Channel, cells: Channel) -> None:
        self._jail = jail
        self._control = control
        self._cells = cells
        self._names = itertools.count(1)
        self._commands: dict[str, Command] = {}
        self._listening: asyncio.Task[None] | None = None
        self._in_turn = False
        self._generated: str | None = None  # see `KernelConfig`
        self.on_busy: Callable[[], None] | None = None
        self.on_output: Callable[[frames.Frame], bool] | None = None  # True: end the kernel
        self.killed_for: Cause | None = None
        self.cut_off: str | None = None
        self.left: RunError | None = None  # why its owner ended it, if the cause was not a limit
        self.seen = (0, 0)
        self._last_counters: JailExit | None = None  # the counters of a jail that does not end

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
        tells_pid: bool = False,
    ) -> Command:
        """Start a command inside the same walls.

        `stdin` is its whole standard input; None leaves the standard input open for
        `Command.write`. With a `window`, the command may write this many bytes, and as many more
        as `Command.took` acknowledges. `files` are pairs of a path (one directory and a name below
        /tmp) and a text. They are removed when the command has ended. `tells_pid`: `Command.pid`
        will return the pid.
        """
        name = str(next(self._names))
        command = Command(self._control_request, name, window)
        self._commands[name] = command
        self._becomes_busy()
        content: dict[str, Any] = {"argv": list(argv), "cwd": cwd, "env": dict(env)}
        if stdin is not None:
            content["stdin"] = stdin
        if window is not None:
            content["window"] = window
        if files:
            content["files"] = [list(file) for file in files]
        if self._generated is not None:
            content["generated"] = self._generated
        if tells_pid:
            content["tells_pid"] = True
        await self._control_request("spawn", content, name)
        if not self.alive:
            command.put(None)
        return command

    async def spawn_at_terminal(
        self,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        rows: int,
        columns: int,
        *,
        tells_pid: bool = False,
    ) -> TerminalCommand:
        """Start a command inside the same walls, with its own pty as controlling terminal."""
        name = str(next(self._names))
        command = TerminalCommand(self._control_request, name, self._becomes_busy)
        self._commands[name] = command
        self._becomes_busy()
        tty = {"rows": rows, "columns": columns, "window": TERMINAL_WINDOW}
        content: dict[str, Any] = {"argv": list(argv), "cwd": cwd, "env": dict(env), "tty": tty}
        if self._generated is not None:
            content["generated"] = self._generated
        if tells_pid:
            content["tells_pid"] = True
        await self._control_request("spawn", content, name)
        if not self.alive:
            command.put(None)
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

    def _note_fault(self) -> None:
        self.cut_off = self.cut_off or self._cells.fault or self._control.fault

    def _becomes_busy(self) -> None:
        if self.on_busy is not None:
            self.on_busy()

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
                    self.killed_for = self.killed_for or Cause.HONEYTOKEN
                    break
                match frame.content:
                    case frames.OutputFrame() | frames.Tty() | frames.Exited() as content:
                        command = self._commands.get(frame.id or "")
                        if command is not None:
                            if not isinstance(content, command.speaks):
                                self.cut_off = "a command sent a frame of another kind of command"
                                break
                            command.put(content)
                            if command.overran:
                                self.cut_off = "a command wrote more than its window allows"
                                break
                        if isinstance(content, frames.Exited):
                            self._commands.pop(frame.id or "", None)
                    case frames.Fed() as fed:
                        if (reader := self._commands.get(frame.id or "")) is not None:
                            reader.fed(fed)
                    case frames.Spawned(pid=pid):
                        if (spawned := self._commands.get(frame.id or "")) is not None:
                            spawned.spawned(pid)
                    case frames.KernelExited():
                        break
                    case _:
                        self.cut_off = "its supervisor sent an unexpected frame"
                        break
        except ChannelClosed:
            pass
        if self.cut_off is None and self.killed_for is None:
            await self._cells.lost(_LAST_FRAMES_S)  # the last output and the reply of a program
        self._note_fault()
        self._cells.close("the kernel ended")
        self._end_commands()
        await self._end_jail()

    def _end_commands(self, *, by_us: bool = False) -> None:
        for command in self._commands.values():
            command.killed_with_kernel = by_us
            command.put(None)
        self._commands.clear()
