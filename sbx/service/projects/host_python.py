"""Python on the host with no walls around it: an ordinary Jupyter kernel, which keeps variables.

It is ipykernel, spoken to by jupyter_client over Unix sockets in a directory of its own. What it
says is typed and bounded by the same frames as what comes from inside walls.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.kernels import frames
from sbx.policy.model import LimitsPolicy
from sbx.protocol.runs import Run
from sbx.runtime.run import termination
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.termination import GracefulTermination, StopReason
from sbx.service.projects.host_process import HostProcess

if TYPE_CHECKING:
    from jupyter_client.asynchronous.client import AsyncKernelClient  # it costs 0.2 s

_START_S = 60.0
_IDLE_S = 1.0  # after a reply, until the last output is here
_PATH = "import sys; sys.path.insert(0, '')"
_SOCKET_PATH_MAX = 90  # of 107, with what ZMQ puts behind it
_SHOWN = {
    "stream": frames.Stream,
    "display_data": frames.DisplayData,
    "update_display_data": frames.UpdateDisplayData,
    "execute_result": frames.ExecuteResult,
    "error": frames.ErrorFrame,
    "clear_output": frames.ClearOutput,
}

Going = Callable[[ActiveRun, GracefulTermination, Callable[[], None]], AbstractContextManager[None]]


class _Died:
    """The kernel ended."""


_Told = frames.Frame | frames.ExecuteReply | _Died | None  # None: it is idle again


class HostPython:
    """One kernel at most, started by the first cell; cells run one after the other."""

    def __init__(self, directory: Path, grace_s: float, *, lost: bool = False) -> None:
        """`lost`: an earlier one had variables, which the first cell is told."""
        self._directory = directory
        self._grace_s = grace_s
        self._turn = asyncio.Lock()
        self._kernel: _Kernel | None = None
        self.stateful = lost

    async def run(self, live: ActiveRun, code: str, timeout_s: float, going: Going) -> Run:
        """Run a cell to its end, by whatever limit. `going` is entered while it can be stopped.
        Raises Unavailable `kernel_not_started`."""
        async with self._turn:
            kernel, lost = await self._ready()
            live.restart_clock()
            ladder = GracefulTermination(timeout_s, self._grace_s, kernel.interrupt, kernel.kill)
            with going(live, ladder, lambda: kernel.signal(signal.SIGKILL)):
                reply = await kernel.execute(live, code, ladder)
            if reply is None:
                await self._drop()
                status, cause = termination.ending_of_jail(
                    None, ladder.why, oom_kills=0, pids_max_hits=0
                )
            else:
                live.replied(reply)
                status, cause = termination.ending_of_reply(reply, ladder.why)
            error = termination.explanation((status, cause), LimitsPolicy())
            return live.finish(status, cause=cause, error=error, state_lost=lost or reply is None)

    async def close(self) -> None:
        """End the kernel, and what it started in its process group."""
        await run_to_completion(self._drop())

    async def _ready(self) -> "tuple[_Kernel, bool]":
        if self._kernel is not None and self._kernel.alive:
            return self._kernel, False
        await self._drop()
        lost = self.stateful
        self._kernel = await _Kernel.start(self._directory, self._grace_s)
        self.stateful = True
        return self._kernel, lost

    async def _drop(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.close()


class _Kernel:
    """One that lives; `close` ends it and removes its sockets."""

    def __init__(
        self, place: Path, process: HostProcess, client: "AsyncKernelClient", grace_s: float
    ) -> None:
        self._place = place
        self._process = process
        self._client = client
        self._grace_s = grace_s
        self._told: asyncio.Queue[_Told] = asyncio.Queue()
        self._asked = ""
        self._pumps: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, directory: Path, grace_s: float) -> "_Kernel":
        """Raises Unavailable `kernel_not_started`."""
        from jupyter_client.asynchronous.client import AsyncKernelClient

        place = Path(await in_thread(tempfile.mkdtemp, "", "sbx-kernel-"))
        process: HostProcess | None = None
        client = None
        try:
            file = _connection_file(place)
            process = await _launched(file, directory)
            client = AsyncKernelClient(connection_file=str(file))
            client.load_connection_file()
            client.start_channels(hb=False)
            kernel = cls(place, process, client, grace_s)
            await kernel._answered()
            client.execute(_PATH, silent=True)
            kernel._pump()
            return kernel
        except BaseException:
            await run_to_completion(_cleared(place, process, client))
            raise

    @property
    def alive(self) -> bool:
        return self._process.alive

    def signal(self, number: int) -> None:
        self._process.signal(number)

    async def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def execute(
        self, live: ActiveRun, code: str, ladder: GracefulTermination
    ) -> frames.ExecuteReply | None:
        """Run a cell and record what it shows; its reply, or None where the kernel died."""
        while not self._told.empty():
            self._told.get_nowait()
        self._asked = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        if not self.alive:
            return None
        reply, idle = None, False
        while reply is None or not idle:
            try:
                async with asyncio.timeout(None if reply is None else _IDLE_S):
                    told = await ladder.next(self._told.get)
            except TimeoutError:
                break  # the reply is all that comes, or it outlived its kill
            if isinstance(told, frames.Frame):
                live.add(told)
                if live.over:
                    await ladder.stop(StopReason.OUTPUT)
            elif isinstance(told, frames.ExecuteReply):
                reply = told
            elif told is None:
                idle = True
            else:
                break
        return reply

    async def close(self) -> None:
        """Ask it to end, then kill it with its group."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)
        if self.alive:
            self._client.shutdown()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self._process.wait()
        await _cleared(self._place, self._process, self._client)

    async def _answered(self) -> None:
        """Wait until it answers. Raises Unavailable."""
        ready = asyncio.ensure_future(self._client.wait_for_ready(timeout=_START_S))
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RuntimeError(f"it ended with exit code {ended.result()}")
            await ready
        except (RuntimeError, TimeoutError) as error:
            raise errors.Unavailable(
                f"Python could not be started on the host: {error}",
                code="kernel_not_started",
                hint="see whether `python -m ipykernel_launcher` starts there",
            ) from error
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.wait([ready, ended])

    def _pump(self) -> None:
        self._pumps = [
            asyncio.create_task(one) for one in (self._shown(), self._replied(), self._watched())
        ]

    async def _shown(self) -> None:
        while True:
            message = await self._client.get_iopub_msg(timeout=None)
            if message["parent_header"].get("msg_id") != self._asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                self._told.put_nowait(None)
            elif kind in _SHOWN:
                with suppress(frames.MalformedFrame):  # more than anybody could look at
                    self._told.put_nowait(_frame(kind, content, _SHOWN[kind]))

    async def _replied(self) -> None:
        while True:
            message = await self._client.get_shell_msg(timeout=None)
            if message["parent_header"].get("msg_id") == self._asked:
                reply = _frame("execute_reply", message["content"], frames.ExecuteReply)
                assert isinstance(reply.content, frames.ExecuteReply)
                self._told.put_nowait(reply.content)

    async def _watched(self) -> None:
        await self._process.wait()
        self._told.put_nowait(_Died())


def _frame(kind: str, content: dict[str, Any], known: Any) -> frames.Frame:
    told = {name: content[name] for name in known.__struct_fields__ if name in content}
    return frames.KERNEL.decode(msgspec.json.encode({"type": kind, "content": told}))


def _connection_file(place: Path) -> Path:
    """Unix sockets in `place`, which is its user's alone; on loopback where its path is too long,
    with a key in every message."""
    from jupyter_client.connect import write_connection_file

    file = place / "kernel.json"
    if len(os.fsencode(place)) <= _SOCKET_PATH_MAX:
        write_connection_file(str(file), transport="ipc", ip=str(place / "s"))
    else:
        write_connection_file(str(file))
    return file


async def _launched(file: Path, directory: Path) -> HostProcess:
    argv = [
        sys.executable,
        "-P",  # no module of the directory before the kernel is up; then _PATH lets cells import
        *("-m", "ipykernel_launcher", "-f", str(file)),
        "--HistoryManager.enabled=False",
    ]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        ours = {"JPY_PARENT_PID": str(os.getpid())}  # it ends when we are gone
        return await HostProcess.start(argv, directory, output=(nowhere, nowhere), env=ours)
    finally:
        os.close(nowhere)


async def _cleared(
    place: Path, process: HostProcess | None, client: "AsyncKernelClient | None"
) -> None:
    if process is not None:
        await process.end()
    if client is not None:
        client.stop_channels()
        client.context.destroy(linger=0)
    await in_thread(shutil.rmtree, place, True)
