"""Translate a plan to the arguments of bubblewrap, bwrap(1).

"The level of protection between the sandboxed processes and the host system is entirely determined
by the arguments passed to bubblewrap" (its README): this list is the boundary, and its tests
compare it whole. File descriptors have fixed numbers, so that these functions stay pure: the broker
puts each file in its slot before it becomes bwrap.
"""

import os
from collections.abc import Callable, Sequence

from sbx.guest.granted_packages import TOP
from sbx.guest.machine import MEMINFO
from sbx.guest.shares import KEYS
from sbx.isolation.broker.bind_staging import DEVPTS
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

_COVERED = tuple(filter(os.path.exists, KEYS))  # CONFIG_KEYS


def bwrap_argv(plan: LaunchPlan, staged: Callable[[int | str], str]) -> list[str]:
    """Return the options of one launch. They are passed by --args, so no process listing has them.

    `staged(i)` is the place at which the broker binds the source of the i-th mount, if that mount
    is staged. The order:

    1. namespaces, and a second user namespace inside which no further one can be made;
    2. the mounts of the plan over an empty tmpfs; /proc and /dev come before the mounts on them; a
       devpts of the broker covers the one of --dev, which has no limit, and /dev/null the lists of
       keys, which name those of the user if the jail has the user's uid. A zygote does not cover
       them: its forks may mount their own proc(5) only while they see a complete one;
    3. the synthetic /etc, and /sandbox/workspace for code that expects this path;
    4. the root and /dev read-only, once everything is in place;
    5. environment, directory, the filter that holds from the first instruction of the guest.
    """
    argv = [f"--unshare-{name}" for name in _NAMESPACES]
    argv += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_GID)]
    if "--disable-userns" in plan.options:
        argv.append("--disable-userns")
    covers = [word for path in _COVERED for word in ("--dev-bind", "/dev/null", path)]
    if plan.staged_devpts:
        covers += ["--dev-bind", staged(DEVPTS), "/dev/pts"]
    argv += _view((*plan.mounts, *plan.own_mounts), plan.files, staged, covers=covers)
    argv += _last(plan.environment)
    argv += ["--seccomp", str(FILTER_FD)]
    return argv


def zygote_argv(plan: ZygotePlan, staged: Callable[[int | str], str]) -> list[str]:
    """Return the options of a zygote: the same view without user files, and no filter yet.

    Its user namespace exists already, with room for the uids of all sandboxes. There the zygote
    keeps the capabilities to give each jail its own namespaces, mounts and uid. Its forks give them
    up before they see a user's file.
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
    covers: Sequence[str] = (),
) -> list[str]:
    argv = ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--new-session"]
    argv += ["--proc", "/proc", "--dev", "/dev", *covers]
    created: set[str] = set()
    for index, mount in enumerate(mounts):
        for path in _above(mount.target):
            if path not in created:
                argv += ["--perms", "0755", "--dir", path]
                created.add(path)
        argv += _mount(mount, staged(index))
    for point in mount_points:
        for path in (*_above(point), point):
            if path not in created:
                argv += ["--perms", "0755", "--dir", path]
                created.add(path)
    for index, file in enumerate(files):
        fd = str(DATA_FD + index)
        if file.target == MEMINFO:  # PID 1 writes it
            argv += ["--perms", "0644", "--bind-data", fd, file.target]
        else:
            argv += ["--perms", "0444", "--file", fd, file.target]
    argv += ["--dir", "/sandbox", "--symlink", WORKSPACE, "/sandbox/workspace"]
    argv += ["--perms", "0755", "--dir", TOP]  # where `live_mounts` may mount later
    argv += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return argv


def _above(target: str) -> list[str]:
    """Return the directories above a mount. All users must be able to walk through them: bubblewrap
    would create them for their owner, which is the zygote and not its forks."""
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
