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

import contextlib
import os
import select
import selectors
import signal
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from sbx.guest import frames, machine, path_guard
from sbx.guest.guarded_calls import GuardedCalls
from sbx.guest.inherited_fds import CONTROL_FD, KERNEL_FD
from sbx.guest.kernel import ending, setup
from sbx.guest.start import lockdown
from sbx.guest.supervisor import children
from sbx.guest.supervisor.commands import JailCommands
from sbx.guest.supervisor.proxy_listener import ProxyListener

_CHUNK = 1 << 16
_OUTBOX_MAX = 1 << 20


class Supervisor:
    """The loop of PID 1."""

    def __init__(
        self,
        control: socket.socket,
        kernel_pid: int,
        walls: Any,
        oom: children.OomScore,
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
        self._oom = oom
        self._selector = selectors.DefaultSelector()
        self._commands = JailCommands(
            self._selector,
            self.tell,
            lambda: len(self._outbox) >= _OUTBOX_MAX,
            walls,
            oom,
            ends_groups=ends_groups,
        )
        self._decoder = frames.FrameReader()
        self._outbox = bytearray()
        self._proxy: ProxyListener | None = None
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
        """Listen at the address of the proxy."""
        self._proxy = ProxyListener(self._selector, self._oom)

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
        if order.type == "interrupt":
            self._interrupt()
        else:
            self._commands.obey(order)

    def _interrupt(self) -> None:
        # Another process's child may have been reaped, and its pid reused, before this process
        # knows of its end: so check just before the signal. This process reaps its own children.
        if self._kernel_pid and not (self._kernel_ended and self._kernel_ended.poll(0)):
            children.signal_group(self._kernel_pid, signal.SIGINT)

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
            self._commands.read_again()

    def _leave(self) -> NoReturn:
        """End this process. Linux then ends the PID namespace, if there is one."""
        pids = [pid for pid in (self._kernel_pid, *self._commands.pids) if pid]
        for pid in pids if self._ends_groups else ():
            _kill_group(pid)
            os.waitpid(pid, 0)
        os._exit(0)

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
                self.tell("kernel_exited", children.outcome(status))
            elif self._proxy is not None and pid == self._proxy.relay_pid:
                self._proxy.relay_ended(status)
            elif pid == self._guard_pid:
                os._exit(1)  # without the guard, no process inside can write to the workspace
            else:
                self._commands.end(pid, status)


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
            oom = children.OomScore()
            oom.set(children.OOM_KERNEL)
            lockdown.check_unprivileged()
            machine.describe(walls["machine"])
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
    oom.set(children.OOM_SUPERVISOR)
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
    oom: children.OomScore,
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
        lockdown.add_filter(walls["last_filter"])
    except BaseException as error:  # noqa: BLE001  # for any error: no user code may run here
        sock.sendall(frames.encode("refused", lockdown.refusal(error)))
        os._exit(1)


def become_kernel(sock: socket.socket, boot: Mapping[str, Any]) -> NoReturn:
    """Be the kernel until its end, which raises Leave."""
    try:
        setup.serve(sock, setup.KernelConfig(**boot["kernel"]))
    except ending.Leave:
        raise
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"the kernel could not start: {error!r}\n".encode())
        os._exit(1)


def silence() -> None:
    """Point descriptors 0 to 2 to /dev/null. Standard error was bwrap's, for its start errors."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
