"""The plan in bubblewrap's words, bwrap(1).

"The level of protection between the sandboxed processes and the host system is entirely determined
by the arguments passed to bubblewrap" (its README): this list is the boundary, and its tests
compare it whole. File descriptors have fixed numbers, so that the list stays a pure function: the
broker puts each file in its slot before it becomes bwrap.
"""

from collections.abc import Callable, Sequence

from sbx.isolation.broker.bind_staging import DEVPTS
from sbx.isolation.broker.live_mounts import TOP
from sbx.isolation.broker.spawn import DATA_FD, FILTER_FD, INFO_FD, USERNS_FD
from sbx.isolation.launch_plan import (
    INSIDE_GID,
    INSIDE_UID,
    WORKSPACE,
    DataFile,
    LaunchPlan,
    Mount,
    Symlink,
    Tmpfs,
    ZygotePlan,
)

_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
_ZYGOTE_CAPABILITIES = (
    "CAP_SYS_ADMIN",  # namespaces and mounts
    "CAP_SYS_CHROOT",  # to join a mount namespace
    "CAP_SETUID",  # the sandbox's uid and gid
    "CAP_SETGID",
    "CAP_NET_ADMIN",  # a loopback that is up
    "CAP_CHOWN",  # a /tmp that belongs to the sandbox's uid
)


def bwrap_argv(plan: LaunchPlan, staged: Callable[[int | str], str]) -> list[str]:
    """The options of one launch, to be handed over by --args, so that no process listing has them.

    `staged(i)` is where the broker will have bound the source of the i-th mount, if that mount is
    marked so. The order:

    1. namespaces, and a second user namespace inside which no further one can be made;
    2. the mounts of the plan over an empty tmpfs; /proc and /dev come before what lies on them; a
       devpts of the broker covers the one of --dev, which has no limit;
    3. the synthetic /etc, and /sandbox/workspace for code that expects it there;
    4. the root and /dev read-only, once everything is in place;
    5. environment, directory, the filter that holds from the first instruction of the guest.
    """
    argv = [f"--unshare-{name}" for name in _NAMESPACES]
    argv += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_GID)]
    if "--disable-userns" in plan.options:
        argv.append("--disable-userns")
    pts = ["--dev-bind", staged(DEVPTS), "/dev/pts"] if plan.staged_devpts else []
    argv += _view((*plan.mounts, *plan.own_mounts), plan.files, staged, pts=pts)
    argv += _last(plan.environment)
    argv += ["--seccomp", str(FILTER_FD)]
    return argv


def zygote_argv(plan: ZygotePlan, staged: Callable[[int | str], str]) -> list[str]:
    """The options of a zygote: the same view without the files of anybody, and no filter yet.

    Its user namespace was made before, so that it can have room for the uids of all sandboxes;
    there the zygote keeps what it takes to give each jail namespaces, mounts and a uid of its own.
    What is forked from it gives all of this up before it sees a user's file.
    """
    argv = [f"--unshare-{name}" for name in _NAMESPACES if name != "user"]
    argv += ["--userns", str(USERNS_FD)]
    for capability in _ZYGOTE_CAPABILITIES:
        argv += ["--cap-add", capability]
    argv += _view(plan.mounts, plan.files, staged, plan.mount_points)
    argv += _last(plan.environment)
    return argv


def _view(
    mounts: Sequence[Mount],
    files: Sequence[DataFile],
    staged: Callable[[int | str], str],
    mount_points: Sequence[str] = (),
    pts: Sequence[str] = (),
) -> list[str]:
    argv = ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--new-session"]
    argv += ["--proc", "/proc", "--dev", "/dev", *pts]
    made: set[str] = set()
    for index, mount in enumerate(mounts):
        for path in _above(mount.target):
            if path not in made:
                argv += ["--perms", "0755", "--dir", path]
                made.add(path)
        argv += _mount(mount, staged(index))
    for point in mount_points:
        for path in (*_above(point), point):
            if path not in made:
                argv += ["--perms", "0755", "--dir", path]
                made.add(path)
    for index, file in enumerate(files):
        argv += ["--perms", "0444", "--file", str(DATA_FD + index), file.target]
    argv += ["--dir", "/sandbox", "--symlink", WORKSPACE, "/sandbox/workspace"]
    argv += ["--perms", "0755", "--dir", TOP]  # where `attaching` may mount later
    argv += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return argv


def _above(target: str) -> list[str]:
    """The directories on the way to a mount, to be made for anyone to walk through: bubblewrap
    makes them for their owner alone, who is the zygote and not a jail that is forked from it."""
    parts = target.split("/")[1:-1]
    return ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _last(environment: Sequence[tuple[str, str]]) -> list[str]:
    argv = ["--clearenv"]
    for name, value in environment:
        argv += ["--setenv", name, value]
    argv += ["--chdir", "/", "--info-fd", str(INFO_FD)]
    return argv


def _mount(mount: Mount, stage: str) -> list[str]:
    if isinstance(mount, Symlink):
        return ["--symlink", mount.points_to, mount.target]
    if isinstance(mount, Tmpfs):
        return ["--perms", mount.mode, "--size", str(mount.size), "--tmpfs", mount.target]
    verb = ("--bind" if mount.writable else "--ro-bind") + ("-try" if mount.optional else "")
    return [verb, stage if mount.staged else mount.source, mount.target]
