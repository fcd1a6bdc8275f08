"""The capabilities of this host, layer by layer, found by trial.

Runs inside the broker, so that the program which embeds sbx starts no child for it. Each layer is
tried the way a jail will use it, because sysctls and versions lie: AppArmor, container filters and
masked /proc all show only in the attempt. `explain` explains failures; it is a pure function of the
facts about the host, so that each known host (see users' reports of bubblewrap on Ubuntu 24.04, in
Docker, on old kernels) is a test case.
"""

import os
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sbx.linux import landlock, seccomp

OLDEST_BWRAP = (0, 5, 0)  # the first with --info-fd namespaces, --perms came with 0.5
_BWRAP_PLACES = ("/usr/local/bin", "/usr/bin", "/bin", "/run/current-system/sw/bin")
_LINK = ("--symlink", "/oldroot", "/dev/link", "--dir", "/dev/link/proc")
_FOLLOWS_LINKS = "CVE-2026-87766, fixed in 0.12.0"
_HARMLESS = "the mount points of sbx in a workspace are checked before"
_TRY_SECONDS = 10.0
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
_SINCE_LANDLOCK_ABI = {
    2: "renaming between directories",
    3: "control of truncation",
    5: "control of device ioctls",
    6: "scopes for signals and abstract sockets",
}
_SYSCTLS = (
    "kernel/apparmor_restrict_unprivileged_userns",
    "kernel/unprivileged_userns_clone",
    "user/max_user_namespaces",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One wall of this host: available, or missing with a cause and a remedy."""

    name: str
    available: bool
    detail: str
    cause: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The facts about the host that `plan` needs. The broker sends them as JSON."""

    linux: str
    machine: str
    root: bool
    bwrap: str | None
    bwrap_options: frozenset[str]
    landlock_abi: int
    own_namespaces: bool
    layers: tuple[Layer, ...] = field(default=())

    def layer(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bwrap_options": sorted(self.bwrap_options)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Capabilities":
        layers = tuple(Layer(**layer) for layer in raw["layers"])
        return cls(**{**raw, "layers": layers, "bwrap_options": frozenset(raw["bwrap_options"])})


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts about the host that explain a refusal, as plain values for tests."""

    root: bool
    sysctls: Mapping[str, str]
    container: bool


def find_bwraps(places: Sequence[str] = _BWRAP_PLACES) -> list[str]:
    """Return the bwraps of the system, never one of PATH, which could be in a workspace."""
    paths: dict[str, str] = {}  # by the file; /bin may be a link to /usr/bin
    for place in places:
        if os.access(path := f"{place}/bwrap", os.X_OK):
            paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())


def read_host() -> HostFacts:
    return HostFacts(
        root=os.geteuid() == 0,
        sysctls={name: text for name in _SYSCTLS if (text := _read(f"/proc/sys/{name}")) != ""},
        container=os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
    )


def probe(
    *,
    own_namespaces: bool,
    cgroup_layers: Sequence[Layer],
    become: Sequence[int] | None,
    bwrap: str | None = None,
) -> Capabilities:
    """Try every layer; at most a few dozen milliseconds.

    `become` is the (uid, gid) as which bwrap will run, where the broker is root. Without `bwrap`,
    take the first one of the host that passes its trial, and rather one whose set-up follows no
    links.
    """
    host = read_host()
    trial = None
    paths: Sequence[str | None] = [bwrap] if bwrap else find_bwraps()
    for path in paths or [None]:
        this = _try(path, host, become)
        if trial is None or this.rank > trial.rank:
            trial = this
    assert trial is not None
    return Capabilities(
        linux=os.uname().release,
        machine=os.uname().machine,
        root=host.root,
        bwrap=trial.path if trial.layer.available else None,
        bwrap_options=trial.options,
        landlock_abi=landlock.abi(),
        own_namespaces=own_namespaces,
        layers=(
            trial.layer,
            trial.namespaces,
            _landlock(landlock.abi()),
            _seccomp(seccomp.supported(), os.uname().machine),
            *cgroup_layers,
        ),
    )


def parse_version(text: str) -> tuple[int, ...] | None:
    """`bubblewrap 0.8.0` → (0, 8, 0); None for anything else."""
    match = re.fullmatch(r"bubblewrap (\d+)\.(\d+)(?:\.(\d+))?\S*", text.strip())
    return tuple(int(part or 0) for part in match.groups()) if match else None


def explain(stderr: str, host: HostFacts) -> tuple[str, str]:
    """Return the reason why bwrap failed to create namespaces, and the remedy."""
    message = stderr.strip().splitlines()[-1] if stderr.strip() else "bwrap failed without a word"
    sysctls = host.sysctls
    # Root meets the same: bwrap is never root, it runs as the jail's own uid
    if sysctls.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            f"AppArmor restricts unprivileged user namespaces on this host ({message})",
            "load the profile that Ubuntu ships for it: ln -s "
            "/usr/share/apparmor/extra-profiles/bwrap-userns-restrict /etc/apparmor.d/ && "
            "apparmor_parser -r /etc/apparmor.d/bwrap-userns-restrict; "
            "the sysctl itself can stay on",
        )
    if sysctls.get("kernel/unprivileged_userns_clone") == "0":
        return (
            f"unprivileged user namespaces are turned off ({message})",
            "run: sysctl -w kernel.unprivileged_userns_clone=1",
        )
    if sysctls.get("user/max_user_namespaces") == "0":
        return (
            f"this host allows no user namespace at all ({message})",
            "run: sysctl -w user.max_user_namespaces=15000",
        )
    if "mount proc" in message:
        return (
            f"a container masks /proc, so no new one may be mounted ({message})",
            "start the container with --security-opt systempaths=unconfined",
        )
    if host.container:
        return (
            f"the container's own filter forbids namespaces ({message})",
            "start the container with a seccomp profile that allows unshare, mount and pivot_root, "
            "for instance --security-opt seccomp=unconfined --security-opt apparmor=unconfined",
        )
    return (
        f"bwrap cannot make its namespaces ({message})",
        "see that user namespaces are enabled in this linux (CONFIG_USER_NS) and not "
        "forbidden by a security module",
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    path: str | None
    options: frozenset[str]
    layer: Layer
    namespaces: Layer
    follows_links: bool

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        return (self.layer.available, self.namespaces.available, not self.follows_links)


def _try(path: str | None, host: HostFacts, become: Sequence[int] | None) -> _Trial:
    options, layer = _bwrap(path)
    if path is None or not layer.available:
        cause, remedy = layer.cause, layer.remedy
        return _Trial(path, options, layer, Layer("namespaces", False, "-", cause, remedy), False)
    namespaces, follows = _namespaces(path, options, host, become)
    if follows:
        detail = f"{layer.detail}; its set-up follows links ({_FOLLOWS_LINKS}): {_HARMLESS}"
        layer = Layer("bwrap", True, detail)
    return _Trial(path, options, layer, namespaces, follows)


def _untrusted(path: str) -> str | None:
    """Return the reason why no sandbox may be started with this program; None for a good one.

    Someone else could replace a program that they can write, or one in such a directory. A set-id
    bwrap does its set-up as root, which CVE-2026-41163 and earlier holes let a user control.
    """
    place = os.path.realpath(path)
    status = os.stat(place)
    # In the user namespace of an unprivileged broker, the overflow uid owns the files of root.
    root = os.stat("/")
    if status.st_mode & (stat.S_ISUID | stat.S_ISGID) or "security.capability" in os.listxattr(
        place
    ):
        return f"{path} has rights of root (set-uid, set-gid or a file capability)"
    while True:
        writable = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and status.st_gid not in (0, root.st_gid, os.getegid())
        )
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
            writable = False  # only the owner of a file can replace it there
        if writable or status.st_uid not in (0, root.st_uid, os.geteuid()):
            return f"other users can write {place}"
        if place == "/":
            return None
        place = os.path.dirname(place)
        status = os.stat(place)


def _bwrap(path: str | None) -> tuple[frozenset[str], Layer]:
    remedy = "install it: apt-get install bubblewrap (or the package of your distribution)"
    if path is None:
        cause = "bwrap is in none of " + ", ".join(_BWRAP_PLACES)
        return frozenset(), Layer("bwrap", False, "not found", cause, remedy)
    if not os.access(path, os.X_OK):
        cause = f"the settings name the bwrap {path}, which does not exist"
        mend = f"correct SBX_BWRAP, or unset it; where bubblewrap is missing, {remedy}"
        return frozenset(), Layer("bwrap", False, path, cause, mend)
    if (why := _untrusted(path)) is not None:
        mend = f"run: chmod u-s,g-s,go-w {path} (setcap -r {path}), or name another one: SBX_BWRAP"
        return frozenset(), Layer("bwrap", False, path, why, mend)
    code, output, _ = _run([path, "--version"])
    version = parse_version(output)
    if code != 0 or version is None:
        cause = f"{path} --version printed {output.strip()[:80]!r}, not a version"
        return frozenset(), Layer("bwrap", False, path, cause, remedy)
    if version < OLDEST_BWRAP:
        cause = f"{path} is {output.strip()}, older than {_dotted(OLDEST_BWRAP)}"
        return frozenset(), Layer("bwrap", False, path, cause, remedy)
    options = frozenset(re.findall(r"^\s+(--[a-z0-9-]+)", _run([path, "--help"])[1], re.M))
    return options, Layer("bwrap", True, f"{_dotted(version)} at {path}")


def _namespaces(
    bwrap: str, options: frozenset[str], host: HostFacts, become: Sequence[int] | None
) -> tuple[Layer, bool]:
    """Return the layer, and whether the set-up of this bwrap follows links out of the sandbox.

    The first trial makes a link in the new root that leads to the old one, and demands a directory
    below it. A bwrap that does not resolve links in the new root finds the host's, which exists,
    and succeeds. It writes nothing. Distributions backport fixes, so the version is not enough.
    """
    for extra in (_LINK, ()):
        code, _, stderr = _try_bwrap(bwrap, _NAMESPACES, options, become, extra)
        if code == 0:
            layer = Layer("namespaces", True, "user mount pid net ipc uts cgroup")
            return layer, bool(extra)
    works = [name for name in _NAMESPACES if _try_alone(bwrap, name, options, become)]
    cause, remedy = explain(stderr, host)
    detail = "alone these work: " + " ".join(works) if works else "none can be made"
    return Layer("namespaces", False, detail, cause, remedy), False


def _try_alone(
    bwrap: str, name: str, options: frozenset[str], become: Sequence[int] | None
) -> bool:
    names = ("user",) if name == "user" else ("user", name)
    return _try_bwrap(bwrap, names, options, become)[0] == 0


def _try_bwrap(
    bwrap: str,
    names: Sequence[str],
    options: frozenset[str],
    become: Sequence[int] | None,
    extra: Sequence[str] = (),
) -> tuple[int, str, str]:
    argv = [bwrap, *(f"--unshare-{name}" for name in names), "--uid", "1000", "--gid", "1000"]
    if "--disable-userns" in options:
        argv.append("--disable-userns")
    argv += ["--ro-bind", "/", "/"]
    if "pid" in names:
        argv += ["--proc", "/proc"]
    argv += ["--dev", "/dev", *extra, "--", "/bin/true"]
    return _run(argv, become)


def _landlock(abi: int) -> Layer:
    """Return the layer. Its detail names the gaps of an older ABI; receipts repeat it."""
    if abi >= 1:
        lost = [f"no {what}" for since, what in _SINCE_LANDLOCK_ABI.items() if abi < since]
        return Layer("landlock", True, ", ".join([f"ABI {abi}", *lost]))
    return Layer(
        "landlock",
        False,
        "not there",
        "this linux has no Landlock, or it is not among its security modules",
        "use linux 5.13 or newer and boot it with landlock in lsm=…",
    )


def _seccomp(supported: bool, machine: str) -> Layer:
    if supported and machine in ("x86_64", "aarch64"):
        return Layer("seccomp", True, f"filter mode on {machine}")
    return Layer(
        "seccomp",
        False,
        machine,
        "this linux has no seccomp filters"
        if not supported
        else f"sbx ships no filter for {machine}",
        "use linux 3.17 or newer with CONFIG_SECCOMP_FILTER on x86_64 or aarch64",
    )


def _run(argv: Sequence[str], become: Sequence[int] | None = None) -> tuple[int, str, str]:
    uid, gid = become or (None, None)
    try:
        ended = subprocess.run(
            argv,
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRY_SECONDS,
            check=False,
            user=uid,
            group=gid,
            extra_groups=None if become is None else [],
        )
    except (OSError, subprocess.SubprocessError) as error:
        return -1, "", str(error)
    return ended.returncode, ended.stdout, ended.stderr


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as text:
            return text.read().strip()
    except OSError:
        return ""
