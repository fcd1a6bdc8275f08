"""The zygote of a policy: imports everything once, and forks jails on order.

Run by path as `python -I`, in a view without a workspace. It reads no file that a user could have
written, receives no user code, and holds no secret. It consists of two processes, because a fork
copies the pages that it writes, and a small parent has few of them:

    the keeper    PID 1, imports next to nothing; forks the supervisor of each jail, which is 1 MiB
    the zygote    its child, has imported IPython and the policy's preload; forks each jail's kernel

The whole protocol with the broker, in packets on the keeper's SOCK_SEQPACKET socket ORDERS_FD. The
keeper passes the zygote's part on:

    → {"preload": [module, …], "tmpfs": [[path, size, mode], …], "kept": [path, …], "walls": {…}}
    ← {"ready": {"python": version, "missing": {module: why}}}  or  {"refused": sentence}
      A module that makes the zygote unfit for forks (it starts a thread) is `missing`: the keeper
      starts another zygote without it, and each kernel imports it when its code does.
    and from then on, for each jail:
    → a number for it, with three fds: setup, control, kernel     see `sbx.guest.start.fork_child`
      or the number and " now": a caller waits, so no work is done ahead
    ← the number, with two pidfds: the supervisor's and the kernel's
    ← the number, a space and the reason, if it could not be forked

Jails have a number and not a name, because every later jail inherits the memory of this process.

The zygote ends when that socket is closed, and closes it when it ends. The jails live on, and the
keeper lives until the last of them has ended. When the keeper ends, everything ends. It ends with
bubblewrap and the broker.

The price of the speed is that the forked jails of a zygote share one hash seed and one address
layout. This is why zygotes are renewed, and why policies can request the cold path.
"""

import os
import sys

sys.path.insert(0, __file__.rpartition("/sbx/guest/")[0])

import contextlib
import gc
import json
import select
import signal
import socket
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

from sbx.guest.inherited_fds import ORDERS_FD
from sbx.guest.kernel import ending
from sbx.guest.start import fork_child, lockdown, memory_layout
from sbx.linux import namespaces

_PACKET_MAX = 1 << 17
# Without an order for so long, no caller waits. The pool orders kernels ahead after 50 ms.
_IDLE_S = 0.03
_AT_ONCE_MAX = 4  # of a crowd of kernels, most have arranged memory
_UNFIT = b'{"unfit":'
_FDS_SPACE = socket.CMSG_SPACE(3 * 4)


def main() -> NoReturn:
    lockdown.close_all_but((ORDERS_FD,))  # bubblewrap leaves the user namespace's descriptor open
    orders = socket.socket(fileno=ORDERS_FD)
    first = orders.recv(_PACKET_MAX)
    if not first:
        os._exit(0)
    description = json.loads(first)
    # A kernel is process 2 of its namespace. OpenSSL's random generator and other code detect a
    # fork by the changed pid. So process 2 of this namespace must not be the zygote.
    _fork_and_reap()
    fork_child.ask_ahead(description["walls"])
    memory_layout.forget_names()
    memory_layout.fill()
    gc.freeze()  # as below, for supervisors
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not used: Linux reaps jails
    _Keeper(orders, description).serve()


class _Keeper:
    """PID 1: takes the orders, and forks supervisors."""

    def __init__(self, orders: socket.socket, description: dict[str, Any]) -> None:
        self._orders = orders
        self._description = {**description, "left_out": {}}
        self._view = fork_child.MountView.from_json(description)
        self._own = _own_pid_namespace()
        self._has_forked = False
        self._supervisors: dict[bytes, int] = {}
        self._start_zygote()

    def serve(self) -> NoReturn:
        # No error here may end PID 1, because all jails would end with it.
        with contextlib.suppress(Exception):
            while True:
                poll = self._poll
                for fd, _ in poll.poll():
                    if poll is self._poll:  # or else the number is that of an earlier zygote
                        self._handle(fd)
        self._retire()

    def _start_zygote(self) -> None:
        keeper_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote_pid = os.fork()
        if zygote_pid == 0:
            self._orders.close()
            keeper_end.close()
            os.close(self._own)
            _be_zygote(zygote_end, self._description)
        zygote_end.close()
        self._zygote, self._zygote_fd = keeper_end, os.pidfd_open(zygote_pid)
        self._poll = select.poll()
        self._poll.register(self._orders, select.POLLIN)
        self._poll.register(self._zygote, select.POLLIN)
        # A process that the imports have started may keep the zygote's socket open.
        self._poll.register(self._zygote_fd, select.POLLIN)

    def _handle(self, fd: int) -> None:
        if fd == self._orders.fileno():
            self._obey()
        elif fd == self._zygote.fileno():
            self._hand_on()
        else:
            self._retire()  # the zygote has ended

    def _replace_zygote(self, unfit: dict[str, str]) -> None:
        """Start another zygote without these modules, before any jail was forked."""
        self._zygote.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # also the processes that the imports have started
        os.close(self._zygote_fd)
        self._description["left_out"] |= unfit
        left_out = self._description["left_out"]
        preload = [name for name in self._description["preload"] if name not in left_out]
        self._description["preload"] = preload
        self._start_zygote()

    def _obey(self) -> None:
        order, fds = _receive(self._orders)
        if not order:
            self._retire()
        number = order.partition(b" ")[0]
        try:
            if len(fds) != 3:
                raise OSError("its sockets did not arrive")
            self._fork(number, order, fds)
        except OSError as error:
            self._orders.send(number + f" {error}".encode())
        for fd in fds:
            os.close(fd)

    def _fork(self, number: bytes, order: bytes, fds: Sequence[int]) -> None:
        setup, control, kernel = fds
        supervisor_end, kernel_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            namespaces.unshare(namespaces.Namespace.PID)  # for the next child, which is its PID 1
            try:
                pid = os.fork()
                if pid == 0:
                    for sock in (self._orders, self._zygote, kernel_end):
                        sock.detach()
                    jail = (setup, control, supervisor_end.detach())
                    fork_child.become_supervisor(jail, self._view, ahead=order == number)
            finally:
                namespaces.join(self._own, namespaces.Namespace.PID)
            self._has_forked = True
            self._supervisors[number] = pidfd = os.pidfd_open(pid)
            _send(self._zygote, order, (kernel, kernel_end.fileno(), pidfd))
        finally:
            supervisor_end.close()
            kernel_end.close()

    def _hand_on(self) -> None:
        packet, fds = _receive(self._zygote)
        if not packet:
            self._retire()
        if packet.startswith(_UNFIT) and not self._has_forked:
            self._replace_zygote(json.loads(packet)["unfit"])
            return
        supervisor = self._supervisors.pop(packet.partition(b" ")[0], None)
        fds = (supervisor, *fds) if supervisor is not None else fds
        _send(self._orders, packet, fds if len(fds) == 2 else ())
        for fd in fds:
            os.close(fd)

    def _retire(self) -> NoReturn:
        self._orders.close()
        self._zygote.close()
        with contextlib.suppress(ProcessLookupError):  # it may hang, for example in an import
            signal.pidfd_send_signal(self._zygote_fd, signal.SIGKILL)
        if not self._has_forked:
            os._exit(0)  # this ends the processes that the imports have started
        while True:
            try:
                os.wait()  # with SIGCHLD ignored, this waits for the end of all children
            except ChildProcessError:
                os._exit(0)


def _be_zygote(keeper: socket.socket, description: dict[str, Any]) -> NoReturn:
    """Be the zygote, the large process and child of the keeper; see the top of this file."""
    try:
        _serve(keeper, description)
    except ending.Leave:  # a kernel that has ended
        raise
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"the zygote failed: {error!r}\n".encode())
        os._exit(1)


def _serve(keeper: socket.socket, description: dict[str, Any]) -> NoReturn:
    # Import everything that a kernel needs here, once for all forks.
    gc.disable()  # the imports make objects that stay, and collections would take 5 ms of 70
    from sbx.guest.kernel import loop, setup  # noqa: F401  # the loop is for the forks

    first: dict[str, str] = {}  # the module after which the zygote was unfit, by the reason

    def note(module: str) -> None:
        if (reason := _unfit(keeper.fileno())) is not None:
            first.setdefault(reason, module)

    prepared = setup.prepare(description["preload"], note)
    if first:
        unfit = {
            module: f"it {reason}, so that code inside has to import it"
            for reason, module in first.items()
        }
        keeper.send(json.dumps({"unfit": unfit}).encode())
        os._exit(0)
    prepared.missing.update(description["left_out"])
    _rehearse(prepared.shell, failing=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a module may have changed it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (refusal := _unfit(keeper.fileno())) is not None:
        keeper.send(json.dumps({"refused": f"a module that it imports {refusal}"}).encode())
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a module may have changed it
    own = _own_pid_namespace()
    gc.freeze()  # a collection in a jail would write to every page of this process, and so copy it
    gc.enable()
    # A caller waits for the first kernel, which comes 70 ms earlier so. It has more private memory,
    # and its first error takes 15 ms more.
    arranged, forks = False, 0
    version = ".".join(map(str, sys.version_info[:3]))
    keeper.send(json.dumps({"ready": {"python": version, "missing": prepared.missing}}).encode())
    while True:
        if forks and not arranged and (forks > _AT_ONCE_MAX or _is_idle(keeper)):
            _arrange(prepared.shell)
            arranged = True
        order, fds = _receive(keeper)
        if not order:
            os._exit(0)
        number = order.partition(b" ")[0]
        supervisor = fds[2]
        try:
            namespaces.join(supervisor, namespaces.Namespace.PID)  # for the next child
            try:
                pid = os.fork()
                if pid == 0:
                    keeper.detach()
                    fork_child.become_kernel(
                        fds, prepared, description["walls"], ahead=order == number
                    )
            except ending.Leave:  # in the fork, which may not join anything
                raise
            except BaseException:
                namespaces.join(own, namespaces.Namespace.PID)
                raise
            namespaces.join(own, namespaces.Namespace.PID)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            keeper.send(number + f" {error}".encode())
        else:
            _send(keeper, number, (pidfd,))
            os.close(pidfd)
        for fd in fds:
            os.close(fd)
        forks += 1


def _is_idle(keeper: socket.socket) -> bool:
    readable, _, _ = select.select([keeper], [], [], _IDLE_S)
    return not readable


def _arrange(shell: Any) -> None:
    """Arrange the memory for the kernels that are forked from now on."""
    gc.unfreeze()
    memory_layout.forget_names()
    _rehearse(shell)
    memory_layout.gather(lambda: _rehearse(shell))
    _rehearse(shell)
    gc.collect()
    memory_layout.fill()
    gc.freeze()
    memory_layout.collapse()


def _rehearse(shell: Any, *, failing: bool = True) -> None:
    """Do the first work of each kernel, and leave no trace here."""
    import asyncio

    from sbx.guest.start import warmup

    warmup.warm(shell, failing=failing)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Return a packet and its fds; b"" at the end. On purpose simpler than socket.recv_fds."""
    packet, ancillary, _, _ = sock.recvmsg(_PACKET_MAX, _FDS_SPACE)
    return packet, tuple(memoryview(ancillary[0][2]).cast("i")) if ancillary else ()


def _send(sock: socket.socket, packet: bytes, fds: tuple[int, ...]) -> None:
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])


def _unfit(keeper_fd: int) -> str | None:
    """Return why no kernel can be forked from this process, or None if it is fit.

    A second thread would not exist in a child, and its locks would stay locked. Linux gives no user
    namespace to a process with threads. The first fork ends the threads of OpenBLAS, which starts
    them again on use.
    """
    _fork_and_reap()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "leaves a child process behind"
    if threads := _threads():
        return f"starts threads, which a fork does not copy ({threads})"
    # A kernel closes its inherited files: a module would then use a number of another file.
    if open_files := _open_files() - {0, 1, 2, keeper_fd}:
        return f"leaves {len(open_files)} files open"
    return None


def _threads() -> str:
    """Return the names of the other threads of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if task != str(os.getpid()):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
    return ", ".join(sorted(names))


def _open_files() -> set[int]:
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            os.fstat(int(name))
            numbers.add(int(name))
    return numbers


def _fork_and_reap() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # reaped by Linux


def _own_pid_namespace() -> int:
    return os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


ending.run_to_end(main)
