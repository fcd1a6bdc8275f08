"""The shell commands of a jail, which PID 1 runs next to a busy cell.

`sbx.guest.supervisor.pid1` has the orders and the answers.
"""

import base64
import codecs
import os
import selectors
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from sbx.guest import granted_packages
from sbx.guest.frames import RawFrame
from sbx.guest.start import lockdown
from sbx.guest.supervisor import children
from sbx.guest.supervisor.terminal import Pty, kill_session
from sbx.guest.tools import script_files
from sbx.linux import landlock

_CHUNK = 1 << 16
_PIPE_READS = 4
_SPAWN_FAILED = 126

Tell = Callable[[str, Mapping[str, Any], str | None], None]


class _Command:
    """A child started by `spawn`, until it has ended and its output is sent."""

    def __init__(self, name: str, pid: int, stdin: int = -1, terminal: Pty | None = None) -> None:
        self.name = name
        self.pid = pid
        self.stdin = stdin
        self.terminal = terminal
        self.unsent = bytearray()
        self.close_stdin = False
        self.streams: dict[int, str] = {}
        self.decoders: dict[int, codecs.IncrementalDecoder] = {}
        self.window: int | None = None  # bytes that it may still write; None: no limit
        self.waiting: list[int] = []  # its streams that are not read until `took` comes
        self.tells_fed = False
        self.files: list[tuple[str, str]] = []
        self.ended = False


class JailCommands:
    """The commands of one jail. They use the loop of PID 1, and send frames by `tell`.

    `is_held_back`: whether the runtime has left so many frames unread that the commands must wait;
    PID 1 then calls `read_again`. `ends_groups`: each command ends with PID 1, as no PID namespace
    ends it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        tell: Tell,
        is_held_back: Callable[[], bool],
        walls: Mapping[str, Any],
        oom: children.OomScore,
        *,
        ends_groups: bool,
    ) -> None:
        self._selector = selector
        self._tell = tell
        self._is_held_back = is_held_back
        self._walls = walls
        self._oom = oom
        self._ends_groups = ends_groups
        self._domain: landlock.Ruleset | None = None
        self._commands: dict[str, _Command] = {}
        self._by_pid: dict[int, _Command] = {}
        self._paused: list[tuple[_Command, int]] = []

    @property
    def pids(self) -> list[int]:
        """Return the pids of the commands that are not reaped."""
        return list(self._by_pid)

    def obey(self, order: RawFrame) -> None:
        content = order.content
        match order.type:
            case "spawn":
                self._spawn(order.id or "", content)
            case "stdin":
                self._feed(order.id or "", _input(content))
            case "took":
                self._widen(order.id or "", content["bytes"])
            case "signal":
                if command := self._commands.get(order.id or ""):
                    self._signal(command, content["signal"])
            case _:
                if (command := self._commands.get(order.id or "")) and command.terminal:
                    _obey_at(command.terminal, order)

    def read_again(self) -> None:
        """Read the output of the commands that waited for the runtime."""
        for command, fd in self._paused:
            if fd in command.streams:
                self._selector.register(fd, selectors.EVENT_READ, self._reader(command, fd))
        self._paused.clear()

    def _spawn(self, name: str, content: Mapping[str, Any]) -> None:
        pipes: list[tuple[int, int]] = []
        if "tty" in content:
            self._spawn_at_terminal(name, content)
            return
        try:
            # Commands that leave processes in the background use up PID 1's descriptors, too.
            pipes += (os.pipe2(os.O_CLOEXEC) for _ in range(3))
            (stdin, _), (_, stdout), (_, stderr) = pipes
            pid = self._fork(content, (stdin, stdout, stderr))
        except OSError as error:
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            self._not_started(name, error)
            return
        (stdin, stdin_ours), (stdout_ours, stdout), (stderr_ours, stderr) = pipes
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        command = _Command(name, pid, stdin_ours)
        command.window = content.get("window")
        command.tells_fed = content.get("stdin") is None
        command.files = [(path, "") for path, _ in content.get("files", ())]
        self._commands[name] = self._by_pid[pid] = command
        self._tell_pid(content, pid, name)
        os.set_blocking(stdin_ours, False)
        for fd, stream in ((stdout_ours, "stdout"), (stderr_ours, "stderr")):
            os.set_blocking(fd, False)
            command.streams[fd] = stream
            command.decoders[fd] = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(fd, selectors.EVENT_READ, self._reader(command, fd))
        if (stdin_text := content.get("stdin")) is not None:
            command.close_stdin = True
            command.unsent += stdin_text.encode()
            self._write(command)

    def _spawn_at_terminal(self, name: str, content: Mapping[str, Any]) -> None:
        terminal = None
        try:
            terminal = Pty(**content["tty"])
            pid = self._fork(content, (terminal.slave,) * 3)
        except OSError as error:
            if terminal is not None:
                terminal.discard()
            self._not_started(name, error)
            return
        self._commands[name] = self._by_pid[pid] = _Command(name, pid, terminal=terminal)
        self._tell_pid(content, pid, name)
        terminal.serve(self._selector, lambda kind, sent: self._tell(kind, sent, name))

    def _fork(self, content: Mapping[str, Any], fds: tuple[int, int, int]) -> int:
        try:
            if self._domain is None and self._walls["landlock"]:
                # every command enters a domain from this ruleset
                self._domain = lockdown.ruleset(self._walls, nested=True)
            self._oom.set(children.OOM_COMMAND)
            supervisor = os.getpid()
            pid = os.fork()
            if pid == 0:
                if self._ends_groups:
                    children.end_with(supervisor)
                _become_command(content, fds, self._domain, self._walls["last_filter"])
            return pid
        finally:
            self._oom.set(children.OOM_SUPERVISOR)

    def _tell_pid(self, content: Mapping[str, Any], pid: int, name: str) -> None:
        if content.get("tells_pid"):
            self._tell("spawned", {"pid": pid}, name)

    def _not_started(self, name: str, error: OSError) -> None:
        self._tell("exited", {"error": f"no process could be started: {error.strerror}"}, name)

    def _signal(self, command: _Command, number: int) -> None:
        if not command.ended:
            children.signal_group(command.pid, number)
        if command.terminal is not None and number == signal.SIGKILL:
            kill_session(command.pid)
            command.terminal.hung_up = False
            self._forget_if_done(command)

    def _reader(self, command: _Command, fd: int) -> Callable[[], None]:
        return lambda: self._readable(command, fd)

    def _readable(self, command: _Command, fd: int) -> None:
        if command.window is not None and command.window <= 0 and not command.ended:
            self._selector.unregister(fd)
            command.waiting.append(fd)
        elif self._is_held_back() and not command.ended:
            self._selector.unregister(fd)
            self._paused.append((command, fd))
        else:
            self._read(command, fd)

    def _read(self, command: _Command, fd: int) -> bool:
        """Send the command's output. Return False if no more is available now.

        Read and drop output of background processes after the command itself has ended: they must
        neither block nor die of SIGPIPE.
        """
        try:
            received = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        text = command.decoders[fd].decode(received, final=not received)
        if text and not command.ended:
            if command.window is not None:
                command.window -= len(text.encode())
            self._tell("output", {"name": command.streams[fd], "text": text}, command.name)
        if not received:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
            del command.streams[fd]
            self._forget_if_done(command)
        return bool(received)

    def _widen(self, name: str, size: int) -> None:
        command = self._commands.get(name)
        if command is not None and command.terminal is not None:
            command.terminal.took(size)
        elif command is not None and command.window is not None:
            command.window += size
            if command.window > 0:
                self._read_on(command)

    def _read_on(self, command: _Command) -> None:
        for fd in command.waiting:
            if fd in command.streams:
                self._selector.register(fd, selectors.EVENT_READ, self._reader(command, fd))
        command.waiting.clear()

    def _feed(self, name: str, data: bytes | None) -> None:
        command = self._commands.get(name)
        if command is None or command.stdin < 0:
            return
        if data is None:
            command.close_stdin = True
        else:
            command.unsent += data
        self._write(command)

    def _write(self, command: _Command) -> None:
        before = len(command.unsent)
        self._write_to_stdin(command)
        if command.tells_fed and not command.ended:
            read = before - len(command.unsent)
            self._tell("fed", {"bytes": read, "open": command.stdin >= 0}, command.name)

    def _write_to_stdin(self, command: _Command) -> None:
        watched = command.stdin in self._selector.get_map()
        try:
            while command.unsent:
                del command.unsent[: os.write(command.stdin, memoryview(command.unsent)[:_CHUNK])]
        except BlockingIOError:
            if not watched:
                self._selector.register(
                    command.stdin, selectors.EVENT_WRITE, lambda: self._write(command)
                )
            return
        except OSError:
            command.close_stdin = True
            command.unsent.clear()
        if watched:
            self._selector.unregister(command.stdin)
        if command.close_stdin:
            os.close(command.stdin)
            command.stdin = -1

    def end(self, pid: int, status: int) -> None:
        """Send all output that the command wrote before its end, and then its exit status.

        Read at most the capacity of a pipe (pipe(7): 64 KiB), independent of the later output of
        background processes.
        """
        command = self._by_pid.pop(pid, None)
        if command is None:
            return
        for fd in list(command.streams):
            for _ in range(_PIPE_READS):
                if fd not in command.streams or not self._read(command, fd):
                    break
        if command.terminal is not None:
            command.terminal.last_words()
            command.terminal.close()
        command.ended = True
        self._read_on(command)  # output of background processes is read and dropped
        if command.stdin >= 0:
            command.close_stdin = True
            command.unsent.clear()
            self._write(command)
        script_files.remove(command.files)
        self._tell("exited", children.outcome(status), command.name)
        self._forget_if_done(command)

    def _forget_if_done(self, command: _Command) -> None:
        # After a hang-up the runtime sends SIGKILL for the rest of the session.
        hung_up = command.terminal is not None and command.terminal.hung_up
        if command.ended and not command.streams and not hung_up:
            self._commands.pop(command.name, None)


def _become_command(
    content: Mapping[str, Any],
    fds: tuple[int, int, int],
    domain: landlock.Ruleset | None,
    last_filter: str | None,
) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if "tty" in content:
            os.login_tty(fds[0])
        else:
            for slot, fd in enumerate(fds):
                os.dup2(fd, slot)
        if domain is not None:
            domain.enter()
        lockdown.add_filter(last_filter)
        lockdown.close_all_but(())
        script_files.write(content.get("files", ()))
        if "generated" in content:
            with suppress(OSError):
                os.mkdir(content["generated"])
        os.chdir(content["cwd"])
        variables = {**granted_packages.variables(), **os.environ, **content["env"]}
        os.execvpe(content["argv"][0], content["argv"], variables)  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"{content['argv'][0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(_SPAWN_FAILED)


def _input(content: Mapping[str, Any]) -> bytes | None:
    """Return the input of an order, which is bytes or text; None closes the standard input."""
    if "data" in content:
        return base64.b64decode(content["data"])
    text: str | None = content["text"]
    return None if text is None else text.encode()


def _obey_at(terminal: Pty, order: RawFrame) -> None:
    match order.type:
        case "type":
            terminal.type(base64.b64decode(order.content["data"]))
        case "resize":
            terminal.resize(order.content["rows"], order.content["columns"])
        case "hang_up":
            terminal.hung_up = True
            terminal.close()
