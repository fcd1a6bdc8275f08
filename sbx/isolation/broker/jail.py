"""One jail and one zygote, as the runtime sees them.

`BrokerClient` makes both. They send their orders through it, and it reports their end.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from sbx import errors
from sbx.isolation import process_state
from sbx.isolation.launch_plan import LaunchPlan, ZygotePlan
from sbx.isolation.masking import Masks
from sbx.isolation.receipt import Receipt, make_receipt
from sbx.linux import hidden_files, procfs, sock_diag

_END_S = 5.0
# All tasks of a fork bomb have to run once more to end: with 40 others ready to run on two cores
# 5 s were not enough.
_KILLED_S = 30.0
# Of Linux, for each message and for each semaphore
_MESSAGE, _SEMAPHORE = 64, 128

Order = Callable[..., Awaitable[dict[str, Any]]]
Fork = Callable[["ZygoteHandle", bool], Awaitable["Jail"]]


class JailExit(Struct, frozen=True):
    """The end of a jail: the counters of its cgroup, and the last words of bwrap."""

    stderr: str = ""
    oom_kills: int = 0
    pids_max_hits: int = 0


class KernelAccounts:
    """The memory that Linux holds for a jail in no process: see `live_orders`."""

    def __init__(self, fds: list[int]) -> None:
        self._diag = socket.socket(fileno=fds[0])
        self._files = fds[1:]

    def sockets(self) -> int:
        """Return the bytes in the queues of sockets. Raise OSError."""
        return sock_diag.queued(self._diag)

    def system_v(self) -> int:
        """Return the bytes of all segments, message queues and semaphores."""
        segments, queues, semaphores = map(_table, self._files)
        return (
            sum(int(row["rss"]) + int(row["swap"]) for row in segments)
            + sum(int(row["cbytes"]) + int(row["qnum"]) * _MESSAGE for row in queues)
            + sum(int(row["nsems"]) * _SEMAPHORE for row in semaphores)
        )

    def close(self) -> None:
        self._diag.close()
        for fd in self._files:
            os.close(fd)


def _table(fd: int) -> list[dict[str, str]]:
    os.lseek(fd, 0, os.SEEK_SET)
    text = b""
    while piece := os.read(fd, 1 << 16):
        text += piece
    names, *rows = (line.split() for line in text.decode().splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


class Jail:
    """One jail. `control` and `kernel` are the runtime's ends of its two sockets.

    A jail of a zygote waits, without a sandbox and a plan, until `BrokerClient.enter`.
    """

    def __init__(self, order: Order, name: str, zygote: "ZygoteHandle | None" = None) -> None:
        """`order` sends one order to the broker and returns its outcome."""
        self._order = order
        self._plan: LaunchPlan | None = None
        self.limits: Mapping[str, Any] | None = None
        self.name = name
        self.zygote = zygote
        self.pid: int | None = None
        self.kernel_pid: int | None = None
        self.control, self.control_inside = _pair()
        self.kernel, self.kernel_inside = _pair()
        self._end: asyncio.Future[JailExit] = asyncio.get_running_loop().create_future()
        self._gone_by: float | None = None

    @property
    def plan(self) -> LaunchPlan:
        if self._plan is None:
            raise errors.Broken(f"the jail {self.name} has entered no sandbox")
        return self._plan

    def give(self, plan: LaunchPlan) -> None:
        """Set the plan of the jail, once."""
        assert self._plan is None
        self._plan = plan

    def walls(self) -> dict[str, Any]:
        """Return the seal for the boot frame. A forked jail itself loads the filter that bubblewrap
        loads into the others."""
        return self.plan.seal.to_json() | {
            "filter": self.plan.filter.program.hex() if self.zygote is not None else None,
            "way_out": self.plan.way_out,
            "masks": self.plan.masks,
        }

    @property
    def masked_places(self) -> Sequence[str]:
        """Return the directories in which the host's sockets are covered before user code runs."""
        return self.plan.host_directories if self.plan.masks else ()

    def make_receipt(self, facts: Mapping[str, Any], **seen: Any) -> Receipt:
        return make_receipt(self.plan, facts, **seen)

    @property
    def gone(self) -> bool:
        """Return whether all processes have ended, and the cgroup and the mounts are removed."""
        return self._end.done()

    def processes(self) -> list[int]:
        """Return the host pids of every process inside, PID 1 first; none after the end.

        The kernel of a forked jail is a child of the zygote, not of PID 1.
        """
        if self.gone:
            return []
        roots = (pid for pid in (self.pid, self.kernel_pid) if pid is not None)
        return [pid for root in roots for pid in procfs.descendants(root)]

    async def end(self) -> JailExit:
        return await asyncio.shield(self._end)

    async def kill(self) -> JailExit:
        """Send SIGKILL to everything inside, and wait until it is gone. Raise Broken `_KILLED_S`
        after the first kill: a later call waits no longer than that."""
        if self.gone:
            return self._end.result()
        self._gone_by = self._gone_by or asyncio.get_running_loop().time() + _KILLED_S
        try:
            async with asyncio.timeout_at(self._gone_by):
                with contextlib.suppress(errors.SbxError):  # a broker that ends takes it along
                    await self._order("kill", jail=self.name)
                return await self.end()
        except TimeoutError:
            raise errors.Broken(
                f"the jail {self.name} was killed and is not gone after {_KILLED_S:g} s"
            ) from None

    async def inspect(self, *, fresh: bool = False) -> dict[str, Any]:
        """Return the facts that Linux reports about PID 1 and the kernel; with `fresh`, also the
        limits of their group, and whether they are in it."""
        if not fresh and self.pid is not None and self.limits is not None:
            # Where /proc is hidden, or the jail is another user's, only the broker may look.
            with contextlib.suppress(OSError):
                return {**process_state.read(self.pid, self.kernel_pid), "limits": self.limits}
        return await self._order("inspect", jail=self.name, fresh=fresh)

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a TCP port of the loopback inside.

        Raise Unavailable `port_not_open`, `live_mount_unavailable`, Broken `jail_gone`."""
        (fd,) = await self._from_inside("connect", 1, port=port)
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        return connection

    async def accounts(self) -> "KernelAccounts":
        """Return the memory accounts of its namespaces.

        Raise Unavailable `layer_unavailable`, `live_mount_unavailable`, Broken `jail_gone`."""
        return KernelAccounts(await self._from_inside("accounts", 4))

    async def _from_inside(self, do: str, count: int, **fields: Any) -> list[int]:
        """Return the files that the broker opens in the namespaces of the jail."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, its:
            ours.setblocking(False)
            await self._order(do, jail=self.name, fds=[its.fileno()], **fields)
            _, fds, _, _ = socket.recv_fds(ours, 1, count)  # it was sent before the order ended
        if len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise errors.Broken("the broker sent no file")  # no descriptor was free
        return fds

    async def mask(self, places: Sequence[str]) -> Masks:
        """Cover the host's sockets and FIFOs in these directories, before any user's code runs.

        Raise Broken `jail_gone`, Unavailable `live_mount_unavailable`, `mount_failed`."""
        return Masks(**await self._order("mask", jail=self.name, places=places))

    async def attach(
        self,
        source: str,
        target: str,
        *,
        read_only: bool,
        expected: tuple[int, int],
        mask: bool = True,
        partly: bool = False,
    ) -> int:
        """Mount a host directory, the (device, inode) `expected`, at `target`.

        With `mask`, cover the host's sockets and FIFOs in it first, and return their number; with
        `partly`, also if some cannot be covered. Raise Unavailable `sockets_not_masked`,
        `live_mount_unavailable` and `mount_failed`, Conflict `already_mounted` and `target_moved`,
        Broken `jail_gone` and `path_replaced`, Denied `not_granted`.
        """
        how = {"read_only": read_only, "expected": expected, "mask": mask, "partly": partly}
        reply = await self._order("attach", jail=self.name, source=source, target=target, **how)
        return int(reply["masked"])

    async def detach(self, target: str) -> None:
        await self._order("detach", jail=self.name, target=target)

    async def unlinked(self, device: int) -> hidden_files.Unlinked:
        """Return the files without a name that its processes hold on a file system, as far as the
        broker can count them in a few milliseconds."""
        if self.gone:
            return hidden_files.Unlinked(0, 0)
        return hidden_files.Unlinked(**await self._order("unlinked", jail=self.name, device=device))

    async def counters(self) -> JailExit:
        """Return the cgroup's counters so far; after its end, the last ones."""
        if self.gone:
            return self._end.result()
        try:
            return JailExit("", **await self._order("counters", jail=self.name))
        except (errors.Broken, errors.Unavailable):
            async with asyncio.timeout(_END_S):
                return await self.end()

    def close(self) -> None:
        for sock in (self.control, self.kernel):
            sock.close()
        self.close_inside()

    def close_inside(self) -> None:
        for sock in (self.control_inside, self.kernel_inside):
            sock.close()

    def set_ended(self, end: JailExit) -> None:
        if not self._end.done():
            self._end.set_result(end)


class ZygoteHandle:
    """A process with the preloaded modules of a policy, from which its jails are forked.

    `python` is its version. `missing` has the modules that could not be imported, with the reasons.
    """

    def __init__(self, order: Order, fork: "Fork", name: str, plan: ZygotePlan) -> None:
        self._order = order
        self._fork = fork
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.name = name
        self.plan = plan
        self.forks = 0
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.python = ""
        self.missing: Mapping[str, str] = {}

    @property
    def alive(self) -> bool:
        return not self._gone.done()

    async def gone(self) -> str:
        """Wait until it accepts no orders, and return the reason. Its jails live on."""
        return await asyncio.shield(self._gone)

    async def fork(self, *, ahead: bool = False) -> Jail:
        """Fork a jail without a sandbox. Raise Unavailable `zygote_gone`, `launch_failed`.

        With `ahead` it is warmed up, which takes longer now and makes its first uses quick.
        """
        self.forks += 1
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._fork(self, ahead)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no fork is in flight: it would fail at the end of its zygote."""
        await self._idle.wait()

    async def retire(self) -> None:
        """End it. Its jails live on, and those that are idle can still enter a sandbox."""
        if self.alive:
            await self._order("retire_zygote", zygote=self.name)
        self.set_ended("it was retired")

    def set_ended(self, why: str) -> None:
        if not self._gone.done():
            self._gone.set_result(why)


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, inside
