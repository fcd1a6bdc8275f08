"""One workspace and at most one live kernel; its runs, one after the other.

The kernel starts with the first run that needs it and dies with the conversation, with the limit
it crossed, or with a deadline it ignored; the next run then starts another one and says
`state_lost`. Shell commands run beside a busy cell, in the kernel's own jail.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from sbx import errors
from sbx.isolation.forked import check_process
from sbx.isolation.patience import to_the_end
from sbx.isolation.receipt import Receipt
from sbx.kernels import frames
from sbx.kernels.kernel import Command, Kernel, KernelDied
from sbx.policy import Policy
from sbx.protocol.runs import Cause, Event, Run, RunError, Status
from sbx.runtime.files import OpenFiles, WorkspaceFiles, WorkspaceUploads
from sbx.runtime.live import LiveRun
from sbx.runtime.stop import Ladder, Why
from sbx.workspace import Usage

_log = logging.getLogger(__name__)
_CODE_MAX = 8 << 20
_COMMAND_MAX = (128 << 10) - 1  # one argument of execve(2), with the zero at its end
_PATH_MAX = 4095  # limits.h
_DISK_PERIOD_S = 0.5
_DISK_ENTRIES = 200_000
_DISK_SCAN_S = 0.4

OnInput = Callable[[str], str | Awaitable[str]]


class Conversation:
    """A workspace with a kernel. Its methods may be called concurrently from one event loop.

    `open_files` and `start` are its sandbox's: how files are opened, how a kernel is launched.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        open_files: Callable[[], Awaitable[OpenFiles]],
        start: Callable[[OpenFiles], Awaitable[Kernel]],
        grace_s: float,
    ) -> None:
        self.name = name
        self.files = WorkspaceFiles(self.opened, policy)
        self.uploads = WorkspaceUploads(self.opened, policy)
        self._policy = policy
        self._open_files = open_files
        self._start = start
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._opened: OpenFiles | None = None
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._kernel: Kernel | None = None
        self._had_kernel = False
        self._running: Ladder | None = None
        self._ladders: dict[LiveRun, Ladder] = {}
        self._active = asyncio.Event()
        self._disk: asyncio.Task[None] | None = None
        self._tolerated = (0, 0)
        self._tasks: dict[LiveRun, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        return self._kernel.receipt if self._kernel is not None and self._kernel.alive else None

    # -- runs -----------------------------------------------------------------------------------

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        return await self._awaited(self.start_run(code, timeout=timeout, on_input=on_input))

    async def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncIterator[Event]:
        """Run a cell and follow it live; the last event carries the result."""
        live = self.start_run(code, timeout=timeout, on_input=on_input)
        async for event in live.events():
            yield event

    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` beside the kernel and wait for its result."""
        live = self.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return await self._awaited(live)

    async def stream_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Event]:
        """Run a command and follow it live; the last event carries the result."""
        live = self.start_shell(command, timeout=timeout, cwd=cwd)
        async for event in live.events():
            yield event

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        check_process(self._pid)
        if self._running is None:
            return False
        await self._running.stop(Why.CALLER)
        return True

    def start_run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> LiveRun:
        """Queue a cell; the run goes on whether or not anybody follows it.

        Raises Denied, BadRequest (`invalid_timeout`, `limit_widened`, `invalid_code`), TooLarge
        `code_too_large`, Closed.
        """
        self._demand("python")
        _check_text(code, "code", _CODE_MAX)
        timeout_s = self._timeout(timeout)
        return self._launch(lambda live: self._cell(live, code, timeout_s, on_input))

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> LiveRun:
        """Start a shell command; raises as `start_run` does, and BadRequest `invalid_env`."""
        self._demand("shell")
        if not self._policy.processes:
            raise errors.Denied(
                f"the policy {self._policy.name} lets nothing start a process",
                code="processes_denied",
                hint="use Python, or a policy with processes = true",
            )
        _check_text(command, "command", _COMMAND_MAX)
        if "\0" in command:
            raise errors.BadRequest(
                "a command has no NUL character",
                code="invalid_code",
                hint="hand it data by stdin= or in a file",
            )
        if stdin is not None:
            _check_text(stdin, "stdin", _CODE_MAX)
        timeout_s = self._timeout(timeout)
        spawn = {"cwd": _inside(cwd), "env": _environment(env or {})}
        return self._launch(lambda live: self._command(live, command, spawn, stdin, timeout_s))

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; its receipt."""
        kernel, _ = await self._ready()
        return kernel.receipt

    async def opened(self) -> OpenFiles:
        """The files, opened at the first call."""
        async with self._opening:
            self._check_open()
            if self._opened is None:
                await to_the_end(self._open())
            assert self._opened is not None
            return self._opened

    async def stop(self) -> None:
        """End the kernel and what runs in it; files stay, and the next run starts another."""
        check_process(self._pid)
        ending = [self._tasks[live] for live in self._ladders]
        for ladder in self._ladders.values():
            ladder.why = ladder.why or Why.CALLER
        async with self._starting:
            await self._drop_kernel()
            self._had_kernel = False
        if ending:
            await asyncio.wait(ending)

    async def close(self) -> None:
        """`stop`, for good: every later call raises Closed."""
        check_process(self._pid)
        self._closed = True
        await to_the_end(self._end())

    async def _end(self) -> None:
        ending = list(self._tasks.values())
        for task in ending:
            task.cancel()
        try:
            await self.stop()
        finally:
            if ending:
                await asyncio.wait(ending)
            async with self._opening:
                if self._opened is not None:
                    opened, self._opened = self._opened, None
                    await opened.close()

    async def _open(self) -> None:
        self._opened = await self._open_files()

    # -- one run --------------------------------------------------------------------------------

    def _launch(self, drive: Callable[[LiveRun], Awaitable[Run]]) -> LiveRun:
        self._check_open()
        live = LiveRun(f"run-{secrets.token_hex(6)}", self._policy.limits.output_max)
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        task.add_done_callback(lambda _: self._over(live))
        return live

    def _over(self, live: LiveRun) -> None:
        del self._tasks[live]
        live.fail(_closed("the sandbox was closed before this ran"))  # if nothing came of it

    async def _drive(self, live: LiveRun, drive: Callable[[LiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            live.fail(_closed("the sandbox was closed while this ran"))
            raise
        except errors.SbxError as error:
            live.fail(error)
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            _log.exception("a run failed in sbx itself")
            broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
            broken.__cause__ = error
            live.fail(broken)

    async def _awaited(self, live: LiveRun) -> Run:
        try:
            return await live.result()
        except asyncio.CancelledError:
            await to_the_end(self._give_up(live))
            raise

    async def _give_up(self, live: LiveRun) -> None:
        """Nobody waits for this run any more: interrupt it, or forget it if it has not begun."""
        if ladder := self._ladders.get(live):
            await ladder.stop(Why.CALLER)
        elif task := self._tasks.get(live):
            task.cancel()

    async def _cell(
        self, live: LiveRun, code: str, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self._turn:
            kernel, lost = await self._ready()
            live.restart_clock()
            ladder = Ladder(timeout_s, self._grace_s, kernel.interrupt, kernel.kill)
            self._running = ladder
            self._begin(live, ladder)
            answering: set[asyncio.Task[None]] = set()
            try:
                output_max = self._policy.limits.output_max
                await kernel.begin(code, allow_stdin=on_input is not None, output_max=output_max)
                reply = await self._follow(kernel, live, ladder, on_input, answering)
            except KernelDied:
                return await self._died(live, kernel, ladder.why)
            except frames.Malformed as error:
                _log.warning("a kernel was killed for what it sent: %s", error)
                return await self._died(live, kernel, ladder.why)
            finally:
                self._running = None
                del self._ladders[live]
                for task in answering:
                    task.cancel()
            live.replied(reply)
            if reply.status == "error":
                await (
                    kernel.counters()
                )  # a child may have died of a limit: that is not the next run's
            status, cause = _outcome(reply, ladder.why)
            why = self._explained(status, cause)
            return live.finish(status, cause=cause, error=why, state_lost=lost)

    async def _follow(
        self,
        kernel: Kernel,
        live: LiveRun,
        ladder: Ladder,
        on_input: OnInput | None,
        answering: set[asyncio.Task[None]],
    ) -> frames.ExecuteReply:
        while True:
            frame = await ladder.next(kernel.next)
            if isinstance(frame.content, frames.ExecuteReply):
                return frame.content
            live.add(frame)
            if live.over:
                await ladder.stop(Why.OUTPUT)
            elif isinstance(frame.content, frames.InputRequest) and on_input is not None:
                prompt = frame.content.prompt
                answering.add(asyncio.create_task(_answer(kernel, on_input, prompt, ladder)))

    async def _command(
        self,
        live: LiveRun,
        text: str,
        spawn: Mapping[str, Any],
        stdin: str | None,
        timeout_s: float,
    ) -> Run:
        kernel, lost = await self._ready()
        live.restart_clock()
        command = await kernel.spawn(["/bin/bash", "-c", text], spawn["cwd"], spawn["env"])
        if stdin is not None:
            await command.write(stdin)
        await command.write(None)
        ladder = Ladder(
            timeout_s,
            self._grace_s,
            lambda: command.signal(signal.SIGINT),
            lambda: command.signal(signal.SIGKILL),
        )
        self._begin(live, ladder)
        try:
            exited = await self._follow_command(command, live, ladder)
        except (KernelDied, TimeoutError):
            return await self._died(live, kernel, ladder.why)
        finally:
            del self._ladders[live]
        return await self._exited(live, kernel, exited, ladder.why, lost=lost)

    async def _follow_command(
        self, command: Command, live: LiveRun, ladder: Ladder
    ) -> frames.Exited:
        while True:
            told = await ladder.next(command.next)
            if isinstance(told, frames.Exited):
                return told
            live.add(frames.Frame(told, None, len(told.text)))
            if live.over:
                await ladder.stop(Why.OUTPUT)

    # -- the ends of a run ----------------------------------------------------------------------

    async def _died(self, live: LiveRun, kernel: Kernel, why: Why | None) -> Run:
        """The kernel ended during the run: by our ladder, by a limit, or by itself."""
        oom_kills, pids_max_hits = kernel.seen
        end = await kernel.kill()
        cause: Cause | None
        if kernel.killed_for is not None:
            status, cause = Status.KILLED, kernel.killed_for
        elif end.oom_kills > oom_kills:
            status, cause = Status.KILLED, Cause.MEMORY
        elif why is not None:
            status, cause = why.outcome()
        elif end.pids_max_hits > pids_max_hits:
            status, cause = Status.KILLED, Cause.PIDS
        else:
            status, cause = Status.KILLED, Cause.CRASHED
        return live.finish(
            status, cause=cause, state_lost=True, error=self._explained(status, cause)
        )

    async def _exited(
        self,
        live: LiveRun,
        kernel: Kernel,
        exited: frames.Exited,
        why: Why | None,
        *,
        lost: bool,
    ) -> Run:
        if exited.error is not None:
            error = RunError("CommandNotStarted", exited.error, exited.error)
            return live.finish(Status.KILLED, cause=Cause.PIDS, error=error, state_lost=lost)
        code = exited.code if exited.code is not None else 128 + (exited.signal or 0)
        status, cause = Status.OK if code == 0 else Status.ERROR, None
        if why is not None:
            status, cause = why.outcome()
        elif exited.signal == signal.SIGKILL or code == 128 + signal.SIGKILL:
            oom_kills, _ = kernel.seen
            if (await kernel.counters()).oom_kills > oom_kills:
                status, cause = Status.KILLED, Cause.MEMORY
        return live.finish(
            status,
            cause=cause,
            exit_code=code,
            state_lost=lost,
            error=self._explained(status, cause),
        )

    def _explained(self, status: Status, cause: Cause | None) -> RunError | None:
        """What ended the run, in a sentence for whoever reads the result, often a model."""
        limits = self._policy.limits
        match status, cause:
            case Status.TIMEOUT, _:
                return RunError("Timeout", "the run took longer than its time-out", "")
            case Status.KILLED, Cause.MEMORY:
                text = f"the run used more memory than the limit of {limits.memory_max} bytes"
                return RunError("MemoryLimit", text, "")
            case Status.KILLED, Cause.OUTPUT:
                text = f"the run wrote more output than the limit of {limits.output_max} bytes"
                return RunError("OutputLimit", text, "")
            case Status.KILLED, Cause.PIDS:
                text = f"the run started more processes than the limit of {limits.tasks_max}"
                return RunError("ProcessLimit", text, "")
            case Status.KILLED, Cause.DISK:
                text = f"the workspace grew beyond its limit of {limits.workspace_max} bytes"
                return RunError("DiskLimit", text, "")
            case Status.KILLED, _:
                return RunError("KernelDied", "the kernel process ended by itself", "")
        return None

    # -- the kernel -----------------------------------------------------------------------------

    async def _ready(self) -> tuple[Kernel, bool]:
        """The live kernel, started where there is none; and whether an earlier state is lost."""
        async with self._starting:
            if self._kernel is not None and self._kernel.alive:
                return self._kernel, False
            await self._drop_kernel()
            opened = await self.opened()
            lost = self._had_kernel
            self._kernel = await self._start(opened)
            self._had_kernel = True
            if opened.measured is not None:
                watch = self._watch_disk(self._kernel, opened)
                self._disk = asyncio.create_task(watch)
            return self._kernel, lost

    def _begin(self, live: LiveRun, ladder: Ladder) -> None:
        self._ladders[live] = ladder
        self._active.set()

    async def _watch_disk(self, kernel: Kernel, opened: OpenFiles) -> None:
        """End a kernel that makes the workspace grow beyond its limits; looks while runs go on.

        What is beyond them already is tolerated as long as it does not grow: the next run may be
        the one that deletes.
        """
        limits = self._policy.limits
        while True:
            await self._active.wait()
            if not self._ladders:
                self._active.clear()
            await asyncio.sleep(_DISK_PERIOD_S)
            used = await _measured(opened)
            most = max(limits.workspace_max, self._tolerated[0])
            most_files = max(limits.workspace_files, self._tolerated[1])
            if used.bytes > most or used.files > most_files:
                self._tolerated = (used.bytes, used.files)
                await kernel.kill(Cause.DISK)
                return
            if used.bytes <= limits.workspace_max and used.files <= limits.workspace_files:
                self._tolerated = (0, 0)

    async def _drop_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if self._disk is not None and self._disk is not asyncio.current_task():
            self._disk.cancel()
            await asyncio.gather(self._disk, return_exceptions=True)
        self._disk = None
        if kernel is not None:
            await kernel.kill()

    # -- checks ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._closed:
            raise _closed("the sandbox is closed")

    def _demand(self, capability: str) -> None:
        if capability not in self._policy.capabilities:
            raise errors.Denied(
                f"the policy {self._policy.name} does not offer {capability}",
                code="capability_not_supported",
                details={"capability": capability, "available": list(self._policy.capabilities)},
            )

    def _timeout(self, asked: float | None) -> float:
        most = self._policy.limits.wall_time
        if asked is None:
            return most
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
            raise errors.BadRequest(
                f"a time-out is a number of seconds above 0, not {asked!r}",
                code="invalid_timeout",
                hint=f"leave it out for the policy's wall_time of {most:g} s",
            )
        if asked > most:
            raise errors.BadRequest(
                f"a time-out of {asked:g} s is longer than the policy's wall_time of {most:g} s",
                code="limit_widened",
                hint="ask for less, or use a policy with a longer wall_time",
                details={"field": "timeout", "limit": most},
            )
        return float(asked)


def _closed(message: str) -> errors.Closed:
    return errors.Closed(message, hint="make a new one: its files and state are gone")


async def _measured(opened: OpenFiles) -> Usage:
    """What the files take. Where they cannot be looked at, they take nothing: the next look may."""
    tree = opened.measured
    assert tree is not None
    try:
        return await opened.call(
            lambda: tree.measure(max_entries=_DISK_ENTRIES, deadline_s=_DISK_SCAN_S)
        )
    except (OSError, errors.SbxError) as error:
        _log.warning("a workspace could not be measured: %s", error)
        return Usage(0, 0, complete=False)


async def _answer(kernel: Kernel, on_input: OnInput, prompt: str, ladder: Ladder) -> None:
    """Ask the caller for a line. A caller that fails to answer ends the wait of the code."""
    try:
        if inspect.iscoroutinefunction(on_input):
            line = await on_input(prompt)
        else:
            line = await _in_daemon_thread(on_input, prompt)
            if inspect.isawaitable(line):
                line = await line
        await kernel.answer_input(str(line))
    except KernelDied:
        return
    except Exception:  # noqa: BLE001  # the border to the caller's own function
        _log.exception("on_input raised; the run is interrupted")
        await ladder.stop(Why.CALLER)


async def _in_daemon_thread(
    ask: Callable[[str], str | Awaitable[str]], prompt: str
) -> str | Awaitable[str]:
    """A person may never answer: such a thread must not keep the program from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | Awaitable[str]] = loop.create_future()

    def settle(line: str | Awaitable[str], error: Exception | None) -> None:
        if answer.done():
            return
        answer.set_result(line) if error is None else answer.set_exception(error)

    def wait() -> None:
        line: str | Awaitable[str] = ""
        failed = None
        try:
            line = ask(prompt)
        except Exception as error:  # noqa: BLE001  # carried to the task that waits
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, line, failed)

    threading.Thread(target=wait, name="sbx-on-input", daemon=True).start()
    return await answer


def _outcome(reply: frames.ExecuteReply, why: Why | None) -> tuple[Status, Cause | None]:
    if why is not None and not (why is Why.CALLER and reply.status == "ok"):
        return why.outcome()
    return (Status.OK if reply.status == "ok" else Status.ERROR), None


def _check_text(text: str, what: str, size_max: int) -> None:
    try:
        size = len(text.encode())
    except (UnicodeEncodeError, AttributeError):
        raise errors.BadRequest(
            f"the {what} is not text that UTF-8 can carry",
            code="invalid_code",
            hint="decode bytes with the right encoding, and replace what it cannot",
        ) from None
    if size > size_max:
        raise errors.TooLarge(
            f"the {what} of {size} bytes is longer than the limit of {size_max} bytes",
            code="code_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": size_max},
        )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """What execve(2) and JSON can carry. Not checked further: only the command has it."""
    for name, value in env.items():
        try:
            carried = "\0" not in (name + value) and "=" not in name and name != ""
            (name + value).encode()
        except (TypeError, UnicodeEncodeError):
            carried = False
        if not carried:
            raise errors.BadRequest(
                f"no environment can carry the variable {name!r}",
                code="invalid_env",
                hint="names without '=', names and values of text without NUL",
            )
    return dict(env)


def _inside(cwd: str | None) -> str:
    """A command's directory: relative to the workspace, or absolute as the code sees it.

    Not checked further: it is resolved inside, where there is nothing to find beyond the walls.
    """
    path = cwd or "/workspace"
    if "\0" in path:
        raise errors.InvalidPath("a directory's name has no NUL", details={"reason": "null_byte"})
    _check_text(path, "cwd", _PATH_MAX)
    return path if path.startswith("/") else f"/workspace/{path}"
