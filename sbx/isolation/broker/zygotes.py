"""Zygotes as the broker sees them: how one is started, and what is sent to it and to its jails.

`sbx.guest.start.zygote` and `sbx.guest.start.fork_child` have the two protocols. Until a jail has
entered a sandbox only our own code runs on the other side; still nothing here waits for it.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from sbx.errors import Unavailable
from sbx.guest import shares
from sbx.isolation import cgroups, userns
from sbx.isolation.broker import bind_staging, spawn
from sbx.linux import mounts, namespaces, prctl

_PACKET_MAX = 1 << 16


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

        `ahead` of need more is done before it is parked, so that it can be entered sooner.
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
        """What it says, with the fds it sends; b"" at its end."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.orders, _PACKET_MAX, 2)
        except OSError:
            return b"", []
        return packet, fds

    def jail_of(self, packet: bytes) -> tuple[str, str]:
        """Which jail a packet is about, and why it could not be forked, if it could not."""
        number, _, why = packet.partition(b" ")
        return self._forking.pop(number, ""), why.decode(errors="replace")


def start(
    order: Mapping[str, Any], become: tuple[int, int] | None, uids: Sequence[range]
) -> ZygoteProcess:
    """Start a zygote by the broker's order `start_zygote`, told what to prepare.

    `become` is the host uid and gid that it runs as, `uids` the host uids that its jails may get;
    without `become` they can only have the broker's own. Raises OSError, with nothing left but what
    `staging.clear` removes.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as undo, its:
        undo.callback(ours.close)
        ours.setblocking(False)
        ours.send(json.dumps(order["prepare"]).encode())
        made = _make_userns(become, uids)
        try:
            started = spawn.start_zygote(order, its.fileno(), made, become)
        finally:
            os.close(made)
        undo.pop_all()
    return ZygoteProcess(order["zygote"], order["seq"], become and become[0], ours, started)


def enter(
    setup: socket.socket,
    order: Mapping[str, Any],
    ids: tuple[int, int],
    group: cgroups.JailGroup,
    owners: int | None,
) -> None:
    """Send a parked jail all that makes it one of a sandbox: its ids, its group, its files.

    `order` is the broker's `enter`, `owners` the user namespace for its mapped mounts. Raises
    OSError, and Broken when a source is no longer what the runtime opened.
    """
    told = {
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
        packet = json.dumps({**told, "groups": len(entries)}).encode()
        socket.send_fds(setup, [packet], [*entries, *trees])


def _tree(mount: Mapping[str, Any], owners: int | None) -> int:
    """A detached mount of a directory or file of the host, not to be taken for another one."""
    tree = mounts.open_tree(mount["source"])
    try:
        found = os.fstat(tree)
        if mount["expected"] is not None and [found.st_dev, found.st_ino] != mount["expected"]:
            raise bind_staging.replaced(mount["source"])
        mounts.restrict_tree(tree, read_only=not mount["writable"], userns=owners)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _make_userns(become: tuple[int, int] | None, uids: Sequence[range]) -> int:
    """A user namespace in which the ids keep their numbers; an fd of it.

    bubblewrap itself can map one id only. The namespace's owner has to be who runs bubblewrap, so a
    child makes it; its maps are written from here, where a root broker may map what it likes.
    """

    def write_maps(pid: int) -> None:
        if become is not None:
            namespaces.map_ranges(pid, [(one.start, len(one)) for one in uids])

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
