"""A program in a process of its own: a fork of the kernel, which follows it.

    kernel      forks it, reads its standard output and error, which are the kernel's descriptors 1
                and 2, publishes its frames, and has its exit status: nothing is lost in a crash
    program     sends its displays and questions on a socket, one at a time, and waits for the
                answer, so that a display is in order with the text before and after it

The variables of the kernel do not change. The frames on the socket are those of `sbx.guest.frames`:

    program → any frame that a kernel may publish, input_request, or `outcome` {error}
    kernel  → done {}, refused {message}, or input_reply {value}, with the id of the frame
"""

import asyncio
import atexit
import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sbx.guest import frames
from sbx.guest.frames import FrameError, FrameReader, FrameWriter, RawFrame
from sbx.guest.kernel import ending, program, randomness
from sbx.guest.kernel.output import OutputWriter
from sbx.guest.kernel.program import InitialState, ProgramOutcome, PythonProgram
from sbx.guest.kernel.request_queue import RequestQueue
from sbx.guest.kernel.shell import SandboxShell
from sbx.guest.supervisor import children

_CHUNK = 65536
_PUBLISHED = frozenset(
    (
        *("display_data", "update_display_data", "execute_result", "clear_output", "error"),
        *("comm_open", "comm_msg", "comm_close", "input_request"),
    )
)


class ProgramProcess:
    """The kernel's side."""

    def __init__(
        self, pid: int, relay: socket.socket, publish: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._pid = pid
        self._relay = relay
        self._reader = FrameReader()
        self._publish = publish
        self._question: str | None = None
        self._outcome = ProgramOutcome()

    async def ended(self) -> ProgramOutcome:
        """Publish its frames until it has ended. If the call is cancelled, kill the program."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        ended_fd = os.pidfd_open(self._pid)
        loop.add_reader(ended_fd, _set, over)
        loop.add_reader(self._relay.fileno(), self._take_frames)
        try:
            await over
        except asyncio.CancelledError:
            self.signal(signal.SIGKILL)
            raise
        finally:
            loop.remove_reader(ended_fd)
            os.close(ended_fd)
            self._outcome.code = self._exit_code()
            self._take_frames()
            loop.remove_reader(self._relay.fileno())
            self._relay.close()
        return self._outcome

    def signal(self, number: int) -> None:
        """Signal the process group of the program."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            children.signal_group(self._pid, number)

    def answer(self, value: str) -> None:
        """Pass on the answer to its question."""
        name, self._question = self._question, None
        if name is not None:
            self._reply("input_reply", {"value": value}, name)

    def _exit_code(self) -> int:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:  # code in the kernel has waited for it
            return 1
        return code if code >= 0 else 128 - code

    def _take_frames(self) -> None:
        """Publish the frames that have arrived."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError, FrameError):
            while data := self._relay.recv(_CHUNK, socket.MSG_DONTWAIT):
                for frame in self._reader.feed(data):
                    self._take(frame)
            asyncio.get_running_loop().remove_reader(self._relay.fileno())

    def _take(self, frame: RawFrame) -> None:
        if frame.type == "outcome":
            self._outcome.error = frame.content["error"]
        elif frame.type in _PUBLISHED:
            try:
                self._publish(frame.type, frame.content)
            except FrameError as error:
                self._reply("refused", {"message": str(error)}, frame.id)
                return
            if frame.type == "input_request":
                self._question = frame.id
                return
        self._reply("done", {}, frame.id)

    def _reply(self, kind: str, content: Mapping[str, Any], name: str | None) -> None:
        with contextlib.suppress(OSError):  # it has ended, or sends without reading
            self._relay.send(frames.encode(kind, content, name), socket.MSG_DONTWAIT)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Programs:
    """The programs of a kernel, one at a time. Each starts when the loop has stopped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: RequestQueue,
        shell: SandboxShell,
        output: OutputWriter,
        writer: FrameWriter,
        ask: tuple[Callable[..., str], Callable[..., str]],
        *,
        processes: bool,
    ) -> None:
        """`ask`: the functions that ask the host, `input` and `getpass`. Call this before any user
        code runs: programs find the present surroundings again."""
        self._loop = loop
        self._inbox = inbox
        self._shell = shell
        self._output = output
        self._writer = writer
        self._ask = ask
        self._processes = processes
        self._surroundings = InitialState.now()
        self._handlers = atexit._ncallbacks()
        self._waiting: asyncio.Future[ProgramProcess] | None = None
        self._running: ProgramProcess | None = None
        self._order: PythonProgram
        self._asks = False
        self._request: str | None = None

    async def run(self, content: dict[str, Any], request: str | None) -> dict[str, Any]:
        """Run a program, and return the reply to the request of this id."""
        self._order, self._request = PythonProgram.from_json(content), request
        self._asks = bool(content.get("allow_stdin")) and self._order.stdin is None
        self._waiting = self._loop.create_future()
        try:
            self._loop.stop()
            self._running = running = await self._waiting
            self._inbox.on_answer = running.answer
            self._inbox.on_kill = lambda: running.signal(signal.SIGKILL)
            return (await running.ended()).reply
        finally:
            self._waiting = self._running = None
            self._inbox.on_answer = self._inbox.on_kill = None

    def interrupt(self) -> bool:
        """Interrupt the program. Return False without one."""
        if self._running is None:
            return False
        self._running.signal(signal.SIGINT)
        return True

    def start_next(self) -> None:
        """Start the program that waits, if there is one, outside of the loop. Raise Leave in its
        process."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if not self._processes:
            raise ending.Leave(self._run_in_place)
        relay, its_relay = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            relay.close()
            waiting.set_exception(error)
        else:
            if pid == 0:
                relay.close()
                self._output.close_readers()
                self._become(its_relay)
            waiting.set_result(ProgramProcess(pid, relay, self._output.publish))
        its_relay.close()

    def _run_in_place(self) -> int:
        """Run a program in this process, which ends with it, and send the reply. Output of its
        finalisers follows the reply."""
        for name in ("stdout", "stderr"):  # finalisation brings these back
            setattr(sys, f"__{name}__", getattr(sys, name))
        self._output.in_lines = True
        ask, ask_secret = self._ask
        outcome = run_in(
            self._order,
            self._shell,
            self._surroundings,
            ask if self._asks else None,
            ask_secret,
            self._output.stop,
        )
        self._output.flush()
        self._writer.send("program_reply", outcome.reply, self._request)
        return outcome.code

    def _become(self, relay: socket.socket) -> NoReturn:
        """Be the process of a program, in a fork of the kernel that has left its loop."""
        kernel = os.getppid()
        os.setsid()
        children.end_with(kernel)
        with contextlib.suppress(OSError, ValueError):
            oom = children.OomScore()
            oom.set(children.OOM_COMMAND - children.OOM_KERNEL)
            oom.close()
        ending.forget_handlers(self._handlers)
        _forget_modules_of(self._surroundings.cwd)
        ending.keep_modules()
        gc.freeze()  # the variables of the kernel: their end is not that of the program
        randomness.renew()
        link = ProgramFrames(relay)
        self._shell.publish_by(link.publish)
        program.take_output()
        raise ending.Leave(lambda: self._run(link))

    def _run(self, link: "ProgramFrames") -> int:
        ask = link.ask if self._asks else None
        outcome = run_in(self._order, self._shell, self._surroundings, ask, link.ask_secret)
        link.report(outcome)
        return outcome.code


class ProgramFrames:
    """The program's side of the socket."""

    def __init__(self, relay: socket.socket) -> None:
        self._pid = os.getpid()
        self._relay = relay
        self._writer = FrameWriter(relay)
        self._writer.mute_forks()
        self._reader = FrameReader()
        self._names = itertools.count()
        self._turn = threading.RLock()

    def publish(self, kind: str, content: Mapping[str, Any], _hold: bool = False) -> None:
        """Publish a frame after all text written before it. Raise FrameError."""
        if os.getpid() != self._pid:  # a fork of the program
            if (text := content.get("data", {}).get("text/plain")) is not None:
                print(text)
            return
        self._call(kind, content)

    def ask(self, prompt: object = "", /) -> str:
        return self._question(str(prompt), password=False)

    def ask_secret(self, prompt: str = "Password: ", stream: Any = None, **_more: Any) -> str:
        return self._question(str(prompt), password=True)

    def report(self, outcome: ProgramOutcome) -> None:
        """Send the error that the program did not catch."""
        if outcome.error and os.getpid() == self._pid:
            with contextlib.suppress(FrameError, OSError):
                self._call("outcome", {"error": outcome.error})

    def _question(self, prompt: str, *, password: bool) -> str:
        answer = self._call("input_request", {"prompt": prompt, "password": password})
        if answer.get("value") == "\x04":  # Ctrl-D, as Jupyter's frontends send it
            raise EOFError("EOF when reading a line")
        return str(answer.get("value", ""))

    def _call(self, kind: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have closed or replaced it
                stream.flush()
        with self._turn:
            name = str(next(self._names))
            self._writer.send(kind, content, name)
            while True:
                data = self._relay.recv(_CHUNK)
                if not data:
                    raise OSError("the kernel has ended")
                for frame in self._reader.feed(data):
                    if frame.id == name and frame.type == "refused":
                        raise FrameError(frame.content["message"])
                    if frame.id == name:
                        return frame.content


def run_in(
    order: PythonProgram,
    shell: SandboxShell,
    surroundings: InitialState,
    ask: Callable[..., str] | None,
    ask_secret: Callable[..., str],
    stop_output: Callable[[], None] | None = None,
) -> ProgramOutcome:
    """Run a program in this process, which has left its loop."""
    program.reset_interpreter(ask, ask_secret)
    program.take_input(order.stdin)
    ending.user_code_begins(stop_output)
    try:
        surroundings.restore(order)
    except OSError as error:
        outcome = ProgramOutcome()
        outcome.code = 1
        sys.stderr.write(f"{error}\n")
        return outcome
    return program.run(
        order, shell.check_imports, shell.show, shell.run_file, shell.explain, shell.draw
    )


def _forget_modules_of(directory: str) -> None:
    """Forget the modules that cells have imported from the workspace: their files may have
    changed."""
    for name in ending.modules_of_user_code():
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and file.startswith(f"{directory}/"):
            del sys.modules[name]
