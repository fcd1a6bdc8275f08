"""Zygotes of the broker: their start, and the messages to them and to their jails.

`sbx.guest.start.zygote` and `sbx.guest.start.fork_child` have the two protocols. Until a jail has
entered a sandbox only our own code runs on the other side; still nothing here waits for it.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from sbx.errors import Broken, Unavailable
from sbx.guest import shares
from sbx.isolation import cgroups, userns
from sbx.isolation.broker import bind_staging, spawn
from sbx.isolation.broker.jails import BrokerJail, BrokerJails
from sbx.isolation.broker.loop import BrokerLoop, close_all, log
from sbx.isolation.broker.sandboxes import BrokerSandboxes
from sbx.linux import mounts, namespaces, prctl, procfs

_PACKET_MAX = 1 << 16
_SETUP_MAX = 1 << 17


class ZygoteProcess:
    """A zygote that was started. `orders` is the broker's end of its socket, and non-blocking."""

    def __init__(
        self, name: str, seq: int, uid: int | None, orders: socket.socket, started: spawn.Started
    ) -> None:
        self.name = name
        self.seq = seq
        self.uid = uid
        self.orders = orders
        self.started = started
        self.ready = False
        self.refused: str | None = None
        self._forks = 0
        self._forking: dict[bytes, str] = {}

    @property
    def retired(self) -> bool:
        return self.orders.fileno() < 0

    def fork(self, jail: str, control: int, kernel: int, *, ahead: bool) -> socket.socket:
        """Order a jail; the broker's end of its setup socket. Raises Unavailable `zygote_gone`.

        `ahead` of need more is done before it is idle, so that it can be entered sooner.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                self._forks += 1
                number = str(self._forks).encode()
                order = number if ahead else number + b" now"
                socket.send_fds(self.orders, [order], [its.fileno(), control, kernel])
                self._forking[number] = jail
            except OSError as error:
                ours.close()
                raise Unavailable(
                    f"the zygote takes no order: {error.strerror}", code="zygote_gone"
                ) from None
        ours.setblocking(False)
        return ours

    def read(self) -> tuple[bytes, list[int]]:
        """Return its next packet with the fds; b"" at its end."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.orders, _PACKET_MAX, 2)
        except OSError:
            return b"", []
        return packet, fds

    def jail_of(self, packet: bytes) -> tuple[str, str]:
        """Return the jail of a packet, and the error if the fork failed."""
        number, _, why = packet.partition(b" ")
        return self._forking.pop(number, ""), why.decode(errors="replace")


class Zygotes:
    def __init__(self, loop: BrokerLoop, sandboxes: BrokerSandboxes, jails: BrokerJails) -> None:
        self._loop = loop
        self._sandboxes = sandboxes
        self._jails = jails
        self.by_name: dict[str, ZygoteProcess] = {}

    @property
    def uids(self) -> set[int]:
        return {zygote.uid for zygote in self.by_name.values() if zygote.uid is not None}

    def start(self, order: dict[str, Any]) -> None:
        """Start a zygote; answered when it has imported everything."""
        become = None
        sandboxes = self._sandboxes
        uids = [sandboxes.uids]
        if sandboxes.as_root:
            own = sandboxes.free_uid(self.uids, left=1)  # its sandbox, which may be created later
            become = (own, own)
            if order["uid"] is not None and order["uid"] not in sandboxes.uids:
                sandboxes.check_uid(order["uid"])
                uids.append(range(order["uid"], order["uid"] + 1))
        with ExitStack() as undo:
            undo.callback(bind_staging.clear, order["zygote"])
            zygote = start(order, become, uids)
            undo.pop_all()
        self.by_name[zygote.name] = zygote
        self._loop.children.add(zygote.started.monitor)
        self._loop.watch(zygote.orders.fileno(), lambda: self.read(zygote))
        self._loop.watch(zygote.started.monitor_fd, lambda: self._on_exit(zygote))

    def read(self, zygote: ZygoteProcess) -> None:
        packet, fds = zygote.read()
        if not packet:
            self.end(zygote, "it ended")
        elif not zygote.ready:
            message = json.loads(packet)
            if "ready" in message:
                zygote.ready = True
                self._loop.send({"seq": zygote.seq, "ok": message["ready"]})
            else:
                zygote.refused = message["refused"]
        else:
            name, why = zygote.jail_of(packet)
            jail = self._jails.by_name.get(name)
            if not why:
                self.adopt(jail, fds)
            elif jail is not None:
                jail.last_words = why
                self._jails.on_exit(jail)

    def end(self, zygote: ZygoteProcess, why: str) -> None:
        """Give it no further order. Jails that it has not reported yet end by themselves."""
        if zygote.retired:
            return
        self._loop.unwatch(zygote.orders.fileno())
        zygote.orders.close()
        for jail in [jail for jail in self._jails.by_name.values() if jail.zygote == zygote.name]:
            if jail.pid1_fd is None:
                jail.last_words = "its zygote ended"
                self._jails.on_exit(jail)
        if zygote.ready:
            self._loop.send({"event": "zygote_gone", "zygote": zygote.name, "why": why})

    def retire(self, name: str) -> dict[str, Any]:
        if (zygote := self.by_name.get(name)) is not None:
            self.end(zygote, "it was retired")
        return {}

    def _on_exit(self, zygote: ZygoteProcess) -> None:
        """Handle the end of its PID 1. The zygote and all its jails ended before it."""
        last_words, _ = self._jails.reap(zygote.started)
        os.close(zygote.started.info_fd)
        self.end(zygote, "PID 1 of its namespace ended")
        try:
            bind_staging.clear(zygote.name)
        except OSError as error:
            log(f"a bind of a zygote is left until the broker ends: {error}")
        del self.by_name[zygote.name]
        if not zygote.ready:
            cause = zygote.refused or last_words or "it ended without a message"
            failed = Unavailable(
                f"no zygote can be started: {cause}",
                code="zygote_failed",
                hint="kernels start by the cold path instead; `sbx doctor` lists the working paths",
            )
            self._loop.send({"seq": zygote.seq, "error": failed})

    def fork(self, order: dict[str, Any], fds: list[int]) -> None:
        """Fork a jail; answered when it is idle."""
        zygote = self.by_name.get(order["zygote"])
        if zygote is None or zygote.retired:
            raise Unavailable("the zygote has ended", code="zygote_gone")
        control, kernel = fds
        setup = zygote.fork(order["jail"], control, kernel, ahead=order["ahead"])
        jail = BrokerJail(order["jail"], order["seq"], setup=setup, zygote=zygote.name)
        self._jails.by_name[jail.name] = jail
        self._loop.watch(setup.fileno(), lambda: self.read_setup(jail))

    def adopt(self, jail: BrokerJail | None, pidfds: list[int]) -> None:
        """Take the pidfds of a forked jail; None if it was given up meanwhile."""
        if len(pidfds) < 2:  # Linux drops descriptors without room: see SCM_RIGHTS in unix(7)
            close_all(pidfds)
            if jail is not None:
                jail.last_words = "the broker has no descriptor left"
                self._jails.on_exit(jail)  # it ends by the end of its sockets
            return
        pid1_fd, kernel_fd = pidfds
        try:
            pids = procfs.pid_of(pid1_fd), procfs.pid_of(kernel_fd)
        except OSError as error:
            close_all(pidfds)
            if jail is not None:
                jail.last_words = f"its processes cannot be known: {error.strerror}"
                self._jails.on_exit(jail)
            return
        if jail is None:
            close_all(pidfds)  # it ends by the end of its sockets
            return
        jail.pid1_fd, jail.kernel_fd = pid1_fd, kernel_fd
        jail.pid1, jail.kernel = pids
        self._loop.watch(pid1_fd, lambda: self._jails.on_exit(jail))
        self._answer_if_idle(jail)

    def _answer_if_idle(self, jail: BrokerJail) -> None:
        """Two sockets report a fork, the zygote's and the jail's own, in either order."""
        if jail.idle and jail.pid1 is not None:
            self._jails.answer(jail, {"pid": jail.pid1, "kernel": jail.kernel})

    def read_setup(self, jail: BrokerJail) -> None:
        assert jail.setup is not None
        try:
            packet = jail.setup.recv(_SETUP_MAX)
        except OSError:
            packet = b""
        message = json.loads(packet) if packet else {}
        if message.get("idle"):
            jail.idle = True
            self._answer_if_idle(jail)
        else:
            jail.last_words = message.get("refused", "")
            self._jails.close_setup(jail)  # it ends by that, and its end gives the answer

    def enter(self, order: dict[str, Any]) -> dict[str, Any]:
        """Put an idle jail into a sandbox. If that fails, end the jail."""
        jail = self._jails.get(order["jail"])
        sandbox = self._sandboxes.by_name[order["sandbox"]]
        if jail.setup is None:
            raise Broken("the jail is not idle")
        try:
            jail.group = self._sandboxes.take_group(sandbox)
            jail.sandbox = sandbox
            ids = sandbox.become or (os.geteuid(), os.getegid())
            enter(jail.setup, order, ids, jail.group.group, sandbox.owners)
        except BaseException:
            self._jails.kill(jail)
            raise
        finally:
            self._jails.close_setup(jail)
        return {"limits": jail.group.limits._asdict()}


def start(
    order: Mapping[str, Any], become: tuple[int, int] | None, uids: Sequence[range]
) -> ZygoteProcess:
    """Start a zygote by the order `start_zygote`, which has its preparations.

    `become` is its host uid and gid, `uids` are the host uids that its jails may get; without
    `become` they only get the broker's own. Raise OSError; `bind_staging.clear` removes the rest.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as undo, its:
        undo.callback(ours.close)
        ours.setblocking(False)
        ours.send(json.dumps(order["prepare"]).encode())
        userns_fd = _make_userns(become, uids)
        try:
            started = spawn.start_zygote(order, its.fileno(), userns_fd, become)
        finally:
            os.close(userns_fd)
        undo.pop_all()
    return ZygoteProcess(order["zygote"], order["seq"], become and become[0], ours, started)


def enter(
    setup: socket.socket,
    order: Mapping[str, Any],
    ids: tuple[int, int],
    group: cgroups.JailGroup,
    owners: int | None,
) -> None:
    """Send an idle jail its ids, its group and its files, so that it joins a sandbox.

    `order` is the order `enter`, `owners` the user namespace for its mapped mounts. Raise OSError,
    and Broken if a source was replaced.
    """
    packet_fields = {
        "ids": ids,
        "mounts": [mount["target"] for mount in order["mounts"]],
        "tmpfs": order["tmpfs"],
        "environment": order["environment"],
    }
    with ExitStack() as opened:
        entries = group.entries()
        for fd in entries:
            opened.callback(os.close, fd)
        trees = []
        for mount in order["mounts"]:
            trees.append(_tree(mount, userns.of(mount["mapped"], owners)))
            opened.callback(os.close, trees[-1])
        packet = json.dumps({**packet_fields, "groups": len(entries)}).encode()
        socket.send_fds(setup, [packet], [*entries, *trees])


def _tree(mount: Mapping[str, Any], owners: int | None) -> int:
    """Return a detached mount of a directory or file of the host, after a check of its identity."""
    tree = mounts.open_tree(mount["source"])
    try:
        status = os.fstat(tree)
        if mount["expected"] is not None and [status.st_dev, status.st_ino] != mount["expected"]:
            raise bind_staging.replaced(mount["source"])
        mounts.restrict_tree(tree, read_only=not mount["writable"], userns=owners)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _make_userns(become: tuple[int, int] | None, uids: Sequence[range]) -> int:
    """Return an fd of a user namespace in which the ids keep their numbers.

    bubblewrap itself can map only one id. The user that runs bubblewrap must own the namespace, so
    a child creates it. This process writes the maps, because a root broker may map any id.
    """

    def write_maps(pid: int) -> None:
        if become is not None:
            namespaces.map_ranges(pid, [(span.start, len(span)) for span in uids])

    return userns.make(lambda: _enter_userns(become), write_maps)


def _enter_userns(become: tuple[int, int] | None) -> None:
    ids = (os.geteuid(), os.getegid())
    if become is not None:
        uid, gid = become
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    namespaces.unshare(namespaces.Namespace.USER)
    prctl.set_dumpable(True)  # else its files in /proc are root's
    if become is None:
        namespaces.map_ids_to_self(*ids)
    else:
        shares.keep_half_of_inotify()  # for each sandbox, by its uid
