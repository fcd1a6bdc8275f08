"""Decide: policy + capabilities of the host + paths → everything that one launch needs, as a value.

Pure: reads no file and no clock. `argv.bwrap_argv` translates the plan for bubblewrap, and `broker`
executes it. A `hard` wall that this host cannot enforce is refused here, before anything starts. A
`best-effort` wall uses the next weaker means, which the plan and the receipt name.
"""

import math
from collections.abc import Mapping
from typing import Any

from sbx.errors import CannotEnforce
from sbx.guest.guarded_paths import ITEMS, QUARANTINE
from sbx.guest.machine import MEMINFO
from sbx.guest.machine import TOP as MACHINE
from sbx.isolation.launch_plan import (
    CERTIFICATES,
    GUEST,
    HOME_BESIDE_A_HOST_DIRECTORY,
    INSIDE_GID,
    INSIDE_UID,
    TEMPAREA,
    UPLOADS_BESIDE_A_HOST_DIRECTORY,
    WAY_OUT,
    WORKSPACE,
    Bind,
    DataFile,
    Interpreter,
    LaunchPlan,
    Mount,
    Paths,
    Seal,
    Symlink,
    Tmpfs,
    Wall,
    WayOut,
    ZygotePlan,
)
from sbx.isolation.probe import Capabilities, Layer
from sbx.isolation.seccomp import Filters as Filters
from sbx.policy import Policy, destinations

_PROXY = "http://127.0.0.1:3128"
_NO_PROXY = ("localhost", "127.0.0.1", "::1")  # the jail itself, unless the policy lists them
_HOME_SIZE = 64 << 20
_MACHINE_SIZE = 256 << 10
_WEAKER_DATA_FACTOR = 2  # RLIMIT_DATA counts reserved stacks too: at 1 it stops 60 idle threads
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
HOME_LINK = "/home/user"  # where code that was written for other sandboxes expects its files
_OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")  # as every distribution has it
# The settings of a user and of a repository replace those of the system. Git refuses a repository
# of another user, and a mounted directory has another owner inside.
_GITCONFIG = """\
[user]
\tname = sandbox
\temail = sandbox@localhost
[safe]
\tdirectory = *
"""
_SIGPENDING = 1024
_MEMLOCK = 8 << 20
_MSGQUEUE = 800 << 10  # as Linux has it by default; the host may have raised it
# Linux compares the descriptors that a user has in flight (SCM_RIGHTS) with the limit of the
# sender, and one more message of 253 passes. So a jail reaches 765. Host programs may reach 1,024.
_SHARED_UID_OPEN_FILES = 512


def plan(policy: Policy, capabilities: Capabilities, paths: Paths, filters: Filters) -> LaunchPlan:
    """Return the plan of one jail. Raise CannotEnforce for the first hard wall that is missing."""
    walls = decide_walls(policy, capabilities)
    weaker = {wall.name for wall in walls if wall.weaker}
    assert capabilities.bwrap is not None  # decide_walls refused otherwise
    home = HOME_BESIDE_A_HOST_DIRECTORY if paths.host_directory else WORKSPACE
    own_home = (home,) if paths.host_directory else ()
    shown = _shown_of_host(policy, paths)
    files_only = (WORKSPACE, "/tmp", *own_home)  # not /dev/shm: it is memory to share
    is_strict = policy.filter == "strict"
    machine = _machine(policy)
    if paths.guard is not None and "landlock" in weaker:
        raise _cannot(capabilities.layer("landlock"), "landlock", "the path guard")
    return LaunchPlan(
        bwrap=capabilities.bwrap,
        options=capabilities.bwrap_options,
        mounts=_mounts(policy, paths, staged=capabilities.root),
        own_mounts=_own_mounts(paths, staged=capabilities.root),
        files=(*_etc(policy, home), *((DataFile(MEMINFO, ""),) if machine else ())),
        environment=_environment(policy, paths.interpreter, home, paths.way_out),
        command=_command(paths.interpreter, "start/cold"),
        filter=filters.default,
        seal=Seal(
            landlock="landlock" not in weaker,
            read=("/",),
            write=(WORKSPACE if paths.guard is None else ITEMS, "/tmp", "/dev/shm", *own_home),
            devices=tuple(f"/dev/{name}" for name in _DEVICES),
            rlimits=_rlimits(
                policy, weaker, own_uid=capabilities.root and not paths.host_directory
            ),
            kernel_filter=filters.strict if is_strict else None,
            jail_filter=filters.allowlist if policy.filter != "default" else None,
            files_only=files_only if is_strict and "landlock" not in weaker else (),
            guarded=() if paths.guard is None else (WORKSPACE,),
            guard=_guard(policy, paths, filters),
            connect=_connectable(policy, paths, own_home),
            last_filter=filters.no_unix if policy.unix_sockets == "none" else filters.last,
            machine=machine,
        ),
        walls=(*walls, *_walls_of_files(policy, paths)),
        network=_network(policy),
        writable_home=home,
        way_out=paths.way_out is not None,
        staged_devpts=capabilities.own_namespaces,
        host_directories=shown,
        masks=bool(shown) and policy.unix_sockets != "any" and capabilities.own_namespaces,
        unix_sockets=policy.unix_sockets,
    )


def _machine(policy: Policy) -> Mapping[str, Any] | None:
    """Return the limits that programs read as the size of the machine. None: the policy shows files
    of the host at their place."""
    shown = (*policy.filesystem.read, *(mount.target for mount in policy.filesystem.mount))
    if any(_meets(path, MACHINE) for path in shown):
        return None
    limits = policy.limits
    return {name: getattr(limits, name) for name in ("memory_max", "cpu_quota", "tasks_max")}


def _walls_of_files(policy: Policy, paths: Paths) -> tuple[Wall, ...]:
    """Return the walls that depend on the workspace, for the receipt."""
    walls = (paths.disk,) if paths.disk is not None else ()
    if not paths.host_directory:
        return walls
    demanded = policy.host_executables
    weaker = demanded == "allow"
    if paths.guard is not None:
        means = "the path guard, under Landlock"
        if (most := paths.guard.looked_at_most) is not None:
            means += f"; links from host executables: searched in the first {most} entries only"
            weaker = True
    elif demanded == "allow":
        means = "nothing: the policy allows them"
    else:
        means = "a copy of the directory; its changes are refused by name"
    return (*walls, Wall("host_executables", demanded, means, weaker=weaker))


def _guard(policy: Policy, paths: Paths, filters: Filters) -> Mapping[str, Any] | None:
    """Return the configuration of the path guard, in plain data."""
    if paths.guard is None:
        return None
    # Links into these lead to the same files inside and on the host. Not those into the workspace:
    # the host may have another directory of this name.
    common = (*policy.filesystem.read, *paths.interpreter.prefixes, "/dev/null")
    return {
        "root": WORKSPACE,
        "filter": filters.guard.program.hex(),
        "link_prefixes": common,
        "fifos": policy.filter != "strict",
    }


def zygote_plan(policy: Policy, capabilities: Capabilities, paths: Paths) -> ZygotePlan:
    """Return the plan of the zygote from which the jails of a policy are forked.

    `policy` is the loaded one, without the parts of the file system that a request gave up. The
    jail itself enforces everything else that a request may tighten.
    """
    assert capabilities.bwrap is not None  # decide_walls refused otherwise
    home = HOME_BESIDE_A_HOST_DIRECTORY if paths.host_directory else WORKSPACE
    targets = [bind.target for bind in _own_mounts(paths, staged=False)]
    targets += [WAY_OUT] if policy.network.mode == "proxy" else []
    return ZygotePlan(
        bwrap=capabilities.bwrap,
        mounts=_mounts(policy, paths, staged=capabilities.root),
        mount_points=tuple(
            target for target in dict.fromkeys(targets) if not target.startswith(f"{WORKSPACE}/")
        ),
        files=_etc(policy, home),
        environment=_environment(policy, paths.interpreter, home),
        command=_command(paths.interpreter, "start/zygote"),
        preload=policy.preload,
    )


def decide_walls(policy: Policy, capabilities: Capabilities) -> tuple[Wall, ...]:
    """Return the means of each wall on this host. Raise CannotEnforce for a missing hard wall.

    Namespaces and seccomp have no weaker means, so without them every policy is refused.
    """
    bwrap = capabilities.layer("bwrap")
    if not bwrap.available:
        raise _cannot(bwrap, "bwrap", "namespaces")
    return tuple(
        _decide(name, getattr(policy.walls, name), capabilities, weaker_means)
        for name, weaker_means in _WEAKER_MEANS.items()
        if name != "io" or slows_io(policy)
    )


_WEAKER_MEANS: Mapping[str, str | None] = {
    "namespaces": None,
    "seccomp": None,
    "landlock": "nothing: read-only mounts and seccomp alone",
    "memory": "RLIMIT_DATA a process, and a watcher that sums the jail's memory, tmpfs, System V"
    ", page tables and the queues of sockets, and kills; not counted: the records of mappings, file"
    " locks, extended attributes of a tmpfs, the queues of inotify, pipes and other small objects"
    " of Linux",
    "tasks": "RLIMIT_NPROC in the jail's own user namespace",
    "cpu": "nothing but the wall time of a run",
    "io": "nothing: reads and writes have no limit",
}


def slows_io(policy: Policy) -> bool:
    """Return whether the policy limits io. Without a limit it needs no wall."""
    return min(policy.limits.io_read_max, policy.limits.io_write_max) < math.inf


def _decide(name: str, demanded: str, capabilities: Capabilities, weaker: str | None) -> Wall:
    layer = capabilities.layer(name)
    if layer.available:
        return Wall(name, demanded, layer.detail)
    if demanded == "hard" or weaker is None:
        raise _cannot(layer, name, name)
    return Wall(name, demanded, weaker, weaker=True)


def _cannot(layer: Layer, name: str, wall: str) -> CannotEnforce:
    return CannotEnforce(
        f"the policy demands {wall} as a hard wall and this host cannot give it: {layer.cause}",
        hint=layer.remedy,
        details={"layer": name, "cause": layer.cause, "remedy": layer.remedy},
    )


def _mounts(policy: Policy, paths: Paths, *, staged: bool) -> tuple[Mount, ...]:
    """Return the mounts of all jails of the policy. A later mount covers an earlier one.

    1. The system, read-only; private /tmp and /dev/shm, of limited size, and a home if the
       workspace is a directory of the host.
    2. The interpreter, read-only: after /tmp, because a virtual environment may be there.
    3. Our guest, read-only: exactly the packages that run inside.
    """
    view: list[Mount] = [Bind(path, path, optional=True) for path in policy.filesystem.read]
    view += [
        Tmpfs("/tmp", policy.limits.tmp_size),
        Tmpfs("/dev/shm", policy.limits.shm_size),
    ]
    if _machine(policy) is not None:
        view.append(Tmpfs(MACHINE, _MACHINE_SIZE, "0755"))
    if paths.host_directory:
        view.append(Tmpfs(HOME_BESIDE_A_HOST_DIRECTORY, _HOME_SIZE, "0700"))
    view += [
        Bind(prefix, prefix, staged=staged)
        for prefix in paths.interpreter.prefixes
        if not _is_below_any(prefix, policy.filesystem.read)
    ]
    view += [
        Symlink(path, points_to)
        for path, points_to in (*paths.interpreter.links, _OS_RELEASE)
        if not _is_below_any(path, policy.filesystem.read)
    ]
    if not any(_meets(mount.target, HOME_LINK) for mount in view):
        view.append(Symlink(HOME_LINK, WORKSPACE))
    view += [Bind(mount.source, mount.target, staged=staged) for mount in policy.filesystem.mount]
    view += [
        Bind(f"{paths.guest}/sbx/{part}", f"{GUEST}/sbx/{part}", staged=staged)
        for part in ("__init__.py", "guest", "linux")
    ]
    return tuple(view)


def _meets(path: str, other: str) -> bool:
    """Return whether one of the paths is the other, or lies below it."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def _own_mounts(paths: Paths, *, staged: bool) -> tuple[Bind, ...]:
    """Return the mounts of this conversation.

    1. The workspace. `uploads` is bound onto itself, because code inside cannot rename or replace a
       mount point, and on it the uploads, read-only. With a host directory, the uploads are at
       /uploads: that directory must stay unpinned, and code inside could replace an unpinned
       parent of a mount point.
    2. For a directory of the host, its quarantine (`sbx.guest.path_guard`).
    3. The directory of the proxy's socket, read-only: a connection does not write to it.
    """
    own: dict[str, Any] = {"staged": staged, "mapped": paths.mapped}
    view = [Bind(paths.files, WORKSPACE, writable=True, **own)]
    if paths.host_directory:
        view.append(Bind(paths.uploads, UPLOADS_BESIDE_A_HOST_DIRECTORY, staged=staged))
    else:
        pinned = f"{WORKSPACE}/uploads"
        view.append(Bind(f"{paths.files}/uploads", pinned, writable=True, staged=staged))
        view.append(Bind(paths.uploads, TEMPAREA, staged=staged))
    if paths.shared is not None:
        writable = not paths.shared_read_only
        view.append(Bind(paths.shared, f"{WORKSPACE}/shared", writable=writable, staged=staged))
    if paths.guard is not None:
        view.append(Bind(paths.guard.quarantine, QUARANTINE, writable=True, staged=staged))
    if paths.way_out is not None:
        view.append(Bind(paths.way_out.directory, WAY_OUT, staged=staged))
    return tuple(view)


def _connectable(policy: Policy, paths: Paths, own_home: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths below which Landlock allows connections to Unix sockets of other processes.

    Kernels of one sandbox may connect in its private workspace, which has no sockets of the host.
    """
    if policy.unix_sockets == "any":
        return ("/",)
    own_workspace = () if paths.host_directory else (WORKSPACE,)
    way_out = (WAY_OUT,) if paths.way_out is not None else ()
    return (*own_workspace, "/tmp", "/dev/shm", *own_home, *way_out)


def _shown_of_host(policy: Policy, paths: Paths) -> tuple[str, ...]:
    """Return the directories of the host in a jail, except for the system and the interpreter.

    They may have sockets and FIFOs of the host, which can be used despite a read-only mount.
    """
    uploads = UPLOADS_BESIDE_A_HOST_DIRECTORY if paths.host_directory else TEMPAREA
    return (
        *((WORKSPACE,) if paths.host_directory else ()),
        *((uploads,) if paths.host_uploads else ()),
        *(mount.target for mount in policy.filesystem.mount),
    )


def _etc(policy: Policy, home: str) -> tuple[DataFile, ...]:
    """Return a synthetic /etc, without accounts, host name and resolver of the host. The policy may
    show the settings of git of the host in place of ours."""
    user = policy.user
    shows_git = _is_below_any("/etc/gitconfig", policy.filesystem.read)
    return (
        DataFile(
            "/etc/passwd",
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            f"{user}:x:{INSIDE_UID}:{INSIDE_GID}:{user}:{home}:/bin/bash\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        ),
        DataFile(
            "/etc/group", f"root:x:0:\n{user}:x:{INSIDE_GID}:\nnogroup:x:65534:\nnobody:x:65534:\n"
        ),
        DataFile("/etc/hostname", "sandbox\n"),
        DataFile("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        DataFile("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
        DataFile("/etc/resolv.conf", ""),
        *(() if shows_git else (DataFile("/etc/gitconfig", _GITCONFIG),)),
    )


def _environment(
    policy: Policy, interpreter: Interpreter, home: str, way_out: WayOut | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the environment of every process inside. Caches and configuration are in /tmp, never
    in $HOME: otherwise a planted file would be read before the seal, or run in the next kernel."""
    binaries = interpreter.executable.rpartition("/")[0]
    ours = {
        "HOME": home,
        "USER": policy.user,
        "LOGNAME": policy.user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",  # terminals set theirs; elsewhere git would wait for an editor
        "PATH": ":".join(dict.fromkeys((binaries, "/usr/local/bin", "/usr/bin", "/bin"))),
        "TMPDIR": "/tmp",
        "IPYTHONDIR": "/tmp/.ipython",
        "MPLCONFIGDIR": "/tmp/.config/matplotlib",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "XDG_CONFIG_HOME": "/tmp/.config",
        "XDG_DATA_HOME": "/tmp/.local/share",
        "XDG_STATE_HOME": "/tmp/.local/state",
        "PIP_CACHE_DIR": "/tmp/.cache/pip",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_cache": "/tmp/.cache/npm",
        "PYTHONDONTWRITEBYTECODE": "1",
        # BLAS would start one thread for each cpu of the host, whatever the quota of the jail
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": str(max(1, math.ceil(policy.limits.cpu_quota))),  # read by nproc, too
        # The allocators of pyarrow and of programs in Rust would start a thread at import, and a
        # zygote with a thread cannot be forked: measured with pyarrow 26 and polars 2.1
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "_RJEM_MALLOC_CONF": "background_thread:false",
    }
    return tuple({**ours, **_way_to_the_proxy(policy, way_out), **policy.env}.items())


def _way_to_the_proxy(policy: Policy, way_out: WayOut | None) -> dict[str, str]:
    """Return the variables for the proxy and its certificates; each program reads another name.

    The address is the same for every jail, so a zygote has it. Certificates and placeholders belong
    to a sandbox. Without a network, installers of packages fail at the first attempt.
    """
    if policy.network.mode != "proxy":
        return dict.fromkeys(_RETRIES, "0")
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    variables = dict.fromkeys([*names, *map(str.lower, names)], _PROXY)
    listed = {destinations.parse(entry).host for entry in policy.network.allow}
    direct = ",".join(name for name in _NO_PROXY if name not in listed)
    variables |= {"NO_PROXY": direct, "no_proxy": direct}
    if way_out is not None and way_out.certificates:
        variables |= dict.fromkeys(_TRUST, f"{WAY_OUT}/{CERTIFICATES}")
    return variables | dict(way_out.environment if way_out is not None else ())


_RETRIES = (
    "PIP_RETRIES",
    "UV_HTTP_RETRIES",
    "npm_config_fetch_retries",  # pnpm too
    "YARN_HTTP_RETRY",
    "CARGO_NET_RETRY",
    "BUNDLE_RETRY",
    "CONDA_REMOTE_MAX_RETRIES",
)
_TRUST = (
    "SSL_CERT_FILE",  # OpenSSL, and so Python's ssl
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
)


def _network(policy: Policy) -> str:
    """Return the network rule as text for the receipt."""
    if policy.network.mode == "none":
        return "none"
    hosts = len(policy.network.allow)
    return f"proxy: {hosts} host{'' if hosts == 1 else 's'}"


def _command(interpreter: Interpreter, script: str) -> tuple[str, ...]:
    """Use -I: no PYTHON* variable, no user site, no working directory on sys.path."""
    return (interpreter.executable, "-I", f"{GUEST}/sbx/guest/{script}.py")


def _rlimits(policy: Policy, weaker: set[str], *, own_uid: bool) -> tuple[tuple[str, int], ...]:
    """Return the rlimits. `own_uid`: no process of the host has the uid of the jail."""
    limits = policy.limits
    rlimits = {
        # Not 0: that stops a core file, but where core_pattern names a program, Linux would still
        # start it, as root and on the host, for every crash inside. 1 stops both: core(5).
        "CORE": 1,
        "NOFILE": limits.open_files if own_uid else min(limits.open_files, _SHARED_UID_OPEN_FILES),
        "FSIZE": limits.file_size_max,
        "MEMLOCK": _MEMLOCK,
        "SIGPENDING": _SIGPENDING,
        "MSGQUEUE": _MSGQUEUE,
    }
    if "tasks" in weaker:
        rlimits["NPROC"] = limits.tasks_max
    if "memory" in weaker:
        rlimits["DATA"] = limits.memory_max * _WEAKER_DATA_FACTOR
    return tuple(rlimits.items())


def _is_below_any(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in directories)
