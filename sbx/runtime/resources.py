"""The parts that the sandboxes of a runtime share, and their requests for kernels."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.launch_plan import GroupLimits, Interpreter, Paths, WayOut
from sbx.isolation.plan import Filters, plan, slows_io
from sbx.isolation.probe import Capabilities
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.warm_pool import LaunchRequest
from sbx.kernels.pool.zygotes import Key
from sbx.policy import Policy
from sbx.workspace.allowed_paths import OwnPaths
from sbx.workspace.layout import DataDirectory
from sbx.workspace.paths import GENERATED
from sbx.workspace.quarantine import HostProtection

if TYPE_CHECKING:
    from sbx.runtime.files.open_files import MountPoints, OpenFiles

_MIME_MAX = 8 << 20


class RuntimeResources(Struct, frozen=True):
    """The parts of a runtime that every sandbox uses. `unowned_directories`: those of sandboxes
    without an owner, which no store has; `copies`: those of frozen copies. `confined`: the broker
    gives jails only uids of its range."""

    broker: BrokerClient
    starter: KernelFactory
    data: DataDirectory
    filters: Filters
    guest: Path
    grace_s: float
    own_paths: OwnPaths
    unowned_directories: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    disk_quota: str = "auto"
    protection: HostProtection = field(default_factory=lambda: HostProtection(Path()))
    confined: bool = False

    @property
    def capabilities(self) -> Capabilities:
        assert self.broker.capabilities is not None
        return self.broker.capabilities

    def paths_of_any(self, interpreter: Interpreter, policy: Policy) -> Paths:
        """Return the paths of any workspace of sbx, as far as they matter for a zygote."""
        shared = "" if policy.shared else None
        return Paths("", "", interpreter, str(self.guest), shared)

    def paths(
        self,
        opened: "OpenFiles",
        ready: "MountPoints",
        interpreter: Interpreter,
        way_out: WayOut | None = None,
    ) -> Paths:
        """Return where a jail finds its parts of these files."""
        return Paths(
            files=str(opened.files_path),
            uploads=str(opened.uploads_path),
            interpreter=interpreter,
            guest=str(self.guest),
            shared=str(opened.shared_path) if opened.shared_path is not None else None,
            shared_read_only=opened.shared_read_only,
            host_directory=opened.host_directory is not None,
            guard=ready.guard,
            host_uploads=str(opened.uploads_path) in opened.identities,
            way_out=way_out,
            disk=opened.disk,
            mapped=opened.mapped,
        )

    def order(
        self, group: str, policy: Policy, paths: Paths, ready: "MountPoints", key: Key | None
    ) -> LaunchRequest:
        """Return the request for a kernel by this policy, in the sandbox with the name `group` at
        the broker."""
        planned = plan(policy, self.capabilities, paths, self.filters)
        return LaunchRequest(
            sandbox=group,
            plan=planned,
            identities=ready.identities,
            config=_config(policy, planned.writable_home, own=not paths.host_directory),
            key=key,
            pooled=policy.pool.max_idle > 0,
        )

    def group_limits(self, policy: Policy) -> GroupLimits:
        """Return the limits of all jails of one sandbox together."""
        limits, disk = policy.limits, self.broker.disk
        io: tuple[tuple[str, int | None, int | None], ...] = ()
        if slows_io(policy) and disk is not None and self.capabilities.layer("io").available:
            rates = (limits.io_read_max, limits.io_write_max)
            read, write = (None if rate == math.inf else int(rate) for rate in rates)
            io = ((disk, read, write),)
        return GroupLimits(limits.memory_max, limits.tasks_max, limits.cpu_quota, io)


def _config(policy: Policy, home: str, *, own: bool) -> dict[str, Any]:
    rules = policy.imports
    return {
        "preload": list(policy.preload),
        "import_rules": {
            "allow": None if rules.allow == "any" else list(rules.allow),
            "forbid": list(rules.forbid),
        },
        "packages": any(grant.package for grant in policy.grant),
        "processes": policy.processes,
        "user": policy.user,
        "home": home,
        "output_max": policy.limits.output_max,
        "mime_max": _MIME_MAX,
        "cwd": "/workspace",
        "generated": GENERATED if own else None,
    }
