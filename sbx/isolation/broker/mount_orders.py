"""The orders `attach`, `detach` and `mask`: each starts a child of `live_mounts`, and answers at
the child's end."""

import os
from typing import Any

from sbx.errors import Broken
from sbx.isolation.broker import live_mounts
from sbx.isolation.broker.jails import BrokerJail, BrokerJails
from sbx.isolation.broker.loop import BrokerLoop


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
            outcome = {"error": error.to_dict()} if error else {"ok": done.masks._asdict()}
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
                outcome = done if reported is None else {"error": reported.to_dict()}
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
