"""The orders on a live jail: each starts a child of the broker in its namespaces, and answers at
the child's end.

    attach, detach, mask    see `live_mounts`
    connect                 a connection to a TCP port of the loopback inside. The child joins the
                            network namespace by the pidfd of PID 1, connects there, and sends the
                            socket over the one that came with the order. The jail gets no network:
                            only this connection crosses its border, and the host opened it
    accounts                files that show the memory that Linux holds for the jail's network and
                            IPC namespaces: a socket of sock_diag(7), and those of /proc/sysvipc
"""

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from sbx.errors import Broken, Unavailable
from sbx.isolation.broker import live_mounts
from sbx.isolation.broker.jails import BrokerJail, BrokerJails
from sbx.isolation.broker.loop import BrokerLoop
from sbx.linux import namespaces, sock_diag

_CONNECT_S = 2.0
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class MountOrders:
    def __init__(self, loop: BrokerLoop, jails: BrokerJails) -> None:
        self._loop = loop
        self._jails = jails

    def obey(self, order: dict[str, Any]) -> None:
        jail = self._jails.get(order["jail"])
        if jail.pid1_fd is None or jail.group is None:
            raise Broken("the jail is in no sandbox yet")
        if not self._jails.own_namespaces:
            raise live_mounts.refuse_without_namespaces()
        if order["do"] == "mask":
            self._mask(jail, jail.pid1_fd, order)
        else:
            self._attach(jail, order)

    def _attach(self, jail: BrokerJail, order: dict[str, Any]) -> None:
        target = order["target"]
        if not live_mounts.is_target(target):
            raise Broken(f"nothing is mounted at {target}")
        attach = order["do"] == "attach"
        if attach:
            if target in jail.attached:
                raise live_mounts.taken(target)
            tree = live_mounts.open_source(
                order["source"], order["expected"], read_only=order["read_only"]
            )
        elif (tree := jail.attached.pop(target, -1)) < 0:
            raise live_mounts.not_there(target)
        how = {}
        if attach:
            how = {"mask": order["mask"], "partly": order["partly"], "pin": not order["read_only"]}
        self._mount(jail, target, tree, attach=attach, seq=order["seq"], **how)

    def _mask(self, jail: BrokerJail, pid1_fd: int, order: dict[str, Any]) -> None:
        """Cover the host's sockets and FIFOs in these places of a jail: see `masking`."""
        places = order["places"]
        child = live_mounts.begin_masks(pid1_fd, places)
        self._loop.children.add(child.pid)

        def ended() -> None:
            self._forget(child)
            done = live_mounts.end(child, ", ".join(places))
            error = live_mounts.gone() if jail.name not in self._jails.by_name else done.error
            outcome = {"error": error} if error else {"ok": done.masks._asdict()}
            self._loop.send({"seq": order["seq"], **outcome})

        self._loop.watch(child.pidfd, ended)

    def _mount(
        self,
        jail: BrokerJail,
        target: str,
        tree: int,
        *,
        attach: bool,
        seq: int | None,
        mask: bool = False,
        partly: bool = False,
        pin: bool = False,
    ) -> None:
        """Start the child. With `seq`, answer with its outcome."""
        assert jail.pid1_fd is not None
        try:
            child = live_mounts.begin(
                jail.pid1_fd, target, tree, attach=attach, mask=mask, partly=partly, pin=pin
            )
        except BaseException:
            os.close(tree)
            raise
        self._loop.children.add(child.pid)

        def ended() -> None:
            self._forget(child)
            error, clone, masks = live_mounts.end(child, target)
            shown = tree
            if clone is not None:
                os.close(tree)
                shown = clone
            there = jail.name in self._jails.by_name
            if seq is not None:
                reported = live_mounts.gone() if error is not None and not there else error
                done = {"ok": {"masked": masks.masked}}
                outcome = done if reported is None else {"error": reported}
                self._loop.send({"seq": seq, **outcome})
            if there and seq is not None and attach == (error is None):
                jail.attached[target] = shown  # attached, or not to be detached now
            elif there and attach and error is not None and error.code == "mount_failed":
                self._mount(jail, target, shown, attach=False, seq=None)  # it may have come so far
            else:
                os.close(shown)

        self._loop.watch(child.pidfd, ended)

    def _forget(self, child: live_mounts.Child) -> None:
        self._loop.unwatch(child.pidfd)
        self._loop.children.discard(child.pid)


def connect(loop: BrokerLoop, jails: BrokerJails, order: dict[str, Any], fds: list[int]) -> None:
    """Start the child, and answer at its end. Raise Broken, Unavailable."""
    port = int(order["port"])
    _send_from_inside(
        loop,
        jails,
        order,
        fds,
        namespaces.Namespace.NET,
        lambda: [_connected(port).detach()],
        closed(port),
    )


def accounts(loop: BrokerLoop, jails: BrokerJails, order: dict[str, Any], fds: list[int]) -> None:
    """Start the child, and answer at its end. Raise Broken, Unavailable."""
    _send_from_inside(
        loop,
        jails,
        order,
        fds,
        namespaces.Namespace.NET | namespaces.Namespace.IPC,
        _accounts,
        Unavailable("this Linux does not show the sockets of a jail", code="layer_unavailable"),
    )


def _accounts() -> list[int]:
    return [
        sock_diag.open_diag().detach(),
        *(os.open(f"/proc/sysvipc/{name}", os.O_RDONLY) for name in ("shm", "msg", "sem")),
    ]


def _send_from_inside(
    loop: BrokerLoop,
    jails: BrokerJails,
    order: dict[str, Any],
    fds: list[int],
    where: namespaces.Namespace,
    make: Callable[[], list[int]],
    failure: Unavailable,
) -> None:
    """Start a child that joins namespaces of the jail, and sends the files that it makes there."""
    jail = jails.get(order["jail"])
    if jail.pid1_fd is None or len(fds) != 1:
        raise Broken("the jail is in no sandbox yet")
    if not jails.own_namespaces:
        raise live_mounts.refuse_without_namespaces()
    pid1, target = jail.pid1_fd, fds[0]

    def act(_report: socket.socket) -> None:
        namespaces.join(pid1, where)
        with socket.socket(fileno=os.dup(target)) as reply:
            socket.send_fds(reply, [b"c"], make())

    child = live_mounts.start_child(act)
    loop.children.add(child.pid)

    def ended() -> None:
        loop.unwatch(child.pidfd)
        loop.children.discard(child.pid)
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        child.report.close()
        if os.waitstatus_to_exitcode(status) == 0:
            loop.send({"seq": order["seq"], "ok": {}})
        else:
            loop.send({"seq": order["seq"], "error": failure})

    loop.watch(child.pidfd, ended)


def closed(port: int) -> Unavailable:
    return Unavailable(
        f"no server inside listens on port {port}",
        code="port_not_open",
        hint="start one in the sandbox, on 127.0.0.1 or on all addresses",
    )


def _connected(port: int) -> socket.socket:
    signal.alarm(int(_CONNECT_S) + 1)
    for family, host in _LOOPBACKS:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect((host, port))
        except OSError:
            connection.close()
        else:
            return connection
    raise ConnectionRefusedError(111, os.strerror(111))
