"""The cgroup controllers that this process may use, and the reasons for missing ones.

    /proc/self/cgroup, mountinfo ──locate──► Layout ──look──► Facts ──decide──► CgroupCapabilities

`locate`, `decide` and `scope_command` are pure. Controllers go by the words of a policy: memory,
tasks (the kernel's pids), cpu, io (v1: blkio). cgroups(7), proc(5), systemd-run(1)
"""

import os
from collections.abc import Collection
from typing import NamedTuple

from sbx.isolation.cgroups import controlfile

CONTROLLERS = ("memory", "tasks", "cpu", "io")
V1_NAMES = {"memory": "memory", "tasks": "pids", "cpu": "cpu", "io": "blkio"}
V2_NAMES = {"memory": "memory", "tasks": "pids", "cpu": "cpu", "io": "io"}

RUNTIME_PREFIX = "sbx-"
LEAF = "sup"  # below a runtime's group on v2: where its broker lives

DELEGATE = (
    "put 'Delegate=cpu cpuset io memory pids' under [Service] in"
    " /etc/systemd/system/user@.service.d/delegate.conf, run 'systemctl daemon-reload'"
    " and log in again"
)


class Missing(NamedTuple):
    """The reason why a controller is not available, and the remedy, in one sentence each."""

    cause: str
    remedy: str


class CgroupCapabilities(NamedTuple):
    """The capabilities of this process. `controllers` maps each limit of a policy to the directory
    of the process's own group; `missing` has the limits that are not available."""

    version: int  # 2, 1, or 0 without cgroups
    controllers: dict[str, str]
    missing: dict[str, Missing]
    cpuacct: str | None = None  # v1: the own group where CPU time is counted
    members: tuple[int, ...] = ()  # v2: processes in the own group, the caller too
    at_root: bool = False  # v2: the own group is the machine's root, which may hold processes
    scope: tuple[str, ...] | None = None  # starts a command in a separate scope, by systemd

    def without(self, controller: str, missing: Missing) -> "CgroupCapabilities":
        left = {name: path for name, path in self.controllers.items() if name != controller}
        return self._replace(controllers=left, missing={**self.missing, controller: missing})

    def without_all(self, cause: str) -> "CgroupCapabilities":
        why = Missing(cause, own_scope(self.scope))
        lost = dict.fromkeys(self.controllers, why)
        return self._replace(controllers={}, cpuacct=None, missing={**self.missing, **lost})


class OwnCgroup(NamedTuple):
    path: str
    read_only: bool


class Layout(NamedTuple):
    """The places of the trees. v2 has one place for all controllers, v1 also a cpuacct."""

    version: int
    places: dict[str, OwnCgroup]


class CgroupFacts(NamedTuple):
    uid: int
    writable: frozenset[str] = frozenset()  # places where groups may be made and processes moved
    controllers: frozenset[str] = (
        frozenset()
    )  # v2: the controllers that the own group may hand down
    members: tuple[int, ...] = ()
    at_root: bool = False
    container: bool = False
    scope: tuple[str, ...] | None = None


def probe() -> CgroupCapabilities:
    """Return the capabilities of this process. Only read: create and move nothing."""
    layout = locate(_read_or_empty("/proc/self/cgroup"), _read_or_empty("/proc/self/mountinfo"))
    return decide(layout, look(layout))


def scope_command(
    capabilities: CgroupCapabilities, movable: Collection[int] = ()
) -> list[str] | None:
    """Return the command prefix that starts the broker in a group where it can limit memory, tasks
    and CPU; None if it needs no prefix, or without systemd.

    `movable`: processes of the own group that the broker may move along, as in `open_hierarchy`.
    By default the program that embeds sbx is not among them, so the broker gets a scope. The prefix
    can fail (status 1, for example without a reachable D-Bus): then start the broker without it. A
    scope is outside of the limits of the service; only those of the slice hold.
    """
    if capabilities.version != 2 or capabilities.scope is None:
        return None
    needed = {"memory", "tasks", "cpu"}
    alone = capabilities.at_root or set(capabilities.members) <= set(movable)
    if alone and needed <= capabilities.controllers.keys():
        return None
    return list(capabilities.scope)


def locate(cgroup: str, mountinfo: str) -> Layout:
    """Return the version with the memory and tasks controllers: a hybrid host has the unified tree,
    but v1 has the controllers. `cgroup` and `mountinfo` are the texts in /proc/self."""
    own = _own_paths(cgroup)
    v1: dict[str, OwnCgroup] = {}
    v2: OwnCgroup | None = None
    for mount in mountinfo.splitlines():
        fields, _, rest = mount.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, point, flags = fields.split(" ")[3:6]
        read_only = "ro" in flags.split(",") or "ro" in options.split(",")
        if kind == "cgroup2":
            path = _below(point, root, own.get(""))
            v2 = OwnCgroup(_without_leaf(path), read_only) if path else v2
        elif kind == "cgroup":
            for word, name in {**V1_NAMES, "cpuacct": "cpuacct"}.items():
                if name in options.split(",") and (path := _below(point, root, own.get(name))):
                    v1[word] = OwnCgroup(path, read_only)
    if "memory" in v1 or "tasks" in v1:
        return Layout(1, v1)
    return Layout(2, dict.fromkeys(CONTROLLERS, v2)) if v2 else Layout(0, {})


def look(layout: Layout) -> CgroupFacts:
    uid = os.geteuid()
    paths = {place.path for place in layout.places.values()}
    writable = frozenset(path for path in paths if _is_writable(path, layout.version))
    facts = CgroupFacts(uid, writable, container=_in_container())
    if layout.version != 2:
        return facts
    (path,) = paths
    return facts._replace(
        controllers=frozenset(
            (controlfile.read_optional(f"{path}/cgroup.controllers") or "").split()
        ),
        members=tuple(controlfile.pids(path)),
        at_root=not os.path.exists(f"{path}/cgroup.events"),  # every other group has this file
        scope=systemd_scope(uid),
    )


def decide(layout: Layout, facts: CgroupFacts) -> CgroupCapabilities:
    """Return the available controllers, and a cause and a remedy for each missing one."""
    available: dict[str, str] = {}
    missing: dict[str, Missing] = {}
    for controller in CONTROLLERS:
        why = _why_missing(controller, layout, facts)
        if why is None:
            available[controller] = layout.places[controller].path
        else:
            missing[controller] = why
    cpuacct = layout.places.get("cpuacct")
    return CgroupCapabilities(
        layout.version,
        available,
        missing,
        cpuacct=cpuacct.path if cpuacct and cpuacct.path in facts.writable else None,
        members=facts.members,
        at_root=facts.at_root,
        scope=facts.scope,
    )


def _why_missing(controller: str, layout: Layout, facts: CgroupFacts) -> Missing | None:
    if layout.version == 0:
        return Missing(
            "no cgroup file system that shows this process's own group is mounted",
            "mount one: mount -t cgroup2 none /sys/fs/cgroup",
        )
    if (place := layout.places.get(controller)) is None:
        name = V1_NAMES[controller]
        return Missing(
            f"the {name} controller of cgroup v1 is not mounted",
            f"mount it: mount -t cgroup -o {name} none /sys/fs/cgroup/{name}",
        )
    if place.read_only:
        where = " (as in a container)" if facts.container else ""
        return Missing(
            f"{place.path} is mounted read-only{where}",
            "start the container with its cgroups writable: docker run --privileged, or"
            " podman run --systemd=always"
            if facts.container
            else "remount it read-write",
        )
    if layout.version == 1:
        return _why_missing_v1(place, facts)
    return _why_missing_v2(controller, place, facts)


def _why_missing_v1(place: OwnCgroup, facts: CgroupFacts) -> Missing | None:
    if place.path in facts.writable:
        return None
    return Missing(
        f"this host has cgroup v1, where uid {facts.uid} may not make groups in {place.path}",
        "start sbx as root, or boot the host with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
    )


def _why_missing_v2(controller: str, place: OwnCgroup, facts: CgroupFacts) -> Missing | None:
    if place.path not in facts.writable:
        return Missing(f"{place.path} is not delegated to uid {facts.uid}", own_scope(facts.scope))
    name = V2_NAMES[controller]
    if name in facts.controllers:
        return None
    cause = f"the {name} controller is not handed down to {place.path}"
    return Missing(cause, handing_down(name, facts.uid))


def handing_down(name: str, uid: int) -> str:
    """Return the remedy for an own group without a controller."""
    if uid != 0:
        return DELEGATE
    return (
        "enable it in cgroup.subtree_control of every group above; a linux that has it nowhere may"
        f" want cgroup_enable={name} at boot"
    )


def own_scope(scope: tuple[str, ...] | None) -> str:
    """Return the remedy for a missing own group. The broker has asked systemd for one, if it runs.
    The group of the program that embeds sbx cannot be used."""
    if scope is None:
        return (
            "run sbx where systemd can give it a scope; a user who is not logged in there needs"
            " 'loginctl enable-linger'"
        )
    user = "--user " if "--user" in scope else ""
    return (
        "systemd gave no scope; to see its reason, run:"
        f" systemd-run {user}--scope -p Delegate=yes true"
    )


def _own_paths(cgroup: str) -> dict[str, str]:
    """Return the path of the own group for each controller of v1, and for "", which is v2."""
    own = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    return own


def _below(point: str, root: str, own: str | None) -> str | None:
    """Where a mount shows the own group. `root` is what of the tree is mounted at `point`; both
    paths are relative to the cgroup namespace, and ``/..`` is outside of it."""
    if own is None or own.startswith("/.."):
        return None
    root, own = root.rstrip("/"), own.rstrip("/")
    if own != root and not own.startswith(root + "/"):
        return None
    return _unescaped(point) + own.removeprefix(root)


def _unescaped(text: str) -> str:
    """Decode blank, tab, newline and backslash, which mountinfo writes in octal."""
    for code in ("040", "011", "012", "134"):
        text = text.replace("\\" + code, chr(int(code, 8)))
    return text


def _without_leaf(path: str) -> str:
    """Return the group above the leaf of a broker that moved this process. Otherwise every further
    runtime of the process would be one level deeper."""
    runtime, _, leaf = path.rpartition("/")
    base, _, name = runtime.rpartition("/")
    return base if leaf == LEAF and name.startswith(RUNTIME_PREFIX) else path


def _is_writable(path: str, version: int) -> bool:
    names = ["", "/cgroup.procs"] + (["/cgroup.subtree_control"] if version == 2 else [])
    return all(os.access(path + name, os.W_OK, effective_ids=True) for name in names)


def _in_container() -> bool:
    return "container" in os.environ or any(
        os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv")
    )


def systemd_scope(uid: int, root: str = "") -> tuple[str, ...] | None:
    """Return the words by which systemd starts a command in a scope; None where it does not run.
    `root` is put before the paths of the host."""
    places = (f"{root}/usr/bin/systemd-run", f"{root}/bin/systemd-run")
    program = next((path for path in places if os.path.exists(path)), None)
    if program is None or not os.path.isdir(f"{root}/run/systemd/system"):
        return None
    options = ("--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")
    if uid == 0:
        return (program, *options)
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR") or f"{root}/run/user/{uid}"
    if not os.path.exists(f"{runtime_dir}/bus"):
        return None
    # Without the variable systemd-run finds no bus, and a broker is started with few of them
    return ("/usr/bin/env", f"XDG_RUNTIME_DIR={runtime_dir}", program, "--user", *options)


def _read_or_empty(path: str) -> str:
    try:
        return controlfile.read(path)
    except OSError:
        return ""  # no /proc, or a kernel without cgroups
