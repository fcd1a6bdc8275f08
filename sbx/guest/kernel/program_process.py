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
from sbx.guest.kernel.program import Outcome, PythonProgram, Surroundings
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
        self._outcome = Outcome()

    async def ended(self) -> Outcome:
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


def become(
    order: PythonProgram,
    relay: socket.socket,
    shell: SandboxShell,
    surroundings: Surroundings,
    handlers: int,
    *,
    asks: bool,
) -> NoReturn:
    """Be the process of a program, in a fork of the kernel that has left its loop.

    `handlers`: the number of functions of atexit before any user code. `asks`: questions are passed
    on.
    """
    kernel = os.getppid()
    os.setsid()
    children.end_with(kernel)
    with contextlib.suppress(OSError, ValueError):
        oom = children.OomScore()
        oom.set(children.OOM_COMMAND - children.OOM_KERNEL)
        oom.close()
    ending.forget_handlers(handlers)
    _forget_modules_of(surroundings.cwd)
    ending.keep_modules()
    gc.freeze()  # the variables of the kernel: their end is not that of the program
    randomness.renew()
    link = ProgramFrames(relay)
    shell.publish_by(link.publish)
    program.take_output()
    raise ending.Leave(lambda: _run(order, link, shell, surroundings, asks=asks))


def _run(
    order: PythonProgram,
    link: ProgramFrames,
    shell: SandboxShell,
    surroundings: Surroundings,
    *,
    asks: bool,
) -> int:
    outcome = run_in(order, shell, surroundings, link.ask if asks else None, link.ask_secret)
    if outcome.error and os.getpid() == link._pid:
        with contextlib.suppress(FrameError, OSError):
            link._call("outcome", {"error": outcome.error})
    return outcome.code


def run_in(
    order: PythonProgram,
    shell: SandboxShell,
    surroundings: Surroundings,
    ask: Callable[..., str] | None,
    ask_secret: Callable[..., str],
    stop_output: Callable[[], None] | None = None,
) -> Outcome:
    """Run a program in this process, which has left its loop."""
    program.reset_interpreter(ask, ask_secret)
    program.take_input(order.stdin)
    ending.user_code_begins(stop_output)
    try:
        surroundings.restore(order)
    except OSError as error:
        outcome = Outcome()
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
