"""The broker: the one process that holds namespaces, mounts, cgroups and the right to choose uids.

sbx must not change a program that embeds it (no unshare, no signal handler, no fork with other
threads), and a process that parses HTTP needs no privilege. So the runtime starts this process
once, with `python -I -S`, and sends it every order that needs a privilege or a fork. It has one
thread and imports the standard library only.

Its fd 0 is a SOCK_SEQPACKET socket: one JSON object per packet.

    → {"seq": n, "do": "hello", "runtime": pid, "bwrap": path|null, "uids": [first, count],
       "groups": bool, "id": str, "confined": bool}                        ← capabilities
    → {"seq": n, "do": "confine"}, with one fd: a file of JSON, see `confinement`      ← {}
    → {"seq": n, "do": "make_sandbox", "sandbox": id, "limits": {…}, "uid": n|null} ← {"uid", "gid"}
    → {"seq": n, "do": "map_owner", "sandbox": id, "source", "expected": [dev, ino]|null}
                                   ← {}; mounts that are `mapped` show the owner of the source as
                                     the sandbox's uid from then on: see `userns`
    → {"seq": n, "do": "drop_sandbox", "sandbox": id}                     ← {}
    → {"seq": n, "do": "limit_memory", "sandbox": id, "memory_max": bytes} ← {}
    → {"seq": n, "do": "look_at_disk", "path": data directory}
                                              ← {"layer": {…}, "device": "MAJOR:MINOR"|null, …}
    → {"seq": n, "do": "charge", "path", "bytes_max", "inodes_max"}       ← {"charged": bool}
    → {"seq": n, "do": "usage", "sandbox": id}
                        ← {"version", "memory", "memory_peak", "tasks", "cpu_s", "jails", "network"}
    → {"seq": n, "do": "launch", "sandbox", "jail", "bwrap", "args": […], "command": […],
       "files": [text], "filter": hex,
       "stage": [[index, source, [dev, ino]|null, mapped: bool], …]}
      with two fds: the jail's ends of its control and kernel sockets     ← {"pid": PID 1's}
    → {"seq": n, "do": "start_zygote", "zygote": id, "bwrap", "args", "command", "files", "stage",
       "prepare": {…}, "uid": n|null}           ← {"python": version, "missing": {module: why}}
    → {"seq": n, "do": "retire_zygote", "zygote": id}                     ← {}
    → {"seq": n, "do": "fork", "zygote": id, "jail": id, "ahead": bool}
      with two fds, as for `launch`             ← {"pid": PID 1's, "kernel": pid}, once idle
    → {"seq": n, "do": "enter", "jail": id, "sandbox": id, "mounts": [{"source", "target",
       "writable", "mapped", "expected": [dev, ino]|null}, …], "tmpfs": […], "environment": {…}}
                                                                          ← {"limits"}
    → {"seq": n, "do": "inspect", "jail": id, "fresh": bool}
                            ← {"pid1": facts, "kernel": facts, "limits": {…}, "in_group": bool|null}
    → {"seq": n, "do": "connect", "jail": id, "port": n}     ← {}; the socket comes over the fd that
                                              the order has, see live_orders
    → {"seq": n, "do": "accounts", "jail": id}                   ← {}; four files come the same way
    → {"seq": n, "do": "ping"}                                            ← {}
    → {"seq": n, "do": "attach", "jail": id, "source", "target", "read_only": bool,
       "expected": [dev, ino]|null, "mask": bool, "partly": bool}
                                                ← {"masked": n}, once it can be seen inside
    → {"seq": n, "do": "mask", "jail": id, "places": [path, …]}  ← {"masked": n, "complete": bool}
    → {"seq": n, "do": "detach", "jail": id, "target"}                    ← {}
    → {"seq": n, "do": "unlinked", "jail": id, "device": st_dev}          ← {"bytes", "files",
      "hidden"}
    → {"seq": n, "do": "counters", "jail": id}  ← {"oom_kills", "pids_max_hits"}
    → {"seq": n, "do": "kill", "jail": id}      ← {}; the event `gone` follows at its end
    ← {"seq": n, "ok": {…}}  or  {"seq": n, "error": {"code", "message", "hint", "details", "kind"}}
    ← {"event": "gone", "jail": id, "stderr": text, "oom_kills": n, "pids_max_hits": n}
    ← {"event": "zygote_gone", "zygote": id, "why": text}; the jails it forked live on

It ends when that socket does or when the runtime's process does, whichever is seen first (a forked
child of the runtime may keep the socket open), never by a parent-death signal: those fire when a
*thread* of the parent ends. Everything it started ends with it.

A `confined` runtime has fewer rights than its broker, because the service dropped root's: an
attacker that takes it over must not get them back here. The broker then gives no uid outside of the
range, starts only the bwrap that it found first, and does nothing before `confine`, which sends the
grants for jails once, before the rights are dropped. `allowlist` checks every order against them,
and lists the remaining powers of such a runtime.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sbx.errors import Broken, Denied, SbxError
from sbx.guest import shares
from sbx.isolation import cgroups, probe
from sbx.isolation.broker import bind_staging
from sbx.isolation.broker.jails import BrokerJails
from sbx.isolation.broker.loop import BrokerLoop, close_all, log
from sbx.isolation.broker.sandboxes import BrokerSandboxes
from sbx.isolation.broker.zygotes import Zygotes
from sbx.linux import mounts, namespaces, prctl
from sbx.linux.descriptors import raise_nofile_limit

if TYPE_CHECKING:
    from sbx.isolation.broker.allowlist import BrokerAllowlist

PACKET_MAX = 1 << 17
_FDS_MAX = 4
_OPEN_FILES_MAX = 1 << 16
_LAST_WORDS_S = 3.0
_NO_GROUPS = cgroups.CgroupCapabilities(
    version=0,
    controllers={},
    missing=dict.fromkeys(
        ("memory", "tasks", "cpu", "io"),
        cgroups.Missing("cgroups are turned off by the settings", "set cgroups = true"),
    ),
)


class BrokerServer:
    """Serves one runtime. `serve` returns when the runtime is gone and all jails with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = BrokerLoop(sock)
        self._sandboxes = BrokerSandboxes(self._loop)
        self._jails = BrokerJails(self._loop, self._sandboxes)
        self._zygotes = Zygotes(self._loop, self._sandboxes, self._jails)
        self._confinement: BrokerAllowlist | None = None
        self._bwrap: str | None = None

    def serve(self) -> None:
        self._loop.watch(self._loop.sock.fileno(), self._receive)
        while self._loop.serving:
            self._loop.turn(_min_deadline(self._jails.unthrottle_dying(), self._jails.end_short()))
        self._end()

    def _receive(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._loop.sock, PACKET_MAX, _FDS_MAX)
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._loop.serving = False
            return
        try:
            order = json.loads(packet)
        except ValueError as error:
            # The runtime sends none that is cut off, and gets no answer to this one.
            log(f"an order cannot be read: {error}")
            close_all(fds)
            return
        try:
            outcome = self._obey(order, fds)
        except SbxError as error:
            self._loop.send({"seq": order["seq"], "error": error})
        except Exception as error:  # noqa: BLE001  # the border: one order fails, the broker lives
            broken = Broken(f"the broker could not {order['do']}: {error} (in {_origin(error)})")
            self._loop.send({"seq": order["seq"], "error": broken})
        else:
            if outcome is not None:
                self._loop.send({"seq": order["seq"], "ok": outcome})
        finally:
            close_all(fds)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        if not self._sandboxes.confined or order["do"] in ("hello", "confine"):
            return self._act(order, fds)
        if self._confinement is None:
            raise Denied(
                "the broker obeys no order before it has the grants of the runtime",
                code="not_granted",
            )
        if order["do"] in ("launch", "start_zygote"):
            self._check_bwrap(order)
        with self._confinement.checked(order) as allowed:
            return self._act(allowed, fds)

    def _act(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        """Obey one order. Return None if the reply follows later."""
        jails, sandboxes, zygotes = self._jails, self._sandboxes, self._zygotes
        match order["do"]:
            case "hello":
                return self._hello(order)
            case "confine":
                return self._confine(fds)
            case "make_sandbox":
                sandboxes.make(order, zygotes.uids)
                return None
            case "map_owner":
                return sandboxes.map_owner(order)
            case "limit_memory":
                return sandboxes.limit_memory(order)
            case "drop_sandbox":
                return sandboxes.drop(order["sandbox"], jails.is_used)
            case "look_at_disk":
                return _look_at_disk(order["path"])
            case "charge":
                return _charge(order)
            case "usage":
                name = order["sandbox"]
                return sandboxes.usage(name, jails.pids_in(sandboxes.by_name.get(name)))
            case "launch":
                self._check_new(order["jail"])
                jails.launch(order, fds)
                return None
            case "start_zygote":
                self._check_new(order["zygote"])
                zygotes.start(order)
                return None
            case "retire_zygote":
                return zygotes.retire(order["zygote"])
            case "fork":
                self._check_new(order["jail"])
                zygotes.fork(order, fds)
                return None
            case "enter":
                return zygotes.enter(order)
            case "inspect":
                return jails.get(order["jail"]).inspect(fresh=order["fresh"])
            case "attach" | "detach" | "mask":
                from sbx.isolation.broker.live_orders import MountOrders  # most brokers need none

                MountOrders(self._loop, jails).obey(order)
                return None
            case "connect":
                from sbx.isolation.broker import live_orders  # most brokers need none

                live_orders.connect(self._loop, jails, order, fds)
                return None
            case "accounts":
                from sbx.isolation.broker import live_orders

                live_orders.accounts(self._loop, jails, order, fds)
                return None
            case "unlinked":
                return jails.get(order["jail"]).unlinked(order["device"])
            case "ping":
                return {}
            case "counters":
                return jails.get(order["jail"]).counters()
            case "kill":
                return jails.kill(jails.by_name.get(order["jail"]))
            case unknown:
                raise Broken(f"the broker knows no order {unknown!r}")

    def _hello(self, order: dict[str, Any]) -> dict[str, Any]:
        sandboxes = self._sandboxes
        if sandboxes.hierarchy is not None:
            raise Broken("the broker has been greeted already")
        runtime = os.pidfd_open(order["runtime"])
        self._loop.watch(runtime, self._on_runtime_exit)
        first, count = order["uids"]
        sandboxes.uids = range(first, first + count)
        groups = cgroups.probe() if order["groups"] else _NO_GROUPS
        sandboxes.hierarchy = cgroups.open_hierarchy(groups, order["id"])
        sandboxes.hierarchy.sweep()
        self._take_namespaces()
        capabilities = probe.probe(
            own_namespaces=self._jails.own_namespaces,
            cgroup_layers=_layers(sandboxes.hierarchy),
            become=(first, first) if sandboxes.as_root else None,
            bwrap=order["bwrap"],
        )
        sandboxes.confined, self._bwrap = order["confined"], capabilities.bwrap
        return capabilities.to_json()

    def _confine(self, fds: list[int]) -> dict[str, Any]:
        """Set the grants of the runtime. They are never undone, and never widened."""
        from sbx.isolation.broker.allowlist import BrokerAllowlist

        if not self._sandboxes.confined or self._confinement is not None:
            raise Broken("the broker has the grants of the runtime already")
        with open(os.dup(fds[0]), "rb") as granted:
            self._confinement = BrokerAllowlist(json.load(granted))
        return {}

    def _check_new(self, name: str) -> None:
        if not self._sandboxes.confined:
            return
        if name in self._jails.by_name or name in self._zygotes.by_name:
            raise Broken(f"there is a jail or a zygote {name} already")

    def _check_bwrap(self, order: dict[str, Any]) -> None:
        if order["bwrap"] != self._bwrap:
            raise Broken("that is not the bwrap which this broker found")

    def _take_namespaces(self) -> None:
        """Enter own namespaces if this host allows it; the cold path works without.

        Root needs a mount namespace for the stage: without one it could start no jail as another
        uid, so there the failure is final.
        """
        if self._sandboxes.as_root:
            namespaces.unshare(namespaces.Namespace.MOUNT)
            mounts.receive_only("/")
        else:
            uid, gid = os.geteuid(), os.getegid()
            if not _in_child(lambda: _enter_own_namespaces(uid, gid)):
                return
            _enter_own_namespaces(uid, gid)
        bind_staging.open_stage()
        self._jails.own_namespaces = True

    def _on_runtime_exit(self) -> None:
        self._loop.serving = False

    def _end(self) -> None:
        """End everything with the broker, within a bounded time."""
        for jail in self._jails.by_name.values():
            self._jails.kill(jail)
        for zygote in list(self._zygotes.by_name.values()):
            self._zygotes.end(zygote, "the broker ends")
        deadline = time.monotonic() + _LAST_WORDS_S
        while (self._jails.by_name or self._zygotes.by_name) and time.monotonic() < deadline:
            due_s = self._jails.unthrottle_dying()
            left_s = deadline - time.monotonic()
            self._loop.turn(left_s if due_s is None else min(left_s, due_s))
        if self._sandboxes.hierarchy is not None:
            try:
                self._sandboxes.hierarchy.close()
            except OSError as error:
                log(f"cgroups are left: {error}")


def _origin(error: BaseException) -> str:
    """Return the function and the line that raised the error: an OSError names no call."""
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_qualname}, line {at.tb_lineno}"


def _enter_own_namespaces(uid: int, gid: int) -> None:
    namespaces.unshare(namespaces.Namespace.USER | namespaces.Namespace.MOUNT)
    namespaces.map_ids_to_self(uid, gid)
    shares.keep_half_of_inotify()
    mounts.receive_only("/")


def _in_child(act: Callable[[], object]) -> bool:
    """Whether `act` works, tried in a child.

    Where AppArmor restricts user namespaces, unshare(2) succeeds and the next calls are refused. A
    process that tried it for itself would stay there without rights, and its bwrap with it,
    although the profile of bwrap allows all of this.
    """
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _charge(order: dict[str, Any]) -> dict[str, Any]:
    from sbx.isolation import project_quota

    limits = {"bytes_max": order["bytes_max"], "inodes_max": order["inodes_max"]}
    return {"charged": project_quota.charge(order["path"], **limits)}


def _look_at_disk(path: str) -> dict[str, Any]:
    from sbx.isolation import project_quota

    return {"layer": asdict(project_quota.layer(path)), **project_quota.mounted(path)._asdict()}


def _layers(hierarchy: cgroups.Hierarchy) -> list[probe.Layer]:
    """Return the limits that cgroups can enforce, as layers."""
    capabilities = hierarchy.capabilities
    layers = []
    for name in cgroups.CONTROLLERS:
        if name in capabilities.controllers:
            detail = f"cgroup v{capabilities.version}"
            if name == "io" and capabilities.version == 1:
                detail += ": direct and synchronous writes only, not those through the page cache"
            elif name == "memory" and capabilities.version == 1:
                detail += ": the queues of TCP and UDP sockets apart, at most a quarter as much"
            layers.append(probe.Layer(name, True, detail))
        else:
            missing = capabilities.missing[name]
            layers.append(
                probe.Layer(name, False, "no cgroup limit", missing.cause, missing.remedy)
            )
    return layers


def _min_deadline(one_s: float | None, other_s: float | None) -> float | None:
    return min((due_s for due_s in (one_s, other_s) if due_s is not None), default=None)


def main() -> None:
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # the program's may be 077, and other uids must be able to walk the stage
    prctl.set_child_subreaper(True)
    # To pass descriptors while a jail has many in flight: Linux compares the number that the user
    # has in flight with the limit of the sender.
    raise_nofile_limit(_OPEN_FILES_MAX)
    BrokerServer(sock).serve()
    os._exit(0)  # Python would free its modules first, for 10 ms, while the runtime waits
