"""The plan in bubblewrap's words, bwrap(1).

"The level of protection between the sandboxed processes and the host system is entirely determined
by the arguments passed to bubblewrap" (its README): this list is the boundary, and its tests
compare it whole. File descriptors have fixed numbers, so that the list stays a pure function: the
broker puts each file in its slot before it becomes bwrap.
"""

from collections.abc import Callable

from sbx.isolation.plan import (
    INSIDE_GID,
    INSIDE_UID,
    WORKSPACE,
    LaunchPlan,
    Mount,
    Symlink,
    Tmpfs,
)
from sbx.isolation.slots import DATA_FD, FILTER_FD, INFO_FD

_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")


def bwrap_argv(plan: LaunchPlan, staged: Callable[[int], str]) -> list[str]:
    """The options of one launch, to be handed over by --args, so that no process listing has them.

    `staged(i)` is where the broker will have bound the source of the i-th mount, if that mount is
    marked so. The order:

    1. namespaces, and a second user namespace inside which no further one can be made;
    2. the mounts of the plan over an empty tmpfs; /proc and /dev come before what lies on them;
    3. the synthetic /etc, and /sandbox/workspace for code that expects it there;
    4. the root and /dev read-only, once everything is in place;
    5. environment, directory, the filter that holds from the first instruction of the guest.
    """
    argv = [f"--unshare-{name}" for name in _NAMESPACES]
    argv += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_GID), "--hostname", "sandbox"]
    if "--disable-userns" in plan.options:
        argv.append("--disable-userns")
    argv += ["--die-with-parent", "--as-pid-1", "--new-session"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for index, mount in enumerate(plan.mounts):
        argv += _mount(mount, staged(index))
    for index, file in enumerate(plan.files):
        argv += ["--perms", "0444", "--file", str(DATA_FD + index), file.target]
    argv += ["--dir", "/sandbox", "--symlink", WORKSPACE, "/sandbox/workspace"]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/"]
    argv.append("--clearenv")
    for name, value in plan.environment:
        argv += ["--setenv", name, value]
    argv += ["--chdir", "/", "--info-fd", str(INFO_FD), "--seccomp", str(FILTER_FD)]
    return argv


def _mount(mount: Mount, stage: str) -> list[str]:
    if isinstance(mount, Symlink):
        return ["--symlink", mount.points_to, mount.target]
    if isinstance(mount, Tmpfs):
        return ["--perms", mount.mode, "--size", str(mount.size), "--tmpfs", mount.target]
    verb = ("--bind" if mount.writable else "--ro-bind") + ("-try" if mount.optional else "")
    return [verb, stage if mount.staged else mount.source, mount.target]
