"""The values that describe one launch: the paths that go in, and the plan that comes out.

`plan` builds a plan, `argv` translates it to bubblewrap arguments, and `broker` executes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sbx.isolation.seccomp import Filter

INSIDE_UID = 1000


INSIDE_GID = 1000


GUEST = "/opt/sbx"


WORKSPACE = "/workspace"


TEMPAREA = f"{WORKSPACE}/uploads/temparea"


UPLOADS_BESIDE_A_HOST_DIRECTORY = "/uploads"


HOME_BESIDE_A_HOST_DIRECTORY = "/home/sandbox"


WAY_OUT = "/run/sbx"


CERTIFICATES = "certificates.pem"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python on the host: its executable, and the directories without which it does not run.

    `links` are (path, target) of symlinks between the executable and the real one that lie outside
    of these: each is made anew inside, because the directory around it may be somebody's home.
    """

    executable: str
    prefixes: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WayOut:
    """Where the proxy of one sandbox listens: a directory of the host that holds `egress.sock`,
    and with `certificates` the ones to trust inside. `environment`: placeholders of secrets."""

    directory: str
    certificates: bool = False
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class GuardPaths:
    """Where the workspace is a directory of the host: the directory of its quarantine, in which
    the guard finds its rules. `looked_at_most`: the number of entries after which the search for
    the targets of host executables was cut off."""

    quarantine: str
    looked_at_most: int | None = None


@dataclass(frozen=True, slots=True)
class Paths:
    """The host's directories that one jail is shown. `guest` holds the package `sbx`; `disk` is by
    which means the files keep to their size. `mapped`: the files belong to another host uid than
    the jail's, and are shown through an idmapped mount."""

    files: str
    uploads: str
    interpreter: Interpreter
    guest: str
    shared: str | None = None
    shared_read_only: bool = False
    host_directory: bool = False
    guard: "GuardPaths | None" = None
    host_uploads: bool = False
    disk: "Wall | None" = None
    way_out: WayOut | None = None
    mapped: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path shown inside.

    `staged`: the source may lie where the jail's host uid cannot walk (an interpreter or a data
    directory under root's home), so a root broker first binds it to a place that anyone can reach.
    `mapped`: through an idmapped mount, which shows the owner of the workspace as the jail's uid.
    """

    source: str
    target: str
    writable: bool = False
    optional: bool = False
    staged: bool = False
    mapped: bool = False


@dataclass(frozen=True, slots=True)
class Tmpfs:
    target: str
    size: int
    mode: str = "1777"


@dataclass(frozen=True, slots=True)
class Symlink:
    target: str
    points_to: str


Mount = Bind | Tmpfs | Symlink


@dataclass(frozen=True, slots=True)
class DataFile:
    """A small read-only file made for the jail: the synthetic /etc."""

    target: str
    content: str


@dataclass(frozen=True, slots=True)
class Wall:
    """One limit or layer: what the policy demands, and by which means it stands here."""

    name: str
    demanded: str
    means: str
    weaker: bool = False


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the sandbox's cgroup gets; None is no limit. Bytes, tasks, cpus; `io` as `IoLimit`."""

    memory_max: int | None
    tasks_max: int | None
    cpu_quota: float | None
    io: tuple[tuple[str, int | None, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Seal:
    """What the guest does to itself before it looks at anything of the user's, in plain data.

    `jail_filter` comes on top of the plan's own in every process, `kernel_filter` on that in the
    kernel, with a Landlock domain to match: `files_only` names where files can be made then.
    `guarded` can be read only, but for what the path guard does; `guard` is what that is told.
    `unix_filter` is for the kernel and the commands, and not for PID 1, whose relay connects to the
    proxy's socket. Below the paths of `connect` any Unix socket may be connected to, where Landlock
    has a rule for that (ABI 9); elsewhere only one that was made in the jail.
    """

    landlock: bool
    read: tuple[str, ...]
    write: tuple[str, ...]
    devices: tuple[str, ...]
    rlimits: tuple[tuple[str, int], ...]
    kernel_filter: Filter | None
    jail_filter: Filter | None = None
    files_only: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    guard: Mapping[str, Any] | None = None
    connect: tuple[str, ...] = ()
    unix_filter: Filter | None = None

    def to_json(self) -> dict[str, Any]:
        seal = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("kernel_filter", "jail_filter", "unix_filter"):
            seal[name] = seal[name] and seal[name].program.hex()
        return {**seal, "rlimits": dict(self.rlimits)}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything one launch needs.

    `mounts` are what every jail of the policy is shown and `own_mounts` what this one is, each in
    the order in which they are made: the system first, then the files of the conversation on it.
    With a `way_out` PID 1 listens on the loopback for what is to go to the proxy. With
    `staged_devpts` the broker mounts a devpts that is limited, for bubblewrap to bind.
    `host_directories` are directories of the host, by their path inside, that may hold its sockets
    and FIFOs; with `masks` each of these is covered before code runs. `unix_sockets` is what the
    policy says of them.
    """

    bwrap: str
    options: frozenset[str]
    mounts: tuple[Mount, ...]
    own_mounts: tuple[Bind, ...]
    files: tuple[DataFile, ...]
    environment: tuple[tuple[str, str], ...]
    command: tuple[str, ...]
    filter: Filter
    seal: Seal
    walls: tuple[Wall, ...]
    network: str = "none"
    writable_home: str = field(default=WORKSPACE)
    way_out: bool = False
    staged_devpts: bool = False
    host_directories: tuple[str, ...] = ()
    masks: bool = False
    unix_sockets: str = "own"


@dataclass(frozen=True, slots=True)
class ZygotePlan:
    """What all jails forked from one zygote have in common: plans that are equal may share one.

    Nothing of a conversation is in it, and of a request only what it gave up. Files and variables
    of the jail's own, sizes and limits come when the jail is entered.
    """

    bwrap: str
    mounts: tuple[Mount, ...]
    mount_points: tuple[str, ...]
    files: tuple[DataFile, ...]
    environment: tuple[tuple[str, str], ...]
    command: tuple[str, ...]
    preload: tuple[str, ...]

    @property
    def tmpfs(self) -> tuple[Tmpfs, ...]:
        """What each jail has of its own in place of the zygote's."""
        return tuple(mount for mount in self.mounts if isinstance(mount, Tmpfs))
