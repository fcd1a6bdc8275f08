"""Turn plans into jails through the broker, and learn of their end.

A plan becomes processes by `launch`, or by `start_zygote`, `fork` and `enter`, and nowhere else.
When the broker dies, every jail is known to have ended: bubblewrap dies with its parent.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.isolation import project_quota
from sbx.isolation.argv import bwrap_argv, zygote_argv
from sbx.isolation.broker import bind_staging
from sbx.isolation.broker.connection import BrokerConnection
from sbx.isolation.broker.early_orders import ZYGOTE, EarlyOrders
from sbx.isolation.broker.jail import Jail, JailExit, ZygoteHandle
from sbx.isolation.launch_plan import Bind, GroupLimits, LaunchPlan, Mount, Tmpfs, ZygotePlan


class HostIds(Struct, frozen=True):
    uid: int
    gid: int


class JailsUsage(Struct, frozen=True):
    """The use of all jails of a sandbox by its cgroup, in bytes, tasks, seconds; None if it is not
    counted. `version` is that of the cgroups, 0 for none. `network` is the bytes that the live
    `jails` received, sent, and sent to themselves."""

    version: int
    memory: int | None
    memory_pinned: int | None
    memory_peak: int | None
    tasks: int | None
    cpu_s: float | None
    jails: int
    network: tuple[int, int, int] | None


class BrokerClient(BrokerConnection):
    def __init__(self) -> None:
        super().__init__()
        self._jails: dict[str, Jail] = {}
        self._zygotes: dict[str, ZygoteHandle] = {}
        self.disk: str | None = None

    async def make_sandbox(self, name: str, limits: GroupLimits, uid: int | None = None) -> HostIds:
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
        """Set `capabilities` and `disk` for the data directory: whether conversations below it can
        have a hard quota, and the "MAJOR:MINOR" of their disk or None."""
        reply = await self.order("look_at_disk", path=path)
        assert self.capabilities is not None
        self.disk = reply["device"]
        self.capabilities = project_quota.with_disk(self.capabilities, reply, path)

    async def charge(self, path: str, *, bytes_max: int, inodes_max: int) -> bool:
        """Give a conversation's directory a hard quota; False for one that is too old to count.

        Raises Broken where Linux refuses.
        """
        reply = await self.order("charge", path=path, bytes_max=bytes_max, inodes_max=inodes_max)
        return bool(reply["charged"])

    async def limit_memory(self, name: str, memory_max: int) -> None:
        """Change the memory limit of all jails of a sandbox, in bytes. Raise Broken `memory_in_use`
        if they use more and Linux kills none of them for it (cgroup v1)."""
        if self.alive:
            await self.order("limit_memory", sandbox=name, memory_max=memory_max)

    async def drop_sandbox(self, name: str) -> None:
        """Kill the jails of a sandbox and remove its cgroup, later if a jail takes long to die. A
        broker that ended did this already."""
        if self.alive:
            await self.order("drop_sandbox", sandbox=name)

    async def usage(self, name: str) -> JailsUsage:
        """Return the use of all jails of a sandbox now. Raise Broken if the sandbox is gone."""
        reply = await self.order("usage", sandbox=name)
        network = reply.pop("network")
        return JailsUsage(**reply, network=None if network is None else tuple(network))

    async def launch(
        self, sandbox: str, plan: LaunchPlan, identities: Mapping[str, tuple[int, int]]
    ) -> Jail:
        """Start a jail by its plan; returns when bubblewrap has made the view and PID 1 runs.

        `identities` gives the (device, inode) that a host path must still have when it is mounted.
        Raises Unavailable `launch_failed` with bwrap's own words when it could not.
        """
        name = secrets.token_hex(8)
        jail = Jail(self.order, name)
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
        early, self._early = self._early, None
        name = (early.zygote_name if early is not None else None) or secrets.token_hex(8)
        order = _zygote_order(plan, walls, uid, name)
        is_sent = early is not None and early.matches_zygote(order)
        if early is not None and not is_sent:
            await self._retire_early(early)
            name = secrets.token_hex(8)
            order = _zygote_order(plan, walls, uid, name)
        zygote = ZygoteHandle(self.order, self._fork, name, plan)
        self._zygotes[name] = zygote
        try:
            if is_sent:
                ready = await self.early_reply(ZYGOTE, "start_zygote", deadline_s)
            else:
                ready = await self.order("start_zygote", deadline_s=deadline_s, **order)
        except BaseException:
            self._zygotes.pop(name, None)
            if self.alive:
                with contextlib.suppress(errors.SbxError):
                    await run_to_completion(self.order("retire_zygote", zygote=name))
            raise
        zygote.python, zygote.missing = ready["python"], ready["missing"]
        if early is not None and not is_sent:
            await self._keep(early, order)
        return zygote

    async def end_early_zygote(self) -> None:
        """End the zygote of an early order, if the first kernel did not need it."""
        if self._early is not None:
            early, self._early = self._early, None
            await self._retire_early(early)
            await self._keep(early, None)

    async def _retire_early(self, early: EarlyOrders) -> None:
        if early.zygote_name is not None:
            await self.order("retire_zygote", zygote=early.zygote_name)

    async def _keep(self, early: EarlyOrders, order: Mapping[str, Any] | None) -> None:
        await in_thread(early.keep, self._greeting, order)

    async def enter(
        self,
        jail: Jail,
        sandbox: str,
        identities: Mapping[str, tuple[int, int]],
    ) -> None:
        """Let an idle jail that was given its plan into a sandbox: cgroup, host uid, files.

        `identities` as in `launch`. Raise Broken if a source was replaced, and errors of the
        broker. The jail then ends, and cannot be used again.
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
                (mount.target, sizes[mount.target].size, mount.mode)
                for mount in jail.zygote.plan.tmpfs
            ],
            # few: the zygote has the variables of the policy
            environment=dict(set(plan.environment) - set(jail.zygote.plan.environment)),
        )
        jail.limits = answer["limits"]

    async def _fork(self, zygote: ZygoteHandle, ahead: bool) -> Jail:
        jail = Jail(self.order, secrets.token_hex(8), zygote)
        return await self._made(jail, "fork", zygote=zygote.name, ahead=ahead)

    async def _made(self, jail: Jail, do: str, **words: Any) -> Jail:
        self._jails[jail.name] = jail
        inside = (jail.control_inside.fileno(), jail.kernel_inside.fileno())
        try:
            answer = await self.order(do, fds=inside, jail=jail.name, **words)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) or _code(error) == "zygote_silent":
                await self._abandon(jail)
                raise
            self._jails.pop(jail.name, None)
            jail.close()
            raise
        jail.close_inside()
        jail.pid, jail.kernel_pid = answer["pid"], answer.get("kernel")
        return jail

    async def _abandon(self, jail: Jail) -> None:
        """Kill the jail of a cancelled launch, and close its sockets."""
        jail.close()
        self._jails.pop(jail.name, None)
        with contextlib.suppress(errors.SbxError):
            await run_to_completion(self.order("kill", jail=jail.name))

    def on_event(self, message: Mapping[str, Any]) -> None:
        if message["event"] == "zygote_gone":
            if (zygote := self._zygotes.pop(message["zygote"], None)) is not None:
                zygote.set_ended(message["why"])
        elif (jail := self._jails.pop(message["jail"], None)) is not None:
            counters = message["oom_kills"], message["pids_max_hits"]
            jail.set_ended(JailExit(message["stderr"], *counters))

    def on_end(self) -> None:
        for jail in self._jails.values():
            jail.set_ended(JailExit("the broker ended"))
        self._jails.clear()
        for zygote in self._zygotes.values():
            zygote.set_ended("the broker ended")
        self._zygotes.clear()


def _zygote_order(
    plan: ZygotePlan, walls: Mapping[str, Any], uid: int | None, name: str
) -> dict[str, Any]:
    tops = tuple(f"{mount.target}/" for mount in plan.tmpfs)
    return {
        "zygote": name,
        "bwrap": plan.bwrap,
        "args": zygote_argv(plan, lambda index: bind_staging.place(name, index)),
        "command": plan.command,
        "files": [file.content for file in plan.files],
        "stage": _staged(plan.mounts, {}),
        "prepare": {
            "preload": plan.preload,
            "tmpfs": [(mount.target, mount.size, mount.mode) for mount in plan.tmpfs],
            "kept": [mount.target for mount in plan.mounts if mount.target.startswith(tops)],
            "walls": walls,
        },
        "uid": uid,
    }


def _staged(
    mounts: Sequence[Mount], identities: Mapping[str, tuple[int, int]]
) -> list[tuple[int, str, tuple[int, int] | None, bool]]:
    """Return the mounts that the broker binds to a reachable place before bwrap starts."""
    return [
        (index, mount.source, identities.get(mount.source), mount.mapped)
        for index, mount in enumerate(mounts)
        if isinstance(mount, Bind) and mount.staged
    ]


def _code(error: BaseException) -> str:
    return getattr(error, "code", "")
