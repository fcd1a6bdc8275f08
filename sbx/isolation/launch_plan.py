"""The values that describe one launch: the paths that go in, and the plan that comes out.

`plan` builds a plan, `argv` translates it to bubblewrap arguments, and `broker` executes it.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

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


class Interpreter(Struct, frozen=True):
    """A Python on the host: its executable, and the directories that it needs.

    `links` are (path, target) of symlinks outside of these, between the executable and the real
    one. They are created again inside, because the directory around them may be a user's home.
    """

    executable: str
    prefixes: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()


class WayOut(Struct, frozen=True):
    """The directory of the host with `egress.sock` of a sandbox's proxy and, with `certificates`,
    the ones to trust inside. `environment` has the placeholders of secrets."""

    directory: str
    certificates: bool = False
    environment: tuple[tuple[str, str], ...] = ()


class GuardPaths(Struct, frozen=True):
    """For a workspace that is a directory of the host: the directory of its quarantine, with the
    rules of the guard. `looked_at_most`: the number of entries at which the search for the targets
    of host executables ended early."""

    quarantine: str
    looked_at_most: int | None = None


class Paths(Struct, frozen=True):
    """The directories of the host for one jail. `guest` has the package `sbx`; `disk` is the wall
    that limits the files. `mapped`: an idmapped mount shows the files of another host uid."""

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


class Bind(Struct, frozen=True):
    """A host path inside a jail.

    `staged`: the jail's host uid may be unable to reach the source (below root's home), so a root
    broker first binds it to a reachable place. `mapped`: an idmapped mount shows the owner of the
    workspace as the jail's uid.
    """

    source: str
    target: str
    writable: bool = False
    optional: bool = False
    staged: bool = False
    mapped: bool = False


class Tmpfs(Struct, frozen=True):
    target: str
    size: int
    mode: str = "1777"


class Symlink(Struct, frozen=True):
    target: str
    points_to: str


Mount = Bind | Tmpfs | Symlink


class DataFile(Struct, frozen=True):
    """A small read-only file for the jail: the synthetic /etc."""

    target: str
    content: str


class Wall(Struct, frozen=True):
    """One limit or layer: the demand of the policy, and the means that enforces it here."""

    name: str
    demanded: str
    means: str
    weaker: bool = False


class GroupLimits(Struct, frozen=True):
    """The limits of the sandbox's cgroup; None is unlimited. Bytes, tasks, cpus, `IoLimit`s."""

    memory_max: int | None
    tasks_max: int | None
    cpu_quota: float | None
    io: tuple[tuple[str, int | None, int | None], ...] = ()


class Seal(Struct, frozen=True):
    """The restrictions that the guest applies to itself before it reads anything of the user.

    Every process loads `jail_filter` in addition to the filter of the plan, and the kernel also
    `kernel_filter`, with a Landlock domain in which files can be created only below `files_only`.
    `guarded` is read-only except for the path guard, whose configuration is `guard`. The kernel and
    the commands load `last_filter` after all else; PID 1 does not, because it makes the domains of
    the commands, and its relay connects to the proxy's socket. Below `connect`, Landlock (ABI 9)
    allows connections to all Unix sockets; elsewhere only to those that were created in the jail.
    `machine` has the limits for `sbx.guest.machine`.
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
    last_filter: Filter | None = None
    machine: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        seal = asdict(self)
        for name in ("kernel_filter", "jail_filter", "last_filter"):
            seal[name] = seal[name] and seal[name].program.hex()
        return {**seal, "rlimits": dict(self.rlimits)}


class LaunchPlan(Struct, frozen=True):
    """Everything that one launch needs.

    `mounts` are common to all jails of the policy, `own_mounts` belong to this one. Both are in the
    order of their creation. With a `way_out` PID 1 listens on the loopback and relays to the proxy.
    With `staged_devpts` the broker mounts a limited devpts for bubblewrap to bind.
    `host_directories` are the paths inside of directories of the host that may have sockets and
    FIFOs of the host. With `masks` they are covered before code runs.
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


class ZygotePlan(Struct, frozen=True):
    """The common parts of all jails of one zygote: equal plans may share one.

    It has nothing of a conversation. A jail gets its files, variables and limits when it enters a
    sandbox.
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
        """Return the mounts of which each jail has its own instance."""
        return tuple(mount for mount in self.mounts if isinstance(mount, Tmpfs))
