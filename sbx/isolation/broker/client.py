"""The runtime's end of the broker's socket: start the broker, launch jails, learn of their end.

A plan becomes processes by `launch`, or by `start_zygote`, `fork` and `enter`, and nowhere else.
Everything here is asyncio and adds nothing to the embedding program but one child process; orders
have deadlines, and when the broker dies every jail is known to be gone (bubblewrap dies with its
parent). A broker that answers nothing is killed (see `pulse`).
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbx import errors
from sbx.aio import check_process, in_thread, run_to_completion
from sbx.isolation import cgroups, facts, project_quota
from sbx.isolation.argv import bwrap_argv, zygote_argv
from sbx.isolation.broker import bind_staging, spawn, watchdog
from sbx.isolation.broker.pulse import RETRY_AFTER_S, Pulse
from sbx.isolation.broker.watchdog import Watchdog
from sbx.isolation.masking import Masks
from sbx.isolation.plan import Bind, GroupLimits, LaunchPlan, Mount, Tmpfs, ZygotePlan
from sbx.isolation.probe import Capabilities
from sbx.linux import procfs

_log = logging.getLogger(__name__)
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sbx.isolation.broker.server import main; main()"
)
_ORDER_S = 30.0
_END_S = 5.0
# All tasks of a fork bomb have to run once more to end: with 40 others ready to run on two cores
# 5 s were not enough.
_KILLED_S = 30.0
_BEHIND_S = 0.002
_IN_FLIGHT_S, _IN_FLIGHT_PAUSE_S = 3.0, 0.05
_OF_A_ZYGOTE = {"start_zygote": "import what is preloaded", "fork": "fork a jail"}
_PACKET_MAX = 1 << 18
_ORDER_MAX = 1 << 17  # as the broker reads; linux takes no packet above 208 KiB


@dataclass(frozen=True, slots=True)
class JailExit:
    """How a jail ended, as the broker saw it: counters of its cgroup, last words of bwrap."""

    stderr: str = ""
    oom_kills: int = 0
    pids_max_hits: int = 0


@dataclass(frozen=True, slots=True)
class HostIds:
    """The ids on the host that a sandbox's processes and files have."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class JailsUsage:
    """What all jails of a sandbox use: bytes, tasks, seconds, as its cgroup counts them; None where
    it does not. `version` is that of the cgroups, 0 for none; `network` is bytes received, sent,
    and sent to themselves, of the live ones, which are `jails`."""

    version: int
    memory: int | None
    memory_pinned: int | None
    memory_peak: int | None
    tasks: int | None
    cpu_s: float | None
    jails: int
    network: tuple[int, int, int] | None


class Jail:
    """One jail. `control` and `kernel` are the runtime's ends of its two sockets.

    One that a zygote forked waits, in no sandbox and without a plan, until `BrokerClient.enter`.
    """

    def __init__(
        self, broker: "BrokerClient", name: str, zygote: "ZygoteHandle | None" = None
    ) -> None:
        self._broker = broker
        self._plan: LaunchPlan | None = None
        self._limits: Mapping[str, Any] | None = None
        self.name = name
        self.zygote = zygote
        self.pid: int | None = None
        self.kernel_pid: int | None = None
        self.control, self._control_inside = _pair()
        self.kernel, self._kernel_inside = _pair()
        self._end: asyncio.Future[JailExit] = asyncio.get_running_loop().create_future()
        self._gone_by: float | None = None

    @property
    def plan(self) -> LaunchPlan:
        if self._plan is None:
            raise errors.Broken(f"the jail {self.name} has entered no sandbox")
        return self._plan

    def give(self, plan: LaunchPlan) -> None:
        """What the jail is to be. Once."""
        assert self._plan is None
        self._plan = plan

    def walls(self) -> dict[str, Any]:
        """The seal, as the boot frame tells it. A forked jail loads by itself the filter that
        bubblewrap loads into the others."""
        return self.plan.seal.to_json() | {
            "filter": self.plan.filter.program.hex() if self.zygote is not None else None,
            "way_out": self.plan.way_out,
            "masks": self.plan.masks,
        }

    @property
    def gone(self) -> bool:
        """Whether every process of the jail has ended and its cgroup and mounts are removed."""
        return self._end.done()

    def processes(self) -> list[int]:
        """Every process inside, as the host numbers them, PID 1 first. None once it has ended.

        The kernel of a forked jail is a child of the zygote, not of PID 1.
        """
        if self.gone:
            return []
        roots = (pid for pid in (self.pid, self.kernel_pid) if pid is not None)
        return [pid for root in roots for pid in procfs.descendants(root)]

    async def end(self) -> JailExit:
        """Wait until nothing of the jail is left."""
        return await asyncio.shield(self._end)

    async def kill(self) -> JailExit:
        """SIGKILL to everything inside; returns when it is gone, Broken `_KILLED_S` after the
        first kill: nobody waits for it anew."""
        if self.gone:
            return self._end.result()
        self._gone_by = self._gone_by or asyncio.get_running_loop().time() + _KILLED_S
        try:
            async with asyncio.timeout_at(self._gone_by):
                with contextlib.suppress(errors.SbxError):  # a broker that ends takes it along
                    await self._broker.order("kill", jail=self.name)
                return await self.end()
        except TimeoutError:
            raise errors.Broken(
                f"the jail {self.name} was killed and is not gone after {_KILLED_S:g} s"
            ) from None

    async def inspect(self, *, fresh: bool = False) -> dict[str, Any]:
        """What linux says of PID 1 and the kernel: ids, capabilities, seccomp, namespaces; with
        `fresh` also of the limits of their group, and whether they are in it."""
        if not fresh and self.pid is not None and self._limits is not None:
            # Where /proc is hidden, or the jail is another user's, only the broker may look.
            with contextlib.suppress(OSError):
                return {**facts.read(self.pid, self.kernel_pid), "limits": self._limits}
        return await self._broker.order("inspect", jail=self.name, fresh=fresh)

    async def mask(self, places: Sequence[str]) -> Masks:
        """Cover the host's sockets and FIFOs in these directories, before any user's code runs.

        Raises Broken `jail_gone`, Unavailable `mount_unavailable`, `mount_failed`."""
        told = await self._broker.order("mask", jail=self.name, places=places)
        return Masks(**told)

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
        """Show a directory of the host at `target` from now on; it is the (device, inode)
        `expected`. With `mask` the host's sockets and FIFOs in it are covered before, and counted
        by the answer; with `partly` also where some cannot be. Raises Unavailable
        `sockets_not_masked`, Conflict `already_mounted` and `target_moved`, Broken `jail_gone` and
        `path_replaced`, Denied `not_granted`, Unavailable `mount_unavailable`, `mount_failed`."""
        told = await self._broker.order(
            "attach",
            jail=self.name,
            source=source,
            target=target,
            read_only=read_only,
            expected=expected,
            mask=mask,
            partly=partly,
        )
        return int(told["masked"])

    async def detach(self, target: str) -> None:
        """Show it no more. Raises NotFound `not_mounted`, and as `attach`."""
        await self._broker.order("detach", jail=self.name, target=target)

    async def unlinked(self, device: int) -> tuple[int, int]:
        """Bytes and number of the files on a file system that its processes hold open and that have
        no name any more, where only the broker may look; of what it can see in a few ms."""
        if self.gone:
            return 0, 0
        told = await self._broker.order("unlinked", jail=self.name, device=device)
        return told["bytes"], told["files"]

    async def counters(self) -> JailExit:
        """The cgroup's counters so far; those of its end when it is gone already."""
        if self.gone:
            return self._end.result()
        try:
            return JailExit("", **await self._broker.order("counters", jail=self.name))
        except (errors.Broken, errors.Unavailable):
            async with asyncio.timeout(_END_S):
                return await self.end()

    def close(self) -> None:
        """Close both sockets; the jail's PID 1 ends when it sees that."""
        for sock in (self.control, self.kernel):
            sock.close()
        self._close_inside()

    def _close_inside(self) -> None:
        for sock in (self._control_inside, self._kernel_inside):
            sock.close()

    def _ended(self, end: JailExit) -> None:
        if not self._end.done():
            self._end.set_result(end)


class ZygoteHandle:
    """A process that has imported what a policy preloads, and from which its jails are forked.

    `python` is its version, `missing` names the modules that could not be imported, and why.
    """

    def __init__(self, broker: "BrokerClient", name: str, plan: ZygotePlan) -> None:
        self._broker = broker
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
        """Wait until it takes no further order; why. The jails that it forked live on."""
        return await asyncio.shield(self._gone)

    async def fork(self, *, ahead: bool = False) -> Jail:
        """A new jail, in no sandbox. Raises Unavailable `zygote_gone`, `launch_failed`.

        `ahead` of need it is run warm, which takes longer now and makes its first uses quick.
        """
        self.forks += 1
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._broker._fork(self, ahead=ahead)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no fork is in flight: one that is fails when its zygote is retired."""
        await self._idle.wait()

    async def retire(self) -> None:
        """End it. Its jails live on, and those that are parked can still enter a sandbox."""
        if self.alive and self._broker.alive:
            await self._broker.order("retire_zygote", zygote=self.name)
        self._ended("it was retired")

    def _ended(self, why: str) -> None:
        if not self._gone.done():
            self._gone.set_result(why)


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """A running broker that has reported the capabilities of this host; `BrokerClient.adopt` takes
    it, once."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    capabilities: Capabilities
    watchdog: Watchdog

    def confine(self, granted: Mapping[str, Any]) -> None:
        """Say what jails may be made of (`grants`), once and for good: before that it does nothing.

        To be called with root's rights still there, before anything hostile is heard.
        """
        told = spawn.memory_file(json.dumps(granted).encode(), "grants")
        try:
            self.sock.settimeout(_ORDER_S)
            socket.send_fds(self.sock, [b'{"seq": 0, "do": "confine"}'], [told])
            packet = self.sock.recv(_PACKET_MAX)
        except OSError as error:
            raise _broker_died() from error
        finally:
            self.sock.setblocking(False)
            os.close(told)
        if not packet:
            raise _broker_died()
        if "error" in (said := json.loads(packet)):
            raise _revive(said["error"])

    def close(self) -> None:
        """End it, where nobody adopted it."""
        self.sock.close()
        watchdog.end(self.process, self.watchdog, _END_S)


def start_broker(
    *, bwrap: str | None = None, uids: tuple[int, int], groups: bool = True
) -> BrokerProcess:
    """As `BrokerClient.start`, for a program that has no event loop yet and gives up its privileges
    before it makes one: the broker gives it none of them back, whatever it is told. It does nothing
    before `confine`. A watchdog keeps the right to kill the broker.

    Blocks for as long as the broker looks at the host, 30 s at most.
    """
    words = _scope() if groups else []
    while True:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = _start_process(its.fileno(), words)
        try:
            ours.settimeout(_ORDER_S)
            hello = _hello(bwrap, uids, groups, confined=True)
            ours.send(json.dumps({"seq": 0, "do": "hello", **hello}).encode())
            packet = ours.recv(_PACKET_MAX)
            if packet and "ok" in (said := json.loads(packet)):
                ours.setblocking(False)
                capabilities = Capabilities.from_json(said["ok"])
                return BrokerProcess(process, ours, capabilities, Watchdog(process))
            error = _revive(said["error"]) if packet else _broker_died()
        except OSError:  # TimeoutError is one
            error = _broker_died()
        ours.close()
        watchdog.end(process, None, _END_S)
        if not words or error.code != "broker_died":
            raise error
        words = []  # systemd-run could not: without a scope, and without cgroups


class BrokerClient:
    """The runtime's handle of its broker process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._pulse = Pulse(lambda: self.order("ping"), self._is_silent)
        self._why: Callable[[], errors.SbxError] = _broker_died
        self._sock: socket.socket | None = None
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._jails: dict[str, Jail] = {}
        self._zygotes: dict[str, ZygoteHandle] = {}
        self.capabilities: Capabilities | None = None
        self.disk: str | None = None

    @classmethod
    async def start(
        cls, *, bwrap: str | None = None, uids: tuple[int, int], groups: bool = True
    ) -> "BrokerClient":
        """Start the process and let it find out what this host can do. `uids`: (first, count)."""
        words = await in_thread(_scope) if groups else []
        while True:
            broker = cls()
            try:
                await broker._open(words)
                raw = await broker.order("hello", **_hello(bwrap, uids, groups))
            except BaseException as error:
                await broker.close()
                if words and getattr(error, "code", "") in ("broker_died", "broker_silent"):
                    words = []  # systemd-run could not, or waits: without a scope and cgroups
                    continue
                raise
            broker.capabilities = Capabilities.from_json(raw)
            broker._pulse.start()
            return broker

    @classmethod
    def adopt(cls, started: BrokerProcess) -> "BrokerClient":
        """Take over a broker that `start_broker` started, in the event loop that runs now."""
        broker = cls()
        broker._process, broker._sock = started.process, started.sock
        broker._watchdog = started.watchdog
        broker.capabilities = started.capabilities
        asyncio.get_running_loop().add_reader(started.sock.fileno(), broker._receive)
        broker._pulse.start()
        return broker

    @property
    def alive(self) -> bool:
        """Whether the process still answers; when not, every jail has ended with it."""
        return self._sock is not None

    @property
    def failure(self) -> errors.SbxError | None:
        """Return why it is not alive: Broken `broker_died`, Unavailable `broker_silent`, Closed."""
        return None if self.alive else self._why()

    async def make_sandbox(self, name: str, limits: GroupLimits, uid: int | None = None) -> HostIds:
        """Prepare the cgroup and the host uid that all jails of one sandbox share."""
        return HostIds(
            **await self.order("make_sandbox", sandbox=name, limits=asdict(limits), uid=uid)
        )

    async def map_owner(self, name: str, source: str, expected: tuple[int, int]) -> None:
        """Show the owner of a host directory, which is the (device, inode) `expected`, as the uid
        of the sandbox, in all of its mounts that are `mapped`. Once for a sandbox, and as root.

        Raises Denied `workspace_owned_by_root` with the cause where Linux or the file system
        refuses, and Broken `path_replaced`.
        """
        await self.order("map_owner", sandbox=name, source=source, expected=expected)

    async def look_at_disk(self, path: str) -> None:
        """Learn whether conversations below this directory can have a hard quota, and on which disk
        they lie; `capabilities` says so from then on, and `disk` is "MAJOR:MINOR" or None."""
        told = await self.order("look_at_disk", path=path)
        assert self.capabilities is not None
        self.disk = told["device"]
        self.capabilities = project_quota.with_disk(self.capabilities, told, path)

    async def charge(self, path: str, *, bytes_max: int, inodes_max: int) -> bool:
        """Give a conversation's directory a hard quota; False for one that is too old to count.

        Raises Broken where linux refuses.
        """
        told = await self.order("charge", path=path, bytes_max=bytes_max, inodes_max=inodes_max)
        return bool(told["charged"])

    async def drop_sandbox(self, name: str) -> None:
        """Kill what is left of a sandbox and remove its cgroup, which goes later where a jail takes
        long to die. A broker that is gone did so."""
        if self.alive:
            await self.order("drop_sandbox", sandbox=name)

    async def usage(self, name: str) -> JailsUsage:
        """What all jails of a sandbox use now. Raises Broken when it is gone."""
        told = await self.order("usage", sandbox=name)
        network = told.pop("network")
        return JailsUsage(**told, network=None if network is None else tuple(network))

    async def launch(
        self, sandbox: str, plan: LaunchPlan, identities: Mapping[str, tuple[int, int]]
    ) -> Jail:
        """Start a jail by its plan; returns when bubblewrap has made the view and PID 1 runs.

        `identities` gives the (device, inode) that a host path must still have when it is mounted.
        Raises Unavailable `launch_failed` with bwrap's own words when it could not.
        """
        name = secrets.token_hex(8)
        jail = Jail(self, name)
        jail.give(plan)
        return await self._made(
            jail,
            "launch",
            sandbox=sandbox,
            bwrap=plan.bwrap,
            args=bwrap_argv(plan, lambda index: bind_staging.place(name, index)),
            command=plan.command,
            files=[file.content for file in plan.files],
            filter=plan.filter.program.hex(),
            stage=_staged((*plan.mounts, *plan.own_mounts), identities),
            guarded=plan.seal.guard is not None,
        )

    async def start_zygote(
        self,
        plan: ZygotePlan,
        walls: Mapping[str, Any],
        uid: int | None = None,
        deadline_s: float | None = None,
    ) -> ZygoteHandle:
        """Start a zygote; returns when it has imported everything, for which it has `deadline_s`.

        Its jails rehearse their seal with `walls`, which are to be like those they will get.
        `uid` is a host uid outside of the broker's range that its jails may need. Raises
        Unavailable `zygote_failed` with the cause.
        """
        name = secrets.token_hex(8)
        zygote = ZygoteHandle(self, name, plan)
        tops = [f"{mount.target}/" for mount in plan.tmpfs]
        kept = [one.target for one in plan.mounts if one.target.startswith(tuple(tops))]
        self._zygotes[name] = zygote
        try:
            ready = await self.order(
                "start_zygote",
                zygote=name,
                bwrap=plan.bwrap,
                args=zygote_argv(plan, lambda index: bind_staging.place(name, index)),
                command=plan.command,
                files=[file.content for file in plan.files],
                stage=_staged(plan.mounts, {}),
                prepare={
                    "preload": plan.preload,
                    "tmpfs": [(one.target, one.size, one.mode) for one in plan.tmpfs],
                    "kept": kept,
                    "walls": walls,
                },
                uid=uid,
                deadline_s=deadline_s,
            )
        except BaseException:
            self._zygotes.pop(name, None)
            if self.alive:
                with contextlib.suppress(errors.SbxError):
                    await run_to_completion(self.order("retire_zygote", zygote=name))
            raise
        zygote.python, zygote.missing = ready["python"], ready["missing"]
        return zygote

    async def enter(
        self,
        jail: Jail,
        sandbox: str,
        identities: Mapping[str, tuple[int, int]],
    ) -> None:
        """Let a parked jail that was given its plan into a sandbox: cgroup, host uid, files.

        `identities` as in `launch`. Raises Broken when a source was replaced, and what the broker
        met; the jail ends then, and is not to be used again in any case.
        """
        assert jail.zygote is not None
        plan = jail.plan
        sizes = {mount.target: mount for mount in plan.mounts if isinstance(mount, Tmpfs)}
        answer = await self.order(
            "enter",
            jail=jail.name,
            sandbox=sandbox,
            mounts=[
                {
                    "source": bind.source,
                    "target": bind.target,
                    "writable": bind.writable,
                    "mapped": bind.mapped,
                    "expected": identities.get(bind.source),
                }
                for bind in plan.own_mounts
            ],
            tmpfs=[
                (one.target, sizes[one.target].size, one.mode) for one in jail.zygote.plan.tmpfs
            ],
            # few: the zygote has what the policy sets
            environment=dict(set(plan.environment) - set(jail.zygote.plan.environment)),
        )
        jail._limits = answer["limits"]

    async def _fork(self, zygote: ZygoteHandle, *, ahead: bool) -> Jail:
        jail = Jail(self, secrets.token_hex(8), zygote)
        return await self._made(jail, "fork", zygote=zygote.name, ahead=ahead)

    async def _made(self, jail: Jail, do: str, **words: Any) -> Jail:
        """Give the order that makes the jail, and its sockets with it."""
        self._jails[jail.name] = jail
        inside = (jail._control_inside.fileno(), jail._kernel_inside.fileno())
        try:
            answer = await self.order(do, fds=inside, jail=jail.name, **words)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) or _code(error) == "zygote_silent":
                await self._abandon(jail)
                raise
            self._jails.pop(jail.name, None)
            jail.close()
            raise
        jail._close_inside()
        jail.pid, jail.kernel_pid = answer["pid"], answer.get("kernel")
        return jail

    async def order(
        self, do: str, *, fds: Sequence[int] = (), deadline_s: float | None = None, **words: Any
    ) -> dict[str, Any]:
        """Send one order and wait for its outcome. Raises what the broker answered, by its code."""
        check_process(self._pid)
        if self._sock is None:
            raise self._why()
        self._seq += 1
        seq = self._seq
        packet = json.dumps({"seq": seq, "do": do, **words}, ensure_ascii=False).encode()
        if len(packet) > _ORDER_MAX:
            raise errors.BadRequest(
                f"what is to be done takes {len(packet)} bytes to say; {_ORDER_MAX} are possible",
                code="order_too_large",
                hint="most of it are environment variables: put large values into a file",
            )
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = answer
        deadline_s, sent_at = deadline_s or _ORDER_S, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(packet, fds)
                return await answer
        except (BrokenPipeError, ConnectionResetError):
            raise _broker_died() from None
        except TimeoutError:
            if do in _OF_A_ZYGOTE:
                raise errors.Unavailable(
                    f"the zygote did not {_OF_A_ZYGOTE[do]} within {deadline_s:g} s",
                    code="zygote_silent",
                ) from None
            self._pulse.unanswered(sent_at)
            raise _broker_silent(f"the broker did not {do} within {deadline_s:g} s") from None
        finally:
            self._waiting.pop(seq, None)

    async def _open(self, prefix: Sequence[str]) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def start() -> None:
            with its:
                self._process = _start_process(its.fileno(), prefix)

        try:
            await in_thread(start)
        except BaseException:
            ours.close()
            raise
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        """Send one packet. Wait while the broker is behind with reading them, and for a short time
        while the user of this process has too many descriptors in flight."""
        loop = asyncio.get_running_loop()
        gives_up = loop.time() + _IN_FLIGHT_S
        while self._sock is not None:
            try:
                socket.send_fds(self._sock, [packet], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(_BEHIND_S)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                if loop.time() > gives_up:
                    raise _too_many_in_flight() from error
                await asyncio.sleep(_IN_FLIGHT_PAUSE_S)
        raise self._why()

    async def close(self) -> None:
        """End the broker and with it every jail. Never raises for what is gone already."""
        self._hang_up(_broker_died)
        self._why = _closed
        process, self._process = self._process, None
        if process is not None:
            await in_thread(watchdog.end, process, self._watchdog, _END_S)

    async def _abandon(self, jail: Jail) -> None:
        """A launch whose caller went away: kill what it has started by now, leave no socket."""
        jail.close()
        self._jails.pop(jail.name, None)
        with contextlib.suppress(errors.SbxError):
            await run_to_completion(self.order("kill", jail=jail.name))

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            packet = self._sock.recv(_PACKET_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._hang_up(_broker_died)
            return
        self._pulse.answered()
        message = json.loads(packet)
        match message.get("event"):
            case "gone":
                self._gone(message)
                return
            case "zygote_gone":
                if (zygote := self._zygotes.pop(message["zygote"], None)) is not None:
                    zygote._ended(message["why"])
                return
        waiting = self._waiting.get(message["seq"])
        if waiting is None or waiting.done():
            return
        if "ok" in message:
            waiting.set_result(message["ok"])
        else:
            waiting.set_exception(_revive(message["error"]))

    def _gone(self, message: Mapping[str, Any]) -> None:
        jail = self._jails.pop(message["jail"], None)
        if jail is not None:
            end = JailExit(message["stderr"], message["oom_kills"], message["pids_max_hits"])
            jail._ended(end)

    def _is_silent(self) -> None:
        """Give up the broker and kill it: jails end with it, and with their sockets."""
        _log.error("the broker answers nothing, and is killed")
        self._hang_up(_broker_silent)
        if self._process is not None:
            watchdog.kill(self._process, self._watchdog)

    def _hang_up(self, why: Callable[[], errors.SbxError]) -> None:
        """The socket's end, from either side: no order is answered any more, every jail ends."""
        self._pulse.stop()
        if self._sock is None:
            return
        self._why = why
        sock, self._sock = self._sock, None
        with contextlib.suppress(RuntimeError):  # the loop may be closed when the process ends
            asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(why())
        for jail in self._jails.values():
            jail._ended(JailExit("the broker ended"))
        self._jails.clear()
        for zygote in self._zygotes.values():
            zygote._ended("the broker ended")
        self._zygotes.clear()


def _staged(
    mounts: Sequence[Mount], identities: Mapping[str, tuple[int, int]]
) -> list[tuple[int, str, tuple[int, int] | None, bool]]:
    """What the broker has to bind to a place that anyone can walk to, before bwrap starts."""
    return [
        (index, mount.source, identities.get(mount.source), mount.mapped)
        for index, mount in enumerate(mounts)
        if isinstance(mount, Bind) and mount.staged
    ]


def _start_process(its: int, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """A session of its own, so that Ctrl-C in a terminal reaches the program and not the broker."""
    environment = {
        name: os.environ[name]
        for name in ("LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
        if name in os.environ
    }
    return subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_ROOT],
        stdin=its,
        stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("SBX_DEBUG") else subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def _hello(
    bwrap: str | None, uids: tuple[int, int], groups: bool, *, confined: bool = False
) -> dict[str, Any]:
    return {
        "runtime": os.getpid(),
        "bwrap": bwrap,
        "uids": uids,
        "groups": groups,
        "id": secrets.token_hex(4),
        "confined": confined,
    }


def _scope() -> list[str]:
    """The words that give the broker a delegated cgroup of its own, where systemd has to do it."""
    return cgroups.scope_command(cgroups.probe()) or []


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, inside


def _code(error: BaseException) -> str:
    return getattr(error, "code", "")


def _too_many_in_flight() -> errors.Unavailable:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return errors.Unavailable(
        f"the user of this process has more than {limit} descriptors in flight (ETOOMANYREFS), so"
        " none can be passed to the broker",
        code="too_many_in_flight",
        hint="raise the limit of open files of this process (ulimit -n), or end the program that"
        " sends descriptors which are not received; a sandbox of this user may be that program",
    )


def _closed() -> errors.Closed:
    return errors.Closed("the runtime is closed", hint="make a new one")


def _broker_died() -> errors.Broken:
    return errors.Broken(
        "the broker ended, and every sandbox of this runtime with it",
        code="broker_died",
        hint="close this runtime and make a new one",
        details={"retry_after_s": RETRY_AFTER_S},
    )


def _broker_silent(message: str = "the broker does not answer") -> errors.Unavailable:
    return errors.Unavailable(
        message,
        code="broker_silent",
        hint="try again; a service whose broker stays silent ends, so that it is started again",
        details={"retry_after_s": RETRY_AFTER_S},
    )


def _revive(raw: Mapping[str, Any]) -> errors.SbxError:
    """The broker's error as the class a caller can catch."""
    unavailable = (
        *("launch_failed", "unavailable", "zygote_failed", "zygote_gone"),
        *("mount_failed", "mount_unavailable", "sockets_not_masked"),
    )
    kind: type[errors.SbxError] = errors.Broken
    if raw["code"] in unavailable:
        kind = errors.Unavailable
    elif raw["code"] in ("not_granted", "workspace_owned_by_root"):
        kind = errors.Denied
    elif raw["code"] in ("already_mounted", "target_moved"):
        kind = errors.Conflict
    elif raw["code"] == "not_mounted":
        kind = errors.NotFound
    return kind(raw["message"], code=raw["code"], hint=raw.get("hint"), details=raw.get("details"))
