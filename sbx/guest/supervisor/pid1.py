"""PID 1 of a jail: starts the kernel, reaps, and runs shell commands next to a busy cell.

It obeys the runtime on the control socket (`sbx.guest.frames` has the wire format):

    → boot       {walls, kernel}            once, first
    → interrupt  {}                         SIGINT to the kernel's process group
    → spawn      id {argv, cwd, env}        a command, in its own session and Landlock domain
                    {…, stdin: text}        its whole standard input, which is then closed
                    {…, tty: {rows, columns, window}}   on its own pty, which it controls
                    {…, window: bytes}      that it may write; more output waits for `took`
                    {…, files: [[path, text], …]}   its files below /tmp, for as long as it lives
    → took       id {bytes}                 acknowledges output: so many more bytes may come
    → stdin      id {text} or {text: null}  null closes it
    → type       id {data}                  bytes typed at its pty, in base64
    → resize     id {rows, columns}         of its pty
    → hang_up    id {}                      close its pty
    → signal     id {signal}                to the command's process group; SIGKILL of a command
                                            with a pty goes to all processes of its session
    ← mounted    {}                         every mount is in place; only with `masks` in the walls
    → masked     {}                         the answer: the host's sockets and FIFOs are covered
    ← ready      {landlock}                 sealed, and the kernel is forked
    ← refused    {layer, message, errno}    a wall could not be put up; the jail ends
    ← output     id {name, text}            output of a command on stdout or stderr
    ← tty        id {data}                  output on its pty, in base64
    ← fed        id {bytes, open}           bytes read from an open stdin, or from the typed input;
                                            and whether it is still open
    ← exited     id {code} or {signal}      or {error} if it could not be started
    ← kernel_exited {code} or {signal}

It never blocks. Frames that the runtime has not read yet are kept up to a limit, beyond which the
commands wait, not PID 1. When the runtime hangs up, this process ends, and Linux then ends the
whole PID namespace.
"""

import base64
import codecs
import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sbx.guest import frames, path_guard
from sbx.guest.guarded_calls import GuardedCalls
from sbx.guest.inherited_fds import CONTROL_FD, KERNEL_FD
from sbx.guest.kernel import setup
from sbx.guest.start import lockdown
from sbx.guest.supervisor.terminal import Pty, kill_session
from sbx.guest.tools import script_files
from sbx.linux import landlock, prctl

_CHUNK = 1 << 16
_OUTBOX_MAX = 1 << 20
_PIPE_READS = 4
_SPAWN_FAILED = 126
_PROXY = ("127.0.0.1", 3128)
_BACKLOG = 128
_STARTS_WITHIN_S = 0.05
OOM_SUPERVISOR, OOM_KERNEL, _OOM_COMMAND = 0, 500, 700  # added to the score that PID 1 started with


class OomScore:
    """Decides which process dies first if memory is short: a command, then the kernel, then PID 1.

    A child inherits its parent's score at the fork. /proc/self/oom_score_adj is opened while that
    is still allowed. Without privilege, the score may not be set below the host's value (systemd's
    user sessions start at 100, some pods at 1000): proc_pid_oom_score_adj(5).
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._base_score = int(os.read(self._fd, 16))

    def set(self, above: int) -> None:
        os.pwrite(self._fd, str(min(self._base_score + above, 1000)).encode(), 0)

    def close(self) -> None:
        os.close(self._fd)


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


class Supervisor:
    """The loop of PID 1."""

    def __init__(
        self,
        control: socket.socket,
        kernel_pid: int,
        walls: Any,
        oom: OomScore,
        guard_pid: int = 0,
        *,
        ends_groups: bool = False,
    ) -> None:
        """`ends_groups`: no PID namespace ends with this process, so it ends the process groups of
        its children."""
        self._guard_pid = guard_pid
        self._ends_groups = ends_groups
        self._control = control
        self._kernel_pid = kernel_pid
        self._kernel_ended: select.poll | None = None
        self._walls = walls
        self._domain: landlock.Ruleset | None = None
        self._oom = oom
        self._selector = selectors.DefaultSelector()
        self._commands: dict[str, _Command] = {}
        self._by_pid: dict[int, _Command] = {}
        self._decoder = frames.FrameReader()
        self._outbox = bytearray()
        self._paused: list[tuple[_Command, int]] = []
        self._proxy_listener: socket.socket | None = None
        self._relay_pid = 0
        self._relay_started_at = 0.0
        self._wakeup, wakeup_writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        control.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ, self._exchange_frames)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._woken)
        signal.set_wakeup_fd(wakeup_writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> NoReturn:
        """Serve until the runtime hangs up."""
        self._reap()
        while True:
            for key, _ in self._selector.select():
                # An earlier event of this turn may have ended it, and its fd may be in use again.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def watch_kernel(self, kernel_fd: int) -> None:
        """Watch a kernel that is another process's child; that process gets its exit status."""
        self._kernel_ended = select.poll()
        self._kernel_ended.register(kernel_fd, select.POLLIN)

        def ended() -> None:
            self._selector.unregister(kernel_fd)
            self._kernel_ended = None
            os.close(kernel_fd)
            self._kernel_pid = 0
            self.tell("kernel_exited", {})

        self._selector.register(kernel_fd, selectors.EVENT_READ, ended)

    def open_way_out(self) -> None:
        """Listen at the address of the proxy, before any other process inside can.

        The first connection forks the process that copies the bytes: see
        `sbx.guest.supervisor.proxy_relay`.
        """
        self._proxy_listener = socket.create_server(_PROXY, backlog=_BACKLOG)
        self._proxy_listener.setblocking(False)
        self._selector.register(self._proxy_listener, selectors.EVENT_READ, self._start_relay)

    def tell(self, kind: str, content: Mapping[str, Any], name: str | None = None) -> None:
        """Put a frame in the outbox. It is sent as soon as the runtime reads it."""
        self._outbox += frames.encode(kind, content, name)
        self._flush()

    # -- the control socket ---------------------------------------------------------------------

    def _exchange_frames(self) -> None:
        self._flush()
        try:
            received = self._control.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._leave()
        for order in self._decoder.feed(received):
            self._obey(order)

    def _obey(self, order: frames.RawFrame) -> None:
        content = order.content
        match order.type:
            case "interrupt":
                self._interrupt()
            case "spawn":
                self._spawn(order.id or "", content)
            case "stdin":
                self._feed(order.id or "", content["text"])
            case "took":
                self._widen(order.id or "", content["bytes"])
            case "signal":
                if command := self._commands.get(order.id or ""):
                    self._signal(command, content["signal"])
            case _:
                if (command := self._commands.get(order.id or "")) and command.terminal:
                    _obey_at(command.terminal, order)

    def _interrupt(self) -> None:
        # Another process's child may have been reaped, and its pid reused, before this process
        # knows of its end: so check just before the signal. This process reaps its own children.
        if self._kernel_pid and not (self._kernel_ended and self._kernel_ended.poll(0)):
            _signal_group(self._kernel_pid, signal.SIGINT)

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._control.send(memoryview(self._outbox)[:_CHUNK])
            except BlockingIOError:
                break
            except OSError:
                self._leave()
            del self._outbox[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._control, events, self._exchange_frames)
        if len(self._outbox) < _OUTBOX_MAX:
            for command, fd in self._paused:
                if fd in command.streams:
                    reader = self._reader(command, fd)
                    self._selector.register(fd, selectors.EVENT_READ, reader)
            self._paused.clear()

    def _leave(self) -> NoReturn:
        """End this process. Linux then ends the PID namespace, if there is one."""
        children = [pid for pid in (self._kernel_pid, *self._by_pid) if pid]
        for pid in children if self._ends_groups else ():
            _kill_group(pid)
            os.waitpid(pid, 0)
        os._exit(0)

    # -- commands -------------------------------------------------------------------------------

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
        terminal.serve(self._selector, lambda kind, sent: self.tell(kind, sent, name))

    def _fork(self, content: Mapping[str, Any], fds: tuple[int, int, int]) -> int:
        try:
            if self._domain is None and self._walls["landlock"]:
                # every command enters a domain from this ruleset
                self._domain = lockdown.ruleset(self._walls, nested=True)
            self._oom.set(_OOM_COMMAND)
            supervisor = os.getpid()
            pid = os.fork()
            if pid == 0:
                if self._ends_groups:
                    end_with(supervisor)
                _become_command(content, fds, self._domain, self._walls["unix_filter"])
            return pid
        finally:
            self._oom.set(OOM_SUPERVISOR)

    def _not_started(self, name: str, error: OSError) -> None:
        self.tell("exited", {"error": f"no process could be started: {error.strerror}"}, name)

    def _signal(self, command: _Command, number: int) -> None:
        if not command.ended:
            _signal_group(command.pid, number)
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
        elif len(self._outbox) >= _OUTBOX_MAX and not command.ended:
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
            self.tell("output", {"name": command.streams[fd], "text": text}, command.name)
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

    def _feed(self, name: str, text: str | None) -> None:
        command = self._commands.get(name)
        if command is None or command.stdin < 0:
            return
        if text is None:
            command.close_stdin = True
        else:
            command.unsent += text.encode()
        self._write(command)

    def _write(self, command: _Command) -> None:
        before = len(command.unsent)
        self._write_to_stdin(command)
        if command.tells_fed and not command.ended:
            read = before - len(command.unsent)
            self.tell("fed", {"bytes": read, "open": command.stdin >= 0}, command.name)

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

    # -- the proxy connection -------------------------------------------------------------------

    def _start_relay(self) -> None:
        assert self._proxy_listener is not None
        try:
            self._oom.set(_OOM_COMMAND)
            pid = os.fork()
            if pid == 0:
                _become_relay(self._proxy_listener)
        except OSError:  # the jail has no task left
            self._hang_up_on_waiting()
            return
        finally:
            self._oom.set(OOM_SUPERVISOR)
        self._relay_pid, self._relay_started_at = pid, time.monotonic()
        self._selector.unregister(self._proxy_listener)  # the relay accepts from now on

    def _relay_ended(self, status: int) -> None:
        """Clean up after a relay that was idle or was killed. The next connection starts one."""
        assert self._proxy_listener is not None
        self._relay_pid = 0
        lived_s = time.monotonic() - self._relay_started_at
        if (os.WIFEXITED(status) and status) or lived_s < _STARTS_WITHIN_S:
            self._hang_up_on_waiting()  # else a relay that cannot start would be forked without end
        self._selector.register(self._proxy_listener, selectors.EVENT_READ, self._start_relay)

    def _hang_up_on_waiting(self) -> None:
        assert self._proxy_listener is not None
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._proxy_listener.accept()
            except OSError:
                return
            connection.close()

    # -- children -------------------------------------------------------------------------------

    def _woken(self) -> None:
        os.read(self._wakeup, _CHUNK)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._ends_groups:
                _kill_group(pid)  # the processes that it left in its group
            if pid == self._kernel_pid:
                self._kernel_pid = 0
                self.tell("kernel_exited", _outcome(status))
            elif pid == self._relay_pid:
                self._relay_ended(status)
            elif pid == self._guard_pid:
                os._exit(1)  # without the guard, no process inside can write to the workspace
            elif command := self._by_pid.pop(pid, None):
                self._end(command, status)

    def _end(self, command: _Command, status: int) -> None:
        """Send all output that the command wrote before its end, and then its exit status.

        Read at most the capacity of a pipe (pipe(7): 64 KiB), independent of the later output of
        background processes.
        """
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
        self.tell("exited", _outcome(status), command.name)
        self._forget_if_done(command)

    def _forget_if_done(self, command: _Command) -> None:
        # After a hang-up the runtime sends SIGKILL for the rest of the session.
        hung_up = command.terminal is not None and command.terminal.hung_up
        if command.ended and not command.streams and not hung_up:
            self._commands.pop(command.name, None)


def main() -> NoReturn:
    """Do the steps of `boot.py`, from step 2."""
    control = socket.socket(fileno=CONTROL_FD)
    kernel_sock = socket.socket(fileno=KERNEL_FD)
    try:
        with lockdown.forbid_imports():
            first = frames.receive(control)
            if first is None:
                os._exit(0)
            boot = first.content
            walls = boot["walls"]
            lockdown.close_all_but((CONTROL_FD, KERNEL_FD))
            wait_for_masks(control, walls)
            oom = OomScore()
            oom.set(OOM_KERNEL)
            lockdown.check_unprivileged()
            lockdown.limit(walls["rlimits"])
            joining = _fork_below_guard(control, kernel_sock, walls)
            abi = lockdown.enter_domain(walls)
            if joining is not None:
                lockdown.join_guard(joining, walls["guard"]["filter"])
            lockdown.add_filter(walls["jail_filter"])
            kernel_pid = os.fork()
            if kernel_pid == 0:
                oom.close()
                control.close()
                _seal_kernel(kernel_sock, walls)
    except lockdown.SealError as error:
        control.sendall(frames.encode("refused", lockdown.refusal(error)))
        os._exit(1)
    if kernel_pid == 0:
        become_kernel(kernel_sock, boot)
    kernel_sock.close()
    oom.set(OOM_SUPERVISOR)
    silence()
    serve(control, kernel_pid, walls, oom, abi)


def _fork_below_guard(
    control: socket.socket, kernel_sock: socket.socket, walls: Mapping[str, Any]
) -> socket.socket | None:
    """Fork the supervisor if the walls have a path guard; PID 1 then becomes the guard.

    Every process of the jail is then below the guard in the tree of processes. Yama requires this
    of a process that reads the memory of others. Return in the supervisor, with the socket by which
    a process joins.
    """
    if walls["guard"] is None:
        return None
    joining, guards_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.fork()
    if supervisor == 0:
        guards_end.close()
        return joining
    try:
        kernel_sock.close()
        joining.close()
        lockdown.add_filter(walls["jail_filter"])
        calls = GuardedCalls(walls["guard"])
        control.close()
        silence()
        path_guard.serve(guards_end, calls, supervisor)
    except BaseException as error:  # noqa: BLE001  # no user code has run
        with contextlib.suppress(OSError):
            control.sendall(frames.encode("refused", lockdown.refusal(error)))
    finally:
        os._exit(1)


def wait_for_masks(control: socket.socket, walls: Mapping[str, Any]) -> None:
    """Let the broker cover the host's sockets and FIFOs before any user code can reach them.

    Only at this point is the view of the jail complete, and still only sbx code runs in it.
    """
    if not walls["masks"]:
        return
    control.sendall(frames.encode("mounted", {}))
    answer = frames.receive(control)
    if answer is None:
        os._exit(0)
    if answer.type != "masked":
        raise lockdown.SealError("unix_sockets", OSError(71, f"received {answer.type}, not masked"))


def serve(
    control: socket.socket,
    kernel_pid: int,
    walls: Mapping[str, Any],
    oom: OomScore,
    abi: int,
    kernel_fd: int | None = None,
    guard_pid: int = 0,
) -> NoReturn:
    """Report that this process is sealed, and supervise the kernel.

    The kernel is its child, or a child of the zygote: then `kernel_fd`, a pidfd, shows its end.
    """
    supervisor = Supervisor(control, kernel_pid, walls, oom, guard_pid)
    if kernel_fd is not None:
        supervisor.watch_kernel(kernel_fd)
    if walls["way_out"]:
        supervisor.open_way_out()
    supervisor.tell("ready", {"landlock": abi})
    supervisor.run()


def _seal_kernel(sock: socket.socket, walls: Any) -> None:
    try:
        os.setsid()
        lockdown.enter_domain(walls, nested=True)
        lockdown.enter_files_only_domain(walls)
        lockdown.add_filter(walls["kernel_filter"])
        lockdown.add_filter(walls["unix_filter"])
    except BaseException as error:  # noqa: BLE001  # for any error: no user code may run here
        sock.sendall(frames.encode("refused", lockdown.refusal(error)))
        os._exit(1)


def end_with(supervisor: int) -> None:
    """Let Linux kill this child of the supervisor if the supervisor is killed."""
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def become_kernel(sock: socket.socket, boot: Mapping[str, Any]) -> NoReturn:
    try:
        setup.serve(sock, setup.KernelConfig(**boot["kernel"]))
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"the kernel could not start: {error!r}\n".encode())
    finally:
        os._exit(1)


def _become_command(
    content: Mapping[str, Any],
    fds: tuple[int, int, int],
    domain: landlock.Ruleset | None,
    unix_filter: str | None,
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
        lockdown.add_filter(unix_filter)
        lockdown.close_all_but(())
        script_files.write(content.get("files", ()))
        os.chdir(content["cwd"])
        os.execvpe(content["argv"][0], content["argv"], {**os.environ, **content["env"]})  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"{content['argv'][0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(_SPAWN_FAILED)


def _become_relay(listener: socket.socket) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        lockdown.close_all_but((listener.fileno(),))
        from sbx.guest.supervisor import (
            proxy_relay,  # only in this process: most jails never need it
        )

        proxy_relay.serve(listener)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"the way out: {error!r}\n".encode())
    finally:
        os._exit(1)


def _obey_at(terminal: Pty, order: frames.RawFrame) -> None:
    match order.type:
        case "type":
            terminal.type(base64.b64decode(order.content["data"]))
        case "resize":
            terminal.resize(order.content["rows"], order.content["columns"])
        case "hang_up":
            terminal.hung_up = True
            terminal.close()


def silence() -> None:
    """Point descriptors 0 to 2 to /dev/null. Standard error was bwrap's, for its start errors."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _outcome(status: int) -> dict[str, int]:
    code = os.waitstatus_to_exitcode(status)
    return {"code": code} if code >= 0 else {"signal": -code}


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    """Signal a child that is not reaped yet, or was just seen alive, so its pid is not reused."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, number)
