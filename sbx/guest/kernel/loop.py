"""The kernel's loop: frames in, cells run, replies out.

One asyncio loop runs while the kernel is idle and while a cell runs, so background tasks continue.
One task answers requests in order and awaits the cell itself. Code that never suspends runs without
a break, and code that awaits leaves the loop to other tasks. (ipykernel compiles every cell once
more only to distinguish the two.) All cells run in the same context, so context variables persist.

An interrupt (SIGINT) reaches only user code: the cell, a comm's handler, a `__repr__` that a
completion calls. It is raised as KeyboardInterrupt in running user code. If the cell awaits, its
task is cancelled, and the error is reported as KeyboardInterrupt as well. An idle kernel ignores
it. A frame `interrupt` comes before the signal, with the id of the request: on a busy host the
signal may come before this process has read the request. User code cannot end this loop, and each
request gets its reply.

A program runs outside of the loop, which stops for it: in a fork of this process, or in this
process if the policy allows no other, which then ends with the program. The order `finish` ends the
loop, too; see `ending`.
"""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="misc,no-untyped-call,union-attr,no-any-return,arg-type,var-annotated"

import asyncio
import builtins
import contextlib
import getpass
import os
import platform
import select
import selectors
import signal
import socket
import sys
import types
from _signal import signal as set_handler  # type: ignore[import-not-found]  # no enum: 1 µs, not 9
from collections.abc import Awaitable, Callable
from functools import partial
from os import mkdir as make_directory  # the user's code may replace os.mkdir
from typing import Any, NoReturn

import IPython
from IPython.core.error import StdinNotImplementedError

from sbx.guest.frames import FrameError, FrameWriter, RawFrame
from sbx.guest.import_rules import ImportRules
from sbx.guest.kernel import comms, completions, ending, streams
from sbx.guest.kernel.config import KernelConfig
from sbx.guest.kernel.errors import describe
from sbx.guest.kernel.output import OutputWriter
from sbx.guest.kernel.program_process import Programs
from sbx.guest.kernel.request_queue import BROKEN, RequestQueue
from sbx.guest.kernel.shell import SandboxShell, evaluated


class KernelLoop:
    """One shell on one socket. `comm_manager` and `shell` have the same names as in ipykernel.

    Made before the process is sealed, perhaps long before: that needs no thread, no privilege and
    no information about its future owner. `run` does the rest.
    """

    def __init__(self, sock: socket.socket, shell: SandboxShell) -> None:
        self.shell = shell
        self.comm_manager = comms.install(self._publish_comm)
        self._sock = sock
        self._writer = FrameWriter(sock)
        self._writer.mute_forks()
        self._output = OutputWriter(self._writer, sock)
        self._selector = selectors.EpollSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._inbox = RequestQueue(sock, self._loop)
        self._pid = os.getpid()
        self._interruptible = False
        self._missed_interrupt = False
        self._stdin_allowed = False
        self._output_max: int | None = None
        self._generated: str | None = None
        self._parent: dict[str, Any] = {}
        self._programs: Programs
        self._finishing = False
        self._request: str | None = None  # its id
        self._exit_code = 0  # of a fork
        self._ready = {"python": platform.python_version(), "ipython": IPython.__version__}
        self._handlers: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "execute_request": self._execute,
            "program_request": self._run_program,
            "finish": self._finish,
            "complete_request": partial(completions.complete, shell),
            "inspect_request": partial(completions.inspect, shell),
            "is_complete_request": partial(completions.is_complete, shell),
        }
        shell.kernel = self
        self._output.take_over()
        streams.replace(self._output)
        builtins.input = self._input
        getpass.getpass = self._getpass
        asyncio.set_event_loop(self._loop)
        # By its number: for a socket object, asyncio first tries a look-up, which fails slowly.
        self._loop.add_reader(self._sock.fileno(), self._inbox.read)
        self._task = self._loop.create_task(self._serve(), name="sbx-kernel")
        self._task.add_done_callback(self._served)
        os.register_at_fork(after_in_child=self._leave_selector)
        set_handler(signal.SIGINT, self._on_interrupt)

    def run(self, config: KernelConfig, missing: dict[str, str]) -> NoReturn:
        """Send `ready`, with the missing modules of the preload list, and serve. Raise Leave.

        This starts a second thread, so the process must be sealed.
        """
        self._output_max = config.output_max
        self._generated = config.generated
        self._programs = Programs(
            self._loop,
            self._inbox,
            self.shell,
            self._output,
            self._writer,
            (self._input, self._getpass),
            processes=config.processes,
        )
        ending.user_code_begins(self._output.stop)
        rules = config.import_rules
        self.shell.attach(
            self._output.publish,
            processes=config.processes,
            walls=config.walls,
            mime_max=config.mime_max,
            rules=None if rules is None else ImportRules.from_json(rules),
        )
        extra = {"preload_failed": missing} if missing else {}
        self._writer.send("ready", {**self._ready, **extra})
        self._output.start()
        while True:
            # A background task that exits or is interrupted ends the loop's run; others continue.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()
            if os.getpid() != self._pid:
                raise ending.Leave(lambda: self._exit_code)
            if self._finishing:
                raise ending.Leave(int)
            self._programs.start_next()

    async def _serve(self) -> None:
        while not self._finishing:
            try:
                await self._answer(await self._inbox.get())
            except asyncio.CancelledError:  # user code cancelled all tasks, this one included
                self._forget_cancellation()
            except (BrokenPipeError, ConnectionResetError):  # the host hung up before the reply
                os._exit(0)

    def _served(self, _task: object) -> None:
        if not self._finishing and os.getpid() == self._pid:
            os._exit(BROKEN)  # only a bug in sbx ends this task
        self._loop.stop()

    def _leave_selector(self) -> None:
        """Give a fork another selector. From the inherited one its finalisation would remove the
        descriptors of this process."""
        with select.epoll() as own:
            os.dup2(own.fileno(), self._selector.fileno(), inheritable=False)

    async def _answer(self, frame: RawFrame) -> None:
        handler = self._handlers.get(frame.type)
        self._request = frame.id
        try:
            serve_request = handler or self._comm_handler(frame)
            reply = await self._in_reach_of_interrupts(serve_request, frame)
        except BaseException as error:  # noqa: BLE001 - the boundary: the host always gets a reply
            self._interruptible = False
            reply = failure(frame.type, error, self.shell.execution_count - 1)
            if os.getpid() != self._pid:
                self._end_fork(error)
            if handler == self._execute:
                self._output.publish("error", describe(error))
            elif handler is None:  # as Jupyter reports errors of a comm's handler: on stderr
                self._output.write("stderr", "\n".join([*describe(error)["traceback"], ""]))
        if os.getpid() != self._pid:
            self._end_fork()
        self._stdin_allowed = False
        self._output.end_run()
        if frame.id is not None:
            self._reply(frame, reply)

    def _end_fork(self, error: BaseException | None = None) -> NoReturn:
        """Leave the loop in a fork by user code that reached the end of the cell."""
        failed = error is not None or self.shell.last_error is not None
        self._exit_code = int(failed) if self.shell.exit_code is None else self.shell.exit_code
        raise SystemExit

    def _reply(self, frame: RawFrame, reply: dict[str, Any]) -> None:
        kind = frame.type.removesuffix("_request") + "_reply"
        try:
            self._writer.send(kind, reply, frame.id)
        except FrameError as error:
            self._writer.send(
                kind, failure(frame.type, error, self.shell.execution_count - 1), frame.id
            )

    async def _in_reach_of_interrupts(
        self,
        handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        frame: RawFrame,
    ) -> dict[str, Any]:
        set_handler(signal.SIGINT, self._on_interrupt)  # an earlier cell may have replaced it
        try:
            self._interruptible = True
            if self._missed_interrupt:
                self._missed_interrupt = False
                self._inbox.read()
                if frame.id is not None and self._inbox.interrupted == frame.id:
                    raise KeyboardInterrupt
            return await handler(frame.content)
        finally:
            self._interruptible = False
            self._forget_cancellation()

    def _forget_cancellation(self) -> None:
        while self._task.cancelling():
            self._task.uncancel()

    def _on_interrupt(self, _signal: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._pid:
            raise KeyboardInterrupt
        if not self._interruptible:
            self._missed_interrupt = True  # perhaps for a request that is not read yet
            return
        if self._programs.interrupt():
            return
        running = asyncio.current_task(self._loop)
        if running is self._task:
            raise KeyboardInterrupt
        # The cell awaits. Cancel it here, as asyncio.Runner does: the loop may first run every task
        # that is ready, and each of them may block.
        self.shell.interrupted = True
        self._task.cancel()
        self._loop.call_soon_threadsafe(lambda: None)  # epoll_wait continues after this handler
        if running is not None or _is_in_callback(frame):  # they keep the loop busy
            raise KeyboardInterrupt

    # --- Requests.

    async def _execute(self, content: dict[str, Any]) -> dict[str, Any]:
        shell = self.shell
        code = str(content.get("code", ""))
        silent = bool(content.get("silent"))
        self._stdin_allowed = bool(content.get("allow_stdin"))
        self._begin_run("execute_request", content)
        shell.begin_cell(for_front_end=bool(content.get("takes_payload")))
        failed_transform = None
        try:
            transformed = shell.transform_cell(code)
        except Exception:  # noqa: BLE001 - IPython shows it as the cell's error
            transformed, failed_transform = code, sys.exc_info()
        result = None
        try:
            result = await shell.run_cell_async(
                code,
                store_history=bool(content.get("store_history", not silent)),
                silent=silent,
                transformed_cell=transformed,
                preprocessing_exc_tuple=failed_transform,
            )
        finally:
            if shell.has_hooks:
                self._output.flush()  # the result must not wait for the hooks, which may draw
            shell.events.trigger("post_execute")
            if not silent:
                shell.events.trigger("post_run_cell", result)
        reply = {
            "status": "ok",
            "execution_count": shell.execution_count - 1,
            "payload": shell.take_payload(),
        }
        error = result.error_before_exec or result.error_in_exec
        if error is not None or shell.error_in_display:
            reply.update(shell.last_error or describe(error), status="error")
            if shell.exit_code is not None:
                reply["exit_code"] = shell.exit_code
        elif expressions := content.get("user_expressions"):
            reply["user_expressions"] = evaluated(shell, expressions)
        return reply

    async def _finish(self, content: dict[str, Any]) -> dict[str, Any]:
        """Let this process end by itself. Its output still counts against a limit."""
        self._begin_run("finish", content)
        self._finishing = True
        return {}

    async def _run_program(self, content: dict[str, Any]) -> dict[str, Any]:
        self._stdin_allowed = bool(content.get("allow_stdin"))
        self._begin_run("program_request", content)
        return await self._programs.run(content, self._request)

    def _begin_run(self, kind: str, content: dict[str, Any]) -> None:
        """Set the output limit and the parent of a request, and create the directory of results
        again. The front end's `msg_id` names the parent."""
        name = content.get("msg_id")
        self._parent = {"header": {"msg_id": name, "msg_type": kind}} if name else {}
        if self._generated is not None:
            with contextlib.suppress(OSError):
                make_directory(self._generated)
        limit = content.get("output_max")
        self._output.begin_run(self._output_max if limit is None else int(limit))

    def get_parent(self, _channel: object = None) -> dict[str, Any]:
        """Return the front end's request that runs now, or ran last.

        ipywidgets uses it: an `OutputWriter` shows the output with this id.
        """
        return self._parent

    def _comm_handler(
        self, frame: RawFrame
    ) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
        if frame.type not in {"comm_open", "comm_msg", "comm_close"}:
            raise ValueError(f"a kernel does not support {frame.type!r}")

        async def deliver(content: dict[str, Any]) -> dict[str, Any]:
            self._begin_run(frame.type, content)
            comms.deliver(self.comm_manager, frame.type, content)
            return {"status": "ok"}

        return deliver

    def _publish_comm(self, kind: str, content: Any) -> None:
        self.shell.publish(kind, content)

    # --- Questions to the user.

    def _input(self, prompt: object = "", /) -> str:
        return self._ask("input", str(prompt), password=False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None, **_more: Any) -> str:
        return self._ask("getpass", str(prompt), password=True)

    def _ask(self, function: str, prompt: str, *, password: bool) -> str:
        if not self._stdin_allowed:
            raise StdinNotImplementedError(
                f"{function}() cannot ask: the caller of this run does not answer questions."
                " Put the value into the code instead."
            )
        self._inbox.forget_answers()
        self._output.publish("input_request", {"prompt": prompt, "password": password})
        answer = self._inbox.wait_for_answer()
        if answer == "\x04":  # Ctrl-D, as Jupyter's frontends send it
            raise EOFError("EOF when reading a line")  # as Python does
        return answer


def failure(kind: str, error: BaseException, count: int) -> dict[str, Any]:
    """Return the reply for a failure outside user code, in the shape of the request's kind.
    `count` is that of the last cell."""
    match kind:
        case "complete_request":
            nowhere = {"cursor_start": 0, "cursor_end": 0}
            return {"status": "error", "matches": [], "metadata": {}, **nowhere}
        case "inspect_request":
            return {"status": "error", "found": False, "data": {}, "metadata": {}}
        case "is_complete_request":
            return {"status": "unknown", "indent": ""}
        case "comm_open" | "comm_msg" | "comm_close":
            return {"status": "error"}
        case "program_request":
            stopped = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            code = 128 + signal.SIGINT if stopped else 1
            return {"status": "error", "exit_code": code, **describe(error)}
    return {"status": "error", "execution_count": count, "payload": [], **describe(error)}


_NOT_OF_USERS = (os.path.dirname(asyncio.__file__), os.path.dirname(os.path.dirname(__file__)))


def _is_in_callback(frame: types.FrameType | None) -> bool:
    """Return whether the loop runs a callback of user code, which an exception may leave."""
    callback = None
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
        callback, frame = frame, frame.f_back
    if frame is None or callback is None:
        return False
    return not callback.f_code.co_filename.startswith(_NOT_OF_USERS)
