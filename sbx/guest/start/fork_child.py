"""Make an idle jail of two forks of a zygote, and move it into a sandbox.

    1. supervisor: PID 1 of a new PID namespace; makes mount, net, ipc and uts namespaces, its own
       /proc, /tmp, /dev/shm and terminals, and a loopback that is up
    2. kernel: new randomness; warm the shell; join these namespaces. Both wait: the jail is idle
    3. on the broker's message both enter the sandbox's cgroup, and the supervisor puts the mounts
       of the conversation in place. Imports are forbidden from before this until each one's seal
    4. both get the sandbox's uid, and a user namespace below the one that owns all the others: from
       here on they have no power over the jail's namespaces, and can make no further ones
    5. both seal themselves like a jail of the cold path: rlimits, no capabilities, Landlock,
       the filter. The kernel adds its second filter, and starts

    The runtime sends the `boot` frame to both, each on its own socket.

    setup socket (SOCK_SEQPACKET, supervisor ↔ broker; closed by step 3):
        ← {"idle": true}  or  {"refused": sentence}
        → {"ids": [uid, gid], "groups": n, "mounts": [target, …], "tmpfs": [[path, size, mode], …],
           "environment": {…}}  with fds: n files to enter a cgroup, then the mounts;
           `environment` has the variables that the zygote lacks

    word (SOCK_SEQPACKET, kernel ↔ supervisor; closed by step 5):
        → "join 2"       the kernel's pid: warm, and waiting to join
        ← "namespaces"   exist; with an fd, the kernel's Landlock domain as it is so far
        → "joined"
        ← the packet of the setup socket, with the files of the cgroups
        ← "mounts"       are in place, and the user namespace exists; with an fd, the socket of
                         the path guard if the workspace is a directory of the host

An error before the end ends the jail.
"""

import _thread
import contextlib
import json
import os
import select
import socket
import stat
import time
from _signal import (  # type: ignore[import-not-found]  # without enums: 20 pages less
    SIG_DFL,
    SIGCHLD,
)
from _signal import signal as set_handler
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sbx.guest import frames, machine, path_guard, shares
from sbx.guest.guarded_calls import GuardedCalls
from sbx.guest.guarded_paths import QUARANTINE
from sbx.guest.kernel import randomness, setup
from sbx.guest.start import lockdown
from sbx.guest.supervisor import children, pid1
from sbx.linux import (
    capabilities,
    landlock,
    mounts,
    namespaces,
    network,
    openat2,
    prctl,
    scheduling,
    seccomp,
)

_INSIDE = (1000, 1000)
_KERNEL_PID = 2  # never the zygote's own pid: see `sbx.guest.start.zygote.main`
_WORKSPACE = "/workspace"
_OWN = (
    namespaces.Namespace.MOUNT
    | namespaces.Namespace.NET
    | namespaces.Namespace.IPC
    | namespaces.Namespace.UTS
)
_PACKET_MAX = 1 << 18
_FDS_MAX = 200
_MOMENT_S = 0.0002


@dataclass(frozen=True, slots=True)
class MountView:
    """The part of a jail's view that replaces the zygote's. `tmpfs` are (path, bytes, mode). `kept`
    are the mounts and links of the zygote's view that lie below one of them. `walls` are the
    policy's, for the rehearsal only: a jail receives its own."""

    tmpfs: Sequence[tuple[str, int, str]]
    kept: Sequence[str]
    walls: Mapping[str, Any]

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> "MountView":
        tmpfs = [(path, size, mode) for path, size, mode in description["tmpfs"]]
        return cls(tmpfs, description["kept"], description["walls"])


def ask_ahead(walls: Mapping[str, Any]) -> None:
    """Ask Linux once for the facts that each jail would ask for, before any fork: the cached
    answers then lie in shared memory."""
    capabilities.last()
    seccomp.supported()
    for scope_signals in (False, True):
        if (domain := LandlockDomain.of(walls, scope_signals=scope_signals)) is not None:
            domain.close()


def become_supervisor(fds: Sequence[int], view: MountView, *, ahead: bool) -> NoReturn:
    """Be PID 1 of a new jail, in a child of the keeper. `fds`: setup, control, word.

    `ahead`: no caller waits for it yet.
    """
    setup, control, word = map(_socket, fds)
    try:
        set_handler(SIGCHLD, SIG_DFL)
        lockdown.close_all_but(fds)
        pid1.silence()
        _own_view(view)
        # Its signals may reach the kernel, which is in no domain below this one. They could reach
        # only processes of this jail, like the kernel and the commands.
        domain = LandlockDomain.of(view.walls, scope_signals=False)
        kernels = LandlockDomain.of(view.walls, scope_signals=True)
        if ahead:
            _rehearse_entry(view)
        oom = children.OomScore()
        kernel_pid = int(_hear(word, b"join"))
        socket.send_fds(word, [b"namespaces"], [kernels.fileno()] if kernels is not None else [])
        if kernels is not None:
            kernels.close()
        if ahead:
            _rehearse_seal(view.walls, domain)  # not earlier: its thread would be process 2
        _hear(word, b"joined")
        setup.send(b'{"idle": true}')
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into the keeper
        with contextlib.suppress(OSError):
            setup.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    try:
        walls, abi, guard_pid = _enter(setup, control, word, view, domain)
    except BrokenPipeError:
        os._exit(1)  # the kernel has ended, or the caller gave up: no wall was refused
    except BaseException as error:  # noqa: BLE001  # the same; no user code has run, and none will
        with contextlib.suppress(OSError):
            control.sendall(frames.encode("refused", lockdown.refusal(error)))
        os._exit(1)
    kernel_fd = os.pidfd_open(kernel_pid)
    pid1.serve(control, kernel_pid, walls, oom, abi, kernel_fd, guard_pid)


def _socket(fd: int) -> socket.socket:
    return socket.socket(fileno=fd)


def _hear(word: socket.socket, expected: bytes) -> bytes:
    """Return the rest of the expected message of the jail's other process. Exit without it."""
    kind, _, rest = word.recv(64).partition(b" ")
    if kind != expected:
        os._exit(1)
    return rest


def _hear_fd(word: socket.socket, expected: bytes) -> int | None:
    """Read this message and the descriptor that may come with it."""
    message, fds, _, _ = socket.recv_fds(word, 64, 1)
    if message != expected:
        os._exit(1)
    return fds[0] if fds else None


def _own_view(view: MountView) -> None:
    """Make the namespaces and the mounts that jails of one zygote must not share."""
    namespaces.unshare(_OWN)
    mounts.private("/")
    mounts.proc("/proc")
    for path in filter(os.path.exists, shares.KEYS):
        mounts.bind("/dev/null", path)
    mounts.devpts("/dev/pts", ptys_max=shares.PTYS_MAX)
    for top, size, mode in view.tmpfs:
        kept = [path for path in view.kept if path.startswith(f"{top}/")]
        links = {path: os.readlink(path) for path in kept if os.path.islink(path)}
        trees = {path: mounts.open_tree(path) for path in kept if path not in links}
        mounts.tmpfs(top, f"mode={mode},size={size},nr_inodes={shares.TMPFS_NAMES_MAX}")
        for path, tree in trees.items():
            _make_mount_point(path, stat.S_ISDIR(os.fstat(tree).st_mode))
            _attach(tree, path)
        for path, points_to in links.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(points_to, path)
    if view.walls["machine"] is not None:
        machine.cover_meminfo(mounts.bind)
    network.loopback_up()


def _make_mount_point(path: str, is_directory: bool) -> None:
    os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)
    if not is_directory:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _attach(tree: int, path: str) -> None:
    """Attach a tree at its place. No symlink may lead there: an earlier kernel of the conversation
    could have left one in the workspace."""
    target = openat2.openat2(-1, path.encode(), os.O_PATH, resolve=openat2.RESOLVE_NO_SYMLINKS)
    mounts.attach(tree, target)
    os.close(target)
    os.close(tree)


def _enter(
    setup: socket.socket,
    control: socket.socket,
    word: socket.socket,
    view: MountView,
    domain: "LandlockDomain | None",
) -> tuple[Mapping[str, Any], int, int]:
    """Do steps 3 to 5 of the supervisor. Return its walls, the Landlock ABI that is in force, and
    the pid of the path guard, or 0."""
    _wait_idle(setup, word)
    packet, fds, _, _ = socket.recv_fds(setup, _PACKET_MAX, _FDS_MAX)
    if not packet:
        os._exit(0)
    setup.close()
    with lockdown.forbid_imports():
        entry_order = json.loads(packet.decode())  # from bytes it would detect the encoding
        groups, trees = fds[: entry_order["groups"]], fds[entry_order["groups"] :]
        socket.send_fds(word, [packet], groups)
        _enter_groups(groups)
        namespaces.unshare(namespaces.Namespace.CGROUP)
        for (path, size, mode), (_, present, _) in zip(
            entry_order["tmpfs"], view.tmpfs, strict=True
        ):
            if size != present:
                mounts.resize_tmpfs(path, size, mode)
            os.chown(path, *entry_order["ids"])
        if view.walls["machine"] is not None:
            machine.give_meminfo(entry_order["ids"])
        _become(entry_order)  # only the sandbox's uid can walk its workspace, to the next target
        for tree, target in zip(trees, entry_order["mounts"], strict=True):
            _attach(tree, target)
        walls = _boot(control)["walls"]
        machine.describe(walls["machine"])
        guard_pid, joining = _fork_guard(walls, control, word)
        namespaces.unshare(namespaces.Namespace.USER)
        prctl.set_dumpable(True)
        namespaces.map_ids(_INSIDE, entry_order["ids"])
        namespaces.forbid_user_namespaces()
        shares.limit_inotify()
        if joining is not None and joining.recv(16) != b"ready":
            os._exit(1)  # it has sent its error on the control socket
        pid1.wait_for_masks(control, walls)  # the kernel starts only after this
        socket.send_fds(word, [b"mounts"], [joining.fileno()] if joining is not None else [])
        word.close()
        return walls, _seal(walls, domain, view.walls, joining), guard_pid


def _fork_guard(
    walls: Mapping[str, Any], control: socket.socket, word: socket.socket
) -> tuple[int, socket.socket | None]:
    """Fork the path guard if the walls have one. Return its pid, and the socket to join it by.

    Do this before the user namespace exists: this process's uid will own the namespace, which
    gives the guard the right to read the memory of the processes in it (user_namespaces(7)).
    """
    if walls["guard"] is None:
        return 0, None
    joining, guards_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            word.detach()
            joining.detach()
            lockdown.close_all_but((guards_end.fileno(), control.fileno()))
            os.setsid()
            lockdown.limit(walls["rlimits"])
            capabilities.keep_only(0)  # the bounding set stays: no_new_privs makes it void
            prctl.set_no_new_privs()
            lockdown.add_filter(walls["filter"])
            calls = GuardedCalls(walls["guard"])
            guards_end.send(b"ready")
            control.close()
            path_guard.serve(guards_end, calls)
        except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
            with contextlib.suppress(OSError):
                control.sendall(frames.encode("refused", lockdown.refusal(error)))
        finally:
            os._exit(1)
    guards_end.close()
    return pid, joining


def _wait_idle(setup: socket.socket, word: socket.socket) -> None:
    """Wait until the broker sends something. Exit if the kernel of the jail ends before that."""
    poll = select.poll()
    poll.register(setup, select.POLLIN)
    poll.register(word, select.POLLIN)
    if any(fd == word.fileno() for fd, _ in poll.poll()):
        os._exit(1)


def _boot(sock: socket.socket) -> Mapping[str, Any]:
    boot = frames.receive(sock)
    if boot is None:
        os._exit(0)
    return boot.content


def _enter_groups(groups: Sequence[int]) -> None:
    for group in groups:
        os.write(group, b"0")
        os.close(group)


def _become(entry_order: Mapping[str, Any]) -> None:
    uid, gid = entry_order["ids"]
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    for name, value in entry_order["environment"].items():
        os.environ[name] = value
    if "TZ" in entry_order["environment"]:
        time.tzset()


def _seal(
    walls: Mapping[str, Any],
    domain: "LandlockDomain | None",
    zygote_walls: Mapping[str, Any],
    joining: socket.socket | None,
) -> int:
    """Seal this process. `joining` is the socket to the path guard, if there is one.

    `zygote_walls` are the walls of the zygote. If the broker has marked them as binding, a process
    that controls the runtime later can leave out neither Landlock nor the filter.
    """
    if zygote_walls.get("binding") and any(
        walls[name] != zygote_walls[name] for name in ("landlock", "filter")
    ):
        raise lockdown.SealError("walls", OSError(22, "these are not the walls of the zygote"))
    lockdown.limit(walls["rlimits"])
    capabilities.drop_all()
    lockdown.check_unprivileged()
    abi = 0
    if walls["landlock"]:
        if domain is None:
            raise lockdown.SealError("landlock", OSError(95, "this Linux has no Landlock"))
        abi = domain.enter(walls)
    if joining is not None:
        lockdown.join_guard(joining, walls["guard"]["filter"])
    lockdown.add_filter(walls["filter"])
    lockdown.add_filter(walls["jail_filter"])
    return abi


class LandlockDomain:
    """A Landlock domain that is complete except for the rules of the conversation's mounts.

    A rule holds for the file that was at its path when the rule was made, so the rules for the
    workspace are made after the last mount. Everything else in a jail was mounted before it was
    idle. `ruleset_fd` is a descriptor: the jail's other process has already made these rules.
    """

    def __init__(
        self, walls: Mapping[str, Any], *, scope_signals: bool, ruleset_fd: int | None
    ) -> None:
        self._ready = [rule for rule in lockdown.domain_rules(walls) if not _comes_late(rule[0])]
        self._ruleset = landlock.Ruleset(
            scope_signals=scope_signals, scope_abstract_sockets=True, ruleset_fd=ruleset_fd
        )
        for path, rights in self._ready if ruleset_fd is None else ():
            self._ruleset.allow(path, rights)

    @classmethod
    def of(
        cls, walls: Mapping[str, Any], *, scope_signals: bool, ruleset_fd: int | None = None
    ) -> "LandlockDomain | None":
        return (
            cls(walls, scope_signals=scope_signals, ruleset_fd=ruleset_fd)
            if walls["landlock"]
            else None
        )

    def fileno(self) -> int:
        return self._ruleset.fileno()

    def close(self) -> None:
        self._ruleset.close()

    def rehearse(self) -> None:
        self._ruleset.enter(only_this_thread=True)

    def enter(self, walls: Mapping[str, Any]) -> int:
        """Restrict this process. Return the ABI. Raise SealError."""
        rules = lockdown.domain_rules(walls)
        if [rule for rule in rules if not _comes_late(rule[0])] != self._ready:
            raise lockdown.SealError(
                "landlock", OSError(22, "these are not the walls of the zygote")
            )
        try:
            for path, rights in rules:
                if _comes_late(path):
                    self._ruleset.allow(path, rights)
            lockdown.allow_connections(self._ruleset, walls["connect"])
            self._ruleset.enter()
        except OSError as error:
            raise lockdown.SealError("landlock", error) from error
        self._ruleset.close()
        return self._ruleset.domain.abi


def _comes_late(path: str) -> bool:
    tops = (_WORKSPACE, QUARANTINE)
    return any(path == top or path.startswith(f"{top}/") for top in tops)


# -- work done ahead, to be fast when a caller waits -----------------------------------------------
#
# The first write of a fork to a page copies it: 3.6 µs, and Python writes wherever it counts a
# reference. Entering and sealing wrote to 1,300 such pages in the two processes together. So all
# steps that a caller would wait for run once before the jail is idle, and change nothing.


def _rehearse_entry(view: MountView) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.encode("boot", {"walls": view.walls}))
        _boot(ours)
    for path, size, mode in view.tmpfs:
        mounts.resize_tmpfs(path, size, mode)
        os.chown(path, -1, -1)
    os.setresgid(-1, -1, -1)
    os.setresuid(-1, -1, -1)
    namespaces.unshare(namespaces.Namespace(0))
    os.close(openat2.openat2(-1, b"/", os.O_PATH, resolve=openat2.RESOLVE_NO_SYMLINKS))


def _rehearse_seal(walls: Mapping[str, Any], domain: LandlockDomain | None) -> None:
    """Seal a thread, which then ends: a domain, a filter and capabilities belong to one thread."""

    steps: list[Callable[[], object]] = [
        capabilities.drop_all,
        lockdown.check_unprivileged,
        *([domain.rehearse] if domain is not None else []),
        lambda: lockdown.add_filter(walls["filter"]),
        lambda: lockdown.add_filter(walls["jail_filter"]),
    ]

    def rehearse() -> None:
        for step in steps:
            # Some steps lack a condition at this point.
            with contextlib.suppress(OSError, lockdown.SealError):
                step()

    _thread.start_new_thread(rehearse, ())
    while os.stat("/proc/self/task").st_nlink != 3:  # . and .. and this thread
        time.sleep(_MOMENT_S)


# -- the kernel ------------------------------------------------------------------------------------


def become_kernel(
    fds: Sequence[int], prepared: setup.ImportedKernel, walls: Mapping[str, Any], *, ahead: bool
) -> NoReturn:
    """Be the kernel of a new jail, in a child of the zygote, until its end, which raises Leave.

    `fds`: kernel socket, word, and the pidfd of PID 1. `ahead`: no caller waits for it yet.
    """
    sock, word, supervisor_fd = _socket(fds[0]), _socket(fds[1]), fds[2]
    try:
        set_handler(SIGCHLD, SIG_DFL)
        lockdown.close_all_but(fds)
        pid1.silence()
        if os.getpid() != _KERNEL_PID:
            raise RuntimeError("another process was started in the jail before its kernel")
        os.setsid()
        randomness.renew()
        if ahead:
            with contextlib.suppress(PermissionError):  # as under `chrt --idle`
                scheduling.batch()  # it must not preempt a running cell
        idle = setup.wait_for_sandbox(sock, prepared, ahead=ahead)
        word.send(b"join %d" % os.getpid())
        domain_fd = _hear_fd(word, b"namespaces")  # made while the shell was warmed
        namespaces.join(supervisor_fd, _OWN)
        oom = children.OomScore()
        oom.set(children.OOM_KERNEL)
        oom.close()
        domain = LandlockDomain.of(walls, scope_signals=True, ruleset_fd=domain_fd)
        if ahead:
            _rehearse_seal(walls, domain)
            with contextlib.suppress(PermissionError):
                scheduling.normal()
        word.send(b"joined")
        boot = _follow(word, sock, supervisor_fd, domain, walls)
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into the zygote
        with contextlib.suppress(OSError):
            sock.sendall(frames.encode("refused", lockdown.refusal(error)))
        os._exit(1)
    setup.start(idle, setup.KernelConfig(**boot["kernel"]))


def _follow(
    word: socket.socket,
    sock: socket.socket,
    supervisor_fd: int,
    domain: LandlockDomain | None,
    zygote_walls: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Do steps 3 to 5 of the kernel, after the supervisor. Return its boot frame."""
    with lockdown.forbid_imports():
        packet, groups, _, _ = socket.recv_fds(word, _PACKET_MAX, _FDS_MAX)
        if not packet:
            os._exit(0)
        entry_order = json.loads(packet.decode())
        _enter_groups(groups)
        for pipe in (1, 2):  # Linux opens /dev/stdout by the owner of its inode
            os.fchown(pipe, *entry_order["ids"])
        _become(entry_order)
        boot = _boot(sock)
        walls = boot["walls"]
        joining = _hear_fd(word, b"mounts")
        word.close()
        namespaces.join(supervisor_fd, namespaces.Namespace.CGROUP)
        namespaces.join(supervisor_fd, namespaces.Namespace.USER)
        os.close(supervisor_fd)
        prctl.set_dumpable(True)
        _seal(walls, domain, zygote_walls, _socket(joining) if joining is not None else None)
        lockdown.enter_files_only_domain(walls)
        lockdown.add_filter(walls["kernel_filter"])
        lockdown.add_filter(walls["last_filter"])
    return boot
