"""The sandboxes of the broker: their cgroups, their host uids, and their memory.

A jail is always in the cgroup of its sandbox. All jails of a sandbox have one host uid.
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sbx.errors import Broken, Unavailable
from sbx.isolation import cgroups, userns
from sbx.isolation.broker.loop import BrokerLoop, log
from sbx.linux import procfs

REMOVE_S = 1.0
_SHORT_S = 0.5


@dataclass(slots=True)
class Group:
    """A jail's cgroup, and the limits in force there as read back when it was made."""

    group: cgroups.JailGroup
    limits: cgroups.CgroupLimits


@dataclass(slots=True)
class BrokerSandbox:
    """A sandbox as the broker knows it.

    `spare` is the group of the next jail: the answer to `make_sandbox` does not wait for it.
    `owners` is the user namespace for its mapped mounts, `memory` an fd that Linux makes readable
    when its memory has run out, and `removed` whether its groups are gone.
    """

    group: cgroups.SandboxGroup
    become: tuple[int, int] | None
    spare: Group | None = None
    jails: int = 0
    memory: int | None = None
    owners: int | None = None
    short_until: float = 0.0
    dying: set[str] = field(default_factory=set)
    dropped: bool = False
    removed: bool = False

    def make_spare(self) -> None:
        self.jails += 1
        group = self.group.make_jail(str(self.jails))
        self.spare = Group(group, group.limits())

    def throttle(self) -> None:
        try:
            self.group.throttle(not self.dying)
        except OSError as error:
            log(f"the CPU quota of a sandbox is not as it should be: {error}")

    def remove_group(self, *, in_use: bool) -> None:
        """Remove its groups. A jail that takes long to die holds them, and removes them at its end.

        Once: a sandbox that is opened again has groups of the same names.
        """
        self.dropped = True
        try:
            self.group.remove(REMOVE_S)
        except TimeoutError:
            if not in_use:
                raise
        else:
            self.removed = True


class BrokerSandboxes:
    """All sandboxes of one broker. `confined`: the runtime may only have uids of the range."""

    def __init__(self, loop: BrokerLoop) -> None:
        self._loop = loop
        self.by_name: dict[str, BrokerSandbox] = {}
        self.hierarchy: cgroups.Hierarchy | None = None
        self.uids = range(0)
        self.as_root = os.geteuid() == 0
        self.confined = False

    def make(self, order: dict[str, Any], zygote_uids: Collection[int]) -> None:
        """Reply as soon as the jails of the sandbox have a group and a uid, and then continue."""
        uid, become = order["uid"], None
        if self.as_root:
            uid = self.free_uid(zygote_uids) if uid is None else uid
            if uid == 0:
                raise Broken("no sandbox may run as uid 0 of the host")
            self.check_uid(uid)
            become = (uid, uid)
        assert self.hierarchy is not None  # hello came first
        group = self.hierarchy.make_sandbox(
            order["sandbox"], cgroups.CgroupLimits(**order["limits"])
        )
        sandbox = self.by_name[order["sandbox"]] = BrokerSandbox(group, become)
        uid, gid = become or (os.geteuid(), os.getegid())
        self._loop.send({"seq": order["seq"], "ok": {"uid": uid, "gid": gid}})
        try:
            sandbox.make_spare()
        except OSError as error:  # the first jail makes it then, and reports the error
            log(f"no group could be made ahead: {error}")
        self._watch_memory(sandbox)

    def take_group(self, sandbox: BrokerSandbox) -> Group:
        """Return the group of the next jail. Raise OSError if none can be made."""
        self._watch_memory(sandbox)  # again, if no file could be opened for it before
        if sandbox.spare is None:
            sandbox.make_spare()
        taken, sandbox.spare = sandbox.spare, None
        assert taken is not None
        return taken

    def _watch_memory(self, sandbox: BrokerSandbox) -> None:
        if sandbox.memory is not None:
            return
        try:
            sandbox.memory = sandbox.group.watch_memory()
        except OSError as error:
            log(f"a jail that is out of memory will not end as a whole: {error}")
        if sandbox.memory is not None:
            self._loop.watch(sandbox.memory, lambda: self.note_shortage(sandbox))

    def check_uid(self, uid: int) -> None:
        if self.confined and uid not in self.uids:
            raise Broken(
                f"the host uid {uid} is outside the range that sandboxes of this service may have",
                hint="set uid_range to its value when the sandbox was created",
            )

    def free_uid(self, zygote_uids: Collection[int], *, left: int = 0) -> int:
        """Return a uid that nothing else of this broker has. Random, as other runtimes choose
        too. `left`: the number of free uids that must be left."""
        taken = {sandbox.become[0] for sandbox in self.by_name.values() if sandbox.become}
        taken |= set(zygote_uids)
        if len(taken) + left >= len(self.uids):
            raise Unavailable(
                "every host uid of the range for sandboxes is in use",
                hint="widen the setting uid_range, or close sandboxes",
            )
        while True:
            chosen = int.from_bytes(os.urandom(8)) % len(self.uids)
            if self.uids[chosen] not in taken:
                return self.uids[chosen]

    def map_owner(self, order: dict[str, Any]) -> dict[str, Any]:
        sandbox = self.by_name[order["sandbox"]]
        if sandbox.become is None or sandbox.owners is not None:
            raise Broken("the owner of one directory is mapped, once, by a broker that is root")
        sandbox.owners = userns.map_owner(
            order["source"], order["expected"], sandbox.become, order.get("shown")
        )
        return {}

    def limit_memory(self, order: dict[str, Any]) -> dict[str, Any]:
        sandbox = self.by_name.get(order["sandbox"])
        if sandbox is not None:
            try:
                sandbox.group.limit_memory(order["memory_max"])
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                raise Broken("the jails use more memory", code="memory_in_use") from None
        return {}

    def drop(self, name: str, is_used: Callable[[BrokerSandbox], bool]) -> dict[str, Any]:
        """Remove a sandbox. `is_used` reports whether a jail is in it."""
        sandbox = self.by_name.pop(name, None)
        if sandbox is not None:
            if sandbox.owners is not None:
                os.close(sandbox.owners)
                sandbox.owners = None
            if sandbox.memory is not None:
                self._loop.unwatch(sandbox.memory)
                os.close(sandbox.memory)
                sandbox.memory = None
            sandbox.remove_group(in_use=is_used(sandbox))
        return {}

    def note_shortage(self, sandbox: BrokerSandbox) -> None:
        """Note that memory has run out. Linux reports it before it kills."""
        assert sandbox.memory is not None
        with suppress(BlockingIOError):
            os.read(sandbox.memory, 8)
        sandbox.short_until = time.monotonic() + _SHORT_S

    @property
    def short(self) -> list[BrokerSandbox]:
        now = time.monotonic()
        return [sandbox for sandbox in self.by_name.values() if sandbox.short_until > now]

    def usage(self, name: str, pids: Sequence[int]) -> dict[str, Any]:
        """Return what the jails of a sandbox use. `pids` are those of their PID 1."""
        sandbox = self.by_name.get(name)
        if sandbox is None or self.hierarchy is None:
            raise Broken(f"sandbox {name} does not exist", code="sandbox_gone")
        try:
            used = sandbox.group.usage()
        except OSError as error:
            log(f"the usage of a sandbox cannot be read: {error}")
            used = cgroups.CgroupUsage()
        counted = {"jails": len(pids), "network": _network(pids)}
        return {"version": self.hierarchy.version, **used._asdict(), **counted}


def _network(pids: Sequence[int]) -> list[int] | None:
    """Return the bytes that live jails received and sent, and the bytes sent to themselves."""
    received = sent = loopback = 0
    seen = False
    for pid in pids:
        try:
            interfaces = procfs.traffic(pid)
        except (OSError, ValueError, IndexError):
            continue
        seen = True
        loopback += interfaces.pop("lo", (0, 0))[1]
        received += sum(counts[0] for counts in interfaces.values())
        sent += sum(counts[1] for counts in interfaces.values())
    return [received, sent, loopback] if seen or not pids else None
