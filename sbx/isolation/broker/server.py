"""The broker: the one process that holds namespaces, mounts, cgroups and the right to choose uids.

A program that embeds sbx must not be changed by it (no unshare, no signal handler, no fork beside
its threads), and a process that parses HTTP needs no privilege. So the runtime starts this process
once, with `python -I -S`, and asks it for everything that needs a privilege or a fork. It has one
thread and imports the standard library only.

It talks on a SOCK_SEQPACKET socket, its fd 0: one JSON object a packet.

    → {"seq": n, "do": "hello", "runtime": pid, "bwrap": path|null, "uids": [first, count],
       "groups": bool, "id": str, "confined": bool}                        ← capabilities
    → {"seq": n, "do": "confine"}, with one fd: a file of JSON, see `confinement`      ← {}
    → {"seq": n, "do": "make_sandbox", "sandbox": id, "limits": {…}, "uid": n|null} ← {"uid", "gid"}
    → {"seq": n, "do": "map_owner", "sandbox": id, "source", "expected": [dev, ino]|null}
                                   ← {}; mounts that are `mapped` show the owner of the source as
                                     the sandbox's uid from then on: see `userns`
    → {"seq": n, "do": "drop_sandbox", "sandbox": id}                     ← {}
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
      with two fds, as for `launch`             ← {"pid": PID 1's, "kernel": pid}, once parked
    → {"seq": n, "do": "enter", "jail": id, "sandbox": id, "mounts": [{"source", "target",
       "writable", "mapped", "expected": [dev, ino]|null}, …], "tmpfs": […], "environment": {…}}
                                                                          ← {"limits"}
    → {"seq": n, "do": "inspect", "jail": id, "fresh": bool}
                            ← {"pid1": facts, "kernel": facts, "limits": {…}, "in_group": bool|null}
    → {"seq": n, "do": "ping"}                                            ← {}
    → {"seq": n, "do": "attach", "jail": id, "source", "target", "read_only": bool,
       "expected": [dev, ino]|null, "mask": bool, "partly": bool}
                                                ← {"masked": n}, once it can be seen inside
    → {"seq": n, "do": "mask", "jail": id, "places": [path, …]}  ← {"masked": n, "complete": bool}
    → {"seq": n, "do": "detach", "jail": id, "target"}                    ← {}
    → {"seq": n, "do": "unlinked", "jail": id, "device": st_dev}          ← {"bytes", "files"}
    → {"seq": n, "do": "counters", "jail": id}  ← {"oom_kills", "pids_max_hits"}
    → {"seq": n, "do": "kill", "jail": id}      ← {}; the `gone` event says when it is over
    ← {"seq": n, "ok": {…}}  or  {"seq": n, "error": {"code", "message", "hint", "details"}}
    ← {"event": "gone", "jail": id, "stderr": text, "oom_kills": n, "pids_max_hits": n}
    ← {"event": "zygote_gone", "zygote": id, "why": text}; the jails it forked live on

It ends when that socket does or when the runtime's process does, whichever is seen first (a forked
child of the runtime may keep the socket open), never by a parent-death signal: those fire when a
*thread* of the parent ends. Everything it started ends with it.

A jail is killed by the pidfd of its PID 1, and by its cgroup where there is one; no pid is
remembered and signalled later.

A `confined` runtime is one that has fewer rights than its broker, a service that dropped root's:
whoever takes it over is not to get them back here. No uid outside of the range is given then, no
other bwrap is started than the one that was found first, and nothing is done before `confine`, once
and before the rights are dropped, has said what jails may be made of. `confinement` checks every
order against that, and says what such a runtime can still do.
"""

import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sbx.errors import Broken, Denied, SbxError, Unavailable
from sbx.guest import shares
from sbx.isolation import cgroups, facts, probe, userns
from sbx.isolation.broker import bind_staging, spawn, zygotes
from sbx.linux import mounts, namespaces, prctl, procfs
from sbx.linux.descriptors import raise_nofile_limit

if TYPE_CHECKING:
    from sbx.isolation.broker.allowlist import BrokerAllowlist

PACKET_MAX = 1 << 17
_FDS_MAX = 4
_OPEN_FILES_MAX = 1 << 16
_STDERR_MAX = 4096
_LAST_WORDS_S = 3.0
_REMOVE_S = 1.0
_DIES_BY_ITSELF_S = 0.03
_UNLINKED_S = 0.01
_SHORT_S = 0.5
_SHORT_LOOK_S = 0.005
_NO_GROUPS = cgroups.CgroupCapabilities(
    version=0,
    controllers={},
    missing=dict.fromkeys(
        ("memory", "tasks", "cpu", "io"),
        cgroups.Missing("cgroups are turned off by the settings", "set cgroups = true"),
    ),
)


@dataclass(slots=True)
class _Group:
    """A jail's cgroup, and the limits in force there as read back when it was made."""

    group: cgroups.JailGroup
    limits: cgroups.CgroupLimits


@dataclass(slots=True)
class _Sandbox:
    """`spare` is the group of the next jail: nobody waits for it when the sandbox is made.
    `owners`: the user namespace for its mapped mounts."""

    group: cgroups.SandboxGroup
    become: tuple[int, int] | None
    spare: _Group | None = None
    jails: int = 0
    memory: int | None = None  # says when it has run out
    owners: int | None = None
    short_until: float = 0.0
    dying: set[str] = field(default_factory=set)
    dropped: bool = False
    removed: bool = False  # its group, and those of its jails

    def make_spare(self) -> None:
        self.jails += 1
        made = self.group.make_jail(str(self.jails))
        self.spare = _Group(made, made.limits())

    def take_group(self) -> _Group:
        if self.spare is None:
            self.make_spare()
        taken, self.spare = self.spare, None
        assert taken is not None
        return taken


@dataclass(slots=True)
class _Jail:
    """What the broker holds of one jail, until everything of it is gone.

    One of the cold path has a bubblewrap of its own, `started`, and is in a sandbox from the first;
    one that a zygote forked has a `setup` socket until it enters a sandbox.
    """

    name: str
    seq: int
    sandbox: _Sandbox | None = None
    group: _Group | None = None
    started: spawn.Started | None = None
    setup: socket.socket | None = None
    zygote: str | None = None
    info: bytes | None = None
    said: str = ""
    parked: bool = False
    pid1: int | None = None
    pid1_fd: int | None = None
    kernel: int | None = None
    kernel_fd: int | None = None
    answered: bool = False
    guarded: bool = False
    attached: dict[str, int] = field(default_factory=dict)


class BrokerServer:
    """Serves one runtime. `serve` returns when the runtime is gone and all jails with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._sandboxes: dict[str, _Sandbox] = {}
        self._jails: dict[str, _Jail] = {}
        self._zygotes: dict[str, zygotes.ZygoteProcess] = {}
        self._dying: dict[str, float] = {}
        self._hierarchy: cgroups.Hierarchy | None = None
        self._root = os.geteuid() == 0
        self._own_namespaces = False
        self._confined = False
        self._confinement: BrokerAllowlist | None = None
        self._bwrap: str | None = None
        self._attaching: set[int] = set()
        self._serving = True

    def serve(self) -> None:
        self._watch(self._sock.fileno(), self._receive)
        while self._serving:
            self._turn(_min_deadline(self._unthrottle_dying(), self._end_short()))
        self._end()

    # -- orders ---------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, PACKET_MAX, _FDS_MAX)
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._serving = False
            return
        try:
            order = json.loads(packet)
        except ValueError as error:
            # The runtime sends none that is cut off, and hears nothing of this one.
            _say(f"an order cannot be read: {error}")
            _close(fds)
            return
        try:
            outcome = self._obey(order, fds)
        except SbxError as error:
            self._send({"seq": order["seq"], "error": error.to_dict()})
        except Exception as error:  # noqa: BLE001  # the border: one order fails, the broker lives
            broken = Broken(f"the broker could not {order['do']}: {error}")
            self._send({"seq": order["seq"], "error": broken.to_dict()})
        else:
            if outcome is not None:
                self._send({"seq": order["seq"], "ok": outcome})
        finally:
            _close(fds)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        if not self._confined or order["do"] in ("hello", "confine"):
            return self._act(order, fds)
        if self._confinement is None:
            raise Denied("nothing is done before it is known what may be", code="not_granted")
        if order["do"] in ("launch", "start_zygote"):
            self._check_bwrap(order)
        with self._confinement.checked(order) as allowed:
            return self._act(allowed, fds)

    def _act(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        match order["do"]:
            case "hello":
                return self._hello(order)
            case "confine":
                return self._confine(fds)
            case "make_sandbox":
                self._make_sandbox(order)
                return None  # answered before all of it is done
            case "map_owner":
                return self._map_owner(order)
            case "drop_sandbox":
                return self._drop_sandbox(order["sandbox"])
            case "look_at_disk":
                return self._look_at_disk(order["path"])
            case "charge":
                return _charge(order)
            case "usage":
                return self._usage(order["sandbox"])
            case "launch":
                self._launch(order, fds)
                return None  # answered when bwrap has said which process is PID 1
            case "start_zygote":
                self._start_zygote(order)
                return None  # answered when it has imported everything
            case "retire_zygote":
                return self._retire_zygote(order["zygote"])
            case "fork":
                self._fork(order, fds)
                return None  # answered when the jail is parked
            case "enter":
                return self._enter(order)
            case "inspect":
                return self._inspect(self._jail(order["jail"]), fresh=order["fresh"])
            case "attach" | "detach":
                self._attach(order)
                return None  # answered when the child that does it has ended
            case "mask":
                self._mask(order)
                return None  # answered when the child that does it has ended
            case "unlinked":
                return _unlinked(self._jail(order["jail"]), order["device"])
            case "ping":
                return {}
            case "counters":
                return _counters(self._jail(order["jail"]))
            case "kill":
                return self._kill(self._jails.get(order["jail"]))
            case unknown:
                raise Broken(f"the broker knows no order {unknown!r}")

    def _hello(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._hierarchy is not None:
            raise Broken("the broker has been greeted already")
        runtime = os.pidfd_open(order["runtime"])
        self._watch(runtime, self._runtime_ended)
        self._uids = range(order["uids"][0], order["uids"][0] + order["uids"][1])
        groups = cgroups.probe() if order["groups"] else _NO_GROUPS
        self._hierarchy = cgroups.open_hierarchy(groups, order["id"])
        self._hierarchy.sweep()
        self._take_namespaces()
        become = (self._uids[0], self._uids[0]) if self._root else None
        found = probe.probe(
            own_namespaces=self._own_namespaces,
            cgroup_layers=_layers(self._hierarchy),
            become=become,
            bwrap=order["bwrap"],
        )
        self._confined, self._bwrap = order["confined"], found.bwrap
        return found.to_json()

    def _confine(self, fds: list[int]) -> dict[str, Any]:
        """Never undone, and never widened."""
        from sbx.isolation.broker.allowlist import BrokerAllowlist

        if not self._confined or self._confinement is not None:
            raise Broken("the broker was told already what it may do")
        with open(os.dup(fds[0]), "rb") as told:
            self._confinement = BrokerAllowlist(json.load(told))
        return {}

    def _check_new(self, name: str) -> None:
        if self._confined and (name in self._jails or name in self._zygotes):
            raise Broken(f"there is a jail or a zygote {name} already")

    def _take_namespaces(self) -> None:
        """Own namespaces where this host lets us have them; the cold path does without.

        Root needs a mount namespace for the stage: without one it could start no jail as another
        uid, so there the failure is final.
        """
        if self._root:
            namespaces.unshare(namespaces.Namespace.MOUNT)
            mounts.receive_only("/")
            bind_staging.open_stage()
            self._own_namespaces = True
            return
        uid, gid = os.geteuid(), os.getegid()
        if _in_child(lambda: _enter_own_namespaces(uid, gid)):
            _enter_own_namespaces(uid, gid)
            bind_staging.open_stage()
            self._own_namespaces = True

    def _make_sandbox(self, order: dict[str, Any]) -> None:
        uid = order["uid"]
        if not self._root:
            become = None
        else:
            uid = self._free_uid() if uid is None else uid
            if uid == 0:
                raise Broken("no sandbox may run as uid 0 of the host")
            self._check_uid(uid)
            become = (uid, uid)
        assert self._hierarchy is not None  # hello came first
        group = self._hierarchy.make_sandbox(
            order["sandbox"], cgroups.CgroupLimits(**order["limits"])
        )
        made = self._sandboxes[order["sandbox"]] = _Sandbox(group, become)
        uid, gid = become or (os.geteuid(), os.getegid())
        self._send({"seq": order["seq"], "ok": {"uid": uid, "gid": gid}})
        try:
            made.make_spare()
        except OSError as error:  # the first jail makes it then, and is told why it cannot
            _say(f"no group could be made ahead: {error}")
        try:
            made.memory = group.watch_memory()
        except OSError as error:
            _say(f"a jail that is out of memory will not end as a whole: {error}")
        if made.memory is not None:
            self._watch(made.memory, lambda: self._is_short(made))

    def _check_uid(self, uid: int) -> None:
        if self._confined and uid not in self._uids:
            raise Broken(
                f"the host uid {uid} is none of those that sandboxes of this service may have",
                hint="let the setting uid_range be what it was when the sandbox was made",
            )

    def _check_bwrap(self, order: dict[str, Any]) -> None:
        if order["bwrap"] != self._bwrap:
            raise Broken("that is not the bwrap which this broker found")

    def _free_uid(self) -> int:
        """A uid that no other sandbox of this broker has; random, as other runtimes choose too."""
        taken = {sandbox.become[0] for sandbox in self._sandboxes.values() if sandbox.become}
        taken |= {zygote.uid for zygote in self._zygotes.values() if zygote.uid is not None}
        if len(taken) >= len(self._uids):
            raise Unavailable(
                "every host uid of the range for sandboxes is in use",
                hint="widen the setting uid_range, or close sandboxes",
            )
        while True:
            chosen = int.from_bytes(os.urandom(8)) % len(self._uids)
            if self._uids[chosen] not in taken:
                return self._uids[chosen]

    def _map_owner(self, order: dict[str, Any]) -> dict[str, Any]:
        sandbox = self._sandboxes[order["sandbox"]]
        if sandbox.become is None or sandbox.owners is not None:
            raise Broken("the owner of one directory is mapped, once, by a broker that is root")
        sandbox.owners = userns.map_owner(
            order["source"], order["expected"], sandbox.become, order.get("shown")
        )
        return {}

    def _drop_sandbox(self, name: str) -> dict[str, Any]:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            if sandbox.owners is not None:
                os.close(sandbox.owners)
                sandbox.owners = None
            if sandbox.memory is not None:
                self._unwatch(sandbox.memory)
                os.close(sandbox.memory)
                sandbox.memory = None
            self._remove_group(sandbox)
        return {}

    def _remove_group(self, sandbox: _Sandbox) -> None:
        """A jail that takes long to die holds it, and takes it along when it is buried.

        Once: a sandbox that is opened again has groups of the same names.
        """
        sandbox.dropped = True
        try:
            sandbox.group.remove(_REMOVE_S)
        except TimeoutError:
            if not any(jail.sandbox is sandbox for jail in self._jails.values()):
                raise
        else:
            sandbox.removed = True

    def _is_short(self, sandbox: _Sandbox) -> None:
        assert sandbox.memory is not None
        with suppress(BlockingIOError):
            os.read(sandbox.memory, 8)
        sandbox.short_until = time.monotonic() + _SHORT_S

    def _end_short(self) -> float | None:
        """End each jail in which a process was killed for memory: those that waited for it would
        hang, or go on with a part of their state. linux says that memory ran out before it kills,
        so this looks for a while; seconds to the next look."""
        now = time.monotonic()
        short = [one for one in self._sandboxes.values() if one.short_until > now]
        for jail in self._jails.values() if short else ():
            if jail.sandbox in short and jail.name not in self._dying and jail.group is not None:
                with suppress(OSError):  # then its counters are read when it has ended
                    if jail.group.group.events().oom_kills > 0:
                        self._kill(jail)
        return _SHORT_LOOK_S if short else None

    @staticmethod
    def _look_at_disk(path: str) -> dict[str, Any]:
        from sbx.isolation import project_quota

        return {"layer": asdict(project_quota.layer(path)), **project_quota.mounted(path)._asdict()}

    def _usage(self, name: str) -> dict[str, Any]:
        sandbox = self._sandboxes.get(name)
        if sandbox is None or self._hierarchy is None:
            raise Broken(f"there is no sandbox {name}", code="sandbox_gone")
        jails = [
            jail.pid1
            for jail in self._jails.values()
            if jail.sandbox is sandbox and jail.pid1 is not None
        ]
        try:
            used = sandbox.group.usage()
        except OSError as error:
            _say(f"what a sandbox uses is not known: {error}")
            used = cgroups.CgroupUsage()
        counted = {"jails": len(jails), "network": _network(jails)}
        return {"version": self._hierarchy.version, **used._asdict(), **counted}

    def _launch(self, order: dict[str, Any], fds: list[int]) -> None:
        """Start bwrap; answered when bwrap says which process is PID 1, or ends before that."""
        name, sandbox = order["jail"], self._sandboxes[order["sandbox"]]
        self._check_new(name)
        control, kernel = fds
        with ExitStack() as undo:
            group = sandbox.take_group()
            undo.callback(group.group.remove, _REMOVE_S)
            undo.callback(bind_staging.clear, name)
            order = {**order, "own_shares": self._own_namespaces}
            started = spawn.start_jail(
                order, (control, kernel), sandbox.become, group.group.enter, sandbox.owners
            )
            undo.pop_all()
        guarded = bool(order.get("guarded"))
        jail = _Jail(name, order["seq"], sandbox, group, started, info=b"", guarded=guarded)
        self._jails[name] = jail
        self._watch(started.info_fd, lambda: self._learn_pid1(jail, started))
        self._watch(started.monitor_fd, lambda: self._monitor_ended(jail, started))

    def _learn_pid1(self, jail: _Jail, started: spawn.Started) -> None:
        assert jail.info is not None
        chunk = os.read(started.info_fd, 4096)
        jail.info += chunk
        try:
            pid = int(json.loads(jail.info)["child-pid"])
        except ValueError:
            if not chunk:
                self._forget_info(jail, started)
            return
        self._forget_info(jail, started)
        try:
            jail.pid1_fd = os.pidfd_open(pid)
            if procfs.status(pid).get("PPid") != str(started.monitor):
                return  # it ended already: the monitor's end, which follows, gives the answer
        except OSError:
            return
        jail.pid1 = pid
        self._answer(jail, {"pid": pid})

    def _forget_info(self, jail: _Jail, started: spawn.Started) -> None:
        jail.info = None
        self._unwatch(started.info_fd)
        os.close(started.info_fd)

    def _answer(self, jail: _Jail, outcome: dict[str, Any]) -> None:
        jail.answered = True
        self._send({"seq": jail.seq, "ok": outcome})

    # -- zygotes and what they fork -------------------------------------------------------------

    def _start_zygote(self, order: dict[str, Any]) -> None:
        become = None
        uids = [self._uids]
        self._check_new(order["zygote"])
        if self._root:
            own = self._free_uid()
            become = (own, own)
            if order["uid"] is not None and order["uid"] not in self._uids:
                self._check_uid(order["uid"])
                uids.append(range(order["uid"], order["uid"] + 1))
        with ExitStack() as undo:
            undo.callback(bind_staging.clear, order["zygote"])
            zygote = zygotes.start(order, become, uids)
            undo.pop_all()
        self._zygotes[zygote.name] = zygote
        self._watch(zygote.orders.fileno(), lambda: self._hear_zygote(zygote))
        self._watch(zygote.started.monitor_fd, lambda: self._on_zygote_exit(zygote))

    def _hear_zygote(self, zygote: zygotes.ZygoteProcess) -> None:
        packet, fds = zygote.read()
        if not packet:
            self._zygote_ended(zygote, "it ended")
        elif not zygote.ready:
            said = json.loads(packet)
            if "ready" in said:
                zygote.ready = True
                self._send({"seq": zygote.seq, "ok": said["ready"]})
            else:
                zygote.refused = said["refused"]
        else:
            name, why = zygote.jail_of(packet)
            if not why:
                self._adopt(self._jails.get(name), fds)
            elif (failed := self._jails.get(name)) is not None:
                failed.said = why
                self._on_exit(failed)

    def _zygote_ended(self, zygote: zygotes.ZygoteProcess, why: str) -> None:
        """It takes no further order; jails that it had not yet told of end by themselves."""
        if zygote.retired:
            return
        self._unwatch(zygote.orders.fileno())
        zygote.orders.close()
        for jail in [one for one in self._jails.values() if one.zygote == zygote.name]:
            if jail.pid1_fd is None:
                jail.said = "its zygote ended"
                self._on_exit(jail)
        if zygote.ready:
            self._send({"event": "zygote_gone", "zygote": zygote.name, "why": why})

    def _retire_zygote(self, name: str) -> dict[str, Any]:
        if (zygote := self._zygotes.get(name)) is not None:
            self._zygote_ended(zygote, "it was retired")
        return {}

    def _on_zygote_exit(self, zygote: zygotes.ZygoteProcess) -> None:
        """Its PID 1 has ended: the zygote and every jail that it forked before it."""
        said = self._monitor_said(zygote.started)
        os.close(zygote.started.info_fd)
        self._zygote_ended(zygote, "PID 1 of its namespace ended")
        try:
            bind_staging.clear(zygote.name)
        except OSError as error:
            _say(f"a bind of a zygote is left until the broker ends: {error}")
        del self._zygotes[zygote.name]
        if not zygote.ready:
            cause = zygote.refused or said or "it ended without a word"
            failed = Unavailable(
                f"no zygote can be had: {cause}",
                code="zygote_failed",
                hint="kernels start by the cold path instead; `sbx doctor` tells which paths work",
            )
            self._send({"seq": zygote.seq, "error": failed.to_dict()})

    def _fork(self, order: dict[str, Any], fds: list[int]) -> None:
        self._check_new(order["jail"])
        zygote = self._zygotes.get(order["zygote"])
        if zygote is None or zygote.retired:
            raise Unavailable("the zygote has ended", code="zygote_gone")
        control, kernel = fds
        setup = zygote.fork(order["jail"], control, kernel, ahead=order["ahead"])
        jail = _Jail(order["jail"], order["seq"], setup=setup, zygote=zygote.name)
        self._jails[jail.name] = jail
        self._watch(setup.fileno(), lambda: self._hear_setup(jail))

    def _adopt(self, jail: _Jail | None, pidfds: list[int]) -> None:
        if len(pidfds) < 2:  # linux drops what there is no room for: see SCM_RIGHTS in unix(7)
            _close(pidfds)
            if jail is not None:
                jail.said = "the broker has no descriptor left"
                self._on_exit(jail)  # it ends by the end of its sockets
            return
        pid1_fd, kernel_fd = pidfds
        try:
            pids = procfs.pid_of(pid1_fd), procfs.pid_of(kernel_fd)
        except OSError as error:
            _close(pidfds)
            if jail is not None:
                jail.said = f"its processes cannot be known: {error.strerror}"
                self._on_exit(jail)
            return
        if jail is None:
            _close(pidfds)  # it was given up meanwhile, and ends by the end of its sockets
            return
        jail.pid1_fd, jail.kernel_fd = pid1_fd, kernel_fd
        jail.pid1, jail.kernel = pids
        self._watch(pid1_fd, lambda: self._on_exit(jail))
        self._answer_if_parked(jail)

    def _answer_if_parked(self, jail: _Jail) -> None:
        """Two sockets tell of a fork, the zygote's and the jail's own, in either order."""
        if jail.parked and jail.pid1 is not None:
            self._answer(jail, {"pid": jail.pid1, "kernel": jail.kernel})

    def _hear_setup(self, jail: _Jail) -> None:
        assert jail.setup is not None
        try:
            packet = jail.setup.recv(PACKET_MAX)
        except OSError:
            packet = b""
        said = json.loads(packet) if packet else {}
        if said.get("parked"):
            jail.parked = True
            self._answer_if_parked(jail)
        else:
            jail.said = said.get("refused", "")
            self._close_setup(jail)  # it ends by that, and its end gives the answer

    def _close_setup(self, jail: _Jail) -> None:
        if jail.setup is not None:
            self._unwatch(jail.setup.fileno())
            jail.setup.close()
            jail.setup = None

    def _enter(self, order: dict[str, Any]) -> dict[str, Any]:
        """From here on the jail is its sandbox's, or it ends."""
        jail, sandbox = self._jail(order["jail"]), self._sandboxes[order["sandbox"]]
        if jail.setup is None:
            raise Broken("the jail is not parked")
        try:
            jail.group = sandbox.take_group()
            jail.sandbox = sandbox
            ids = sandbox.become or (os.geteuid(), os.getegid())
            zygotes.enter(jail.setup, order, ids, jail.group.group, sandbox.owners)
        except BaseException:
            self._kill(jail)
            raise
        finally:
            self._close_setup(jail)
        return {"limits": jail.group.limits._asdict()}

    def _inspect(self, jail: _Jail, *, fresh: bool) -> dict[str, Any]:
        """What linux says of its processes now, and with `fresh` of its group: else the limits as
        they were when that was made, which somebody who waits for a start need not read again."""
        if jail.pid1 is None or jail.group is None:
            raise Broken("the jail is in no sandbox yet")
        kernel = jail.kernel or _first_child(jail.pid1)
        if jail.guarded and jail.kernel is None and kernel is not None:
            kernel = _first_child(kernel)  # the path guard is PID 1, and the supervisor its child
        read = facts.read(jail.pid1, kernel)
        if not fresh:
            return {**read, "limits": jail.group.limits._asdict(), "in_group": None}
        group = jail.group.group
        inside = {jail.pid1, kernel} <= {*group.pids(), None} if group.path else None
        return {**read, "limits": group.limits()._asdict(), "in_group": inside}

    def _attach(self, order: dict[str, Any]) -> None:
        """Mount a directory into a jail that lives, or take it away: see `attaching`."""
        from sbx.isolation.broker import live_mounts

        jail, target = self._jail(order["jail"]), order["target"]
        if jail.pid1_fd is None or jail.group is None:
            raise Broken("the jail is in no sandbox yet")
        if not self._own_namespaces:
            raise live_mounts.refuse_without_namespaces()
        if not live_mounts.is_target(target):
            raise Broken(f"nothing is mounted at {target}")
        attach = order["do"] == "attach"
        if attach:
            if target in jail.attached:
                raise live_mounts.taken(target)
            tree = live_mounts.open_source(
                order["source"], order["expected"], read_only=order["read_only"]
            )
        elif (tree := jail.attached.pop(target, -1)) < 0:
            raise live_mounts.not_there(target)
        how = {}
        if attach:
            how = {"mask": order["mask"], "partly": order["partly"], "pin": not order["read_only"]}
        self._mount(jail, target, tree, attach=attach, seq=order["seq"], **how)

    def _mask(self, order: dict[str, Any]) -> None:
        """Cover the host's sockets and FIFOs in these places of a jail: see `masking`."""
        from sbx.isolation.broker import live_mounts

        jail, places = self._jail(order["jail"]), order["places"]
        if jail.pid1_fd is None or jail.group is None:
            raise Broken("the jail is in no sandbox yet")
        if not self._own_namespaces:
            raise live_mounts.refuse_without_namespaces()
        child = live_mounts.begin_masks(jail.pid1_fd, places)
        self._attaching.add(child.pid)

        def ended() -> None:
            self._unwatch(child.pidfd)
            self._attaching.discard(child.pid)
            done = live_mounts.end(child, ", ".join(places))
            error = live_mounts.gone() if jail.name not in self._jails else done.error
            outcome = {"error": error.to_dict()} if error else {"ok": done.masks._asdict()}
            self._send({"seq": order["seq"], **outcome})

        self._watch(child.pidfd, ended)

    def _mount(
        self,
        jail: _Jail,
        target: str,
        tree: int,
        *,
        attach: bool,
        seq: int | None,
        mask: bool = False,
        partly: bool = False,
        pin: bool = False,
    ) -> None:
        """Start the child that does it; with `seq`, what becomes of it is answered."""
        from sbx.isolation.broker import live_mounts

        assert jail.pid1_fd is not None
        try:
            child = live_mounts.begin(
                jail.pid1_fd, target, tree, attach=attach, mask=mask, partly=partly, pin=pin
            )
        except BaseException:
            os.close(tree)
            raise
        self._attaching.add(child.pid)

        def ended() -> None:
            self._unwatch(child.pidfd)
            self._attaching.discard(child.pid)
            error, clone, masks = live_mounts.end(child, target)
            shown = tree
            if clone is not None:
                os.close(tree)
                shown = clone
            there = jail.name in self._jails
            if seq is not None:
                told = live_mounts.gone() if error is not None and not there else error
                done = {"ok": {"masked": masks.masked}}
                outcome = done if told is None else {"error": told.to_dict()}
                self._send({"seq": seq, **outcome})
            if there and seq is not None and attach == (error is None):
                jail.attached[target] = shown  # attached, or not to be detached now
            elif there and attach and error is not None and error.code == "mount_failed":
                self._mount(jail, target, shown, attach=False, seq=None)  # it may have come so far
            else:
                os.close(shown)

        self._watch(child.pidfd, ended)

    def _kill(self, jail: _Jail | None) -> dict[str, Any]:
        if jail is None:
            return {}
        self._close_setup(jail)
        if jail.kernel_fd is not None:
            # PID 1 would end it, too, but only after its own memory is gone: so they end side by
            # side, on two CPUs.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(jail.kernel_fd, signal.SIGKILL)
        monitor_fd = jail.started.monitor_fd if jail.started is not None else None
        for fd in (jail.pid1_fd, monitor_fd):
            if fd is not None:
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    break
                except ProcessLookupError:
                    continue
        self._dying.setdefault(jail.name, time.monotonic() + _DIES_BY_ITSELF_S)
        return {}

    def _unthrottle_dying(self) -> float | None:
        """Lift the CPU quota of sandboxes with a jail that is still dying; seconds to the next one.

        Under a small quota a killed fork bomb dies for many seconds. Most jails are gone within a
        few milliseconds, and to change a quota takes linux as long: it rewrites its own code when
        the first one comes or the last one goes.
        """
        now = time.monotonic()
        for name in [name for name, due in self._dying.items() if due <= now]:
            del self._dying[name]
            if (jail := self._jails.get(name)) is not None and jail.sandbox is not None:
                jail.sandbox.dying.add(name)
                self._throttle(jail.sandbox)
        return min(self._dying.values()) - now if self._dying else None

    def _throttle(self, sandbox: _Sandbox) -> None:
        """No CPU quota while a jail of the sandbox dies."""
        try:
            sandbox.group.throttle(not sandbox.dying)
        except OSError as error:
            _say(f"the CPU quota of a sandbox is not as it should be: {error}")

    # -- ends -----------------------------------------------------------------------------------

    def _monitor_ended(self, jail: _Jail, started: spawn.Started) -> None:
        """The monitor ended, and PID 1 and all of its namespace before it."""
        jail.said = self._monitor_said(started)
        if jail.info is not None:
            self._forget_info(jail, started)
        self._on_exit(jail)

    def _monitor_said(self, started: spawn.Started) -> str:
        """Reap a bubblewrap that has ended; what it wrote as its last words."""
        self._unwatch(started.monitor_fd)
        _, status = os.waitpid(started.monitor, 0)
        os.close(started.monitor_fd)
        self._kill_orphans()
        said = os.pread(started.stderr_fd, _STDERR_MAX, 0).decode(errors="replace").strip()
        os.close(started.stderr_fd)
        code = os.waitstatus_to_exitcode(status)
        if said or code == 0:
            return said
        return f"killed by signal {-code}" if code < 0 else f"it ended with code {code}"

    def _on_exit(self, jail: _Jail) -> None:
        """Every process of the jail has ended, or will by the end of its sockets, where its zygote
        ended before it told of them: leave nothing of it behind."""
        self._close_setup(jail)
        if jail.pid1_fd is not None:
            if jail.started is None:
                self._unwatch(jail.pid1_fd)
            os.close(jail.pid1_fd)
        if jail.kernel_fd is not None:
            os.close(jail.kernel_fd)
        for tree in jail.attached.values():
            os.close(tree)
        counters = _counters(jail)
        del self._jails[jail.name]
        # Before anything is cleared away: the next order is obeyed after that in any case.
        if jail.answered:
            self._send({"event": "gone", "jail": jail.name, "stderr": jail.said, **counters})
        else:
            self._send_failure(jail)
        self._clear_away(jail)
        self._dying.pop(jail.name, None)
        if jail.sandbox is not None and jail.name in jail.sandbox.dying:
            jail.sandbox.dying.remove(jail.name)
            self._throttle(jail.sandbox)

    def _send_failure(self, jail: _Jail) -> None:
        who = "bwrap could not start the jail" if jail.zygote is None else "no jail could be forked"
        failed = Unavailable(
            f"{who}: {jail.said or 'it ended without a word'}",
            code="launch_failed",
            hint="run `sbx doctor`: it names the layer that this host refuses and the remedy",
        )
        self._send({"seq": jail.seq, "error": failed.to_dict()})

    def _kill_orphans(self) -> None:
        """Kill what a monitor left that was itself killed, and see it gone within a bounded time.

        bwrap's first child waits for its monitor without end until it has set a parent-death
        signal, and where there is no cgroup nobody else would find it. A subreaper's orphans are
        its own children, so their numbers are theirs until they are reaped here.
        """
        monitors = {jail.started.monitor for jail in self._jails.values() if jail.started}
        monitors |= {zygote.started.monitor for zygote in self._zygotes.values()}
        for pid in set(procfs.children(os.getpid())) - monitors - self._attaching:
            os.kill(pid, signal.SIGKILL)
            ending = os.pidfd_open(pid)
            try:
                poll = select.poll()  # select(2) knows no descriptor beyond 1023
                poll.register(ending, select.POLLIN)
                if poll.poll(_REMOVE_S * 1000):
                    os.waitpid(pid, 0)
            finally:
                os.close(ending)

    def _clear_away(self, jail: _Jail) -> None:
        """Its group and its binds. What cannot be removed now is swept by the next runtime."""
        sandbox = jail.sandbox
        try:
            if jail.group is not None and sandbox is not None and not sandbox.removed:
                _remove(jail.group.group)
                if sandbox.dropped:
                    self._remove_group(sandbox)
        except OSError as error:
            _say(f"the cgroup of jail {jail.name} is left: {error}")
        try:
            if jail.started is not None:
                bind_staging.clear(jail.name)
        except OSError as error:
            _say(f"a bind of jail {jail.name} is left until the broker ends: {error}")

    def _runtime_ended(self) -> None:
        self._serving = False

    def _end(self) -> None:
        """Everything ends with the broker, and within a bounded time."""
        for jail in self._jails.values():
            self._kill(jail)
        for zygote in list(self._zygotes.values()):
            self._zygote_ended(zygote, "the broker ends")
        deadline = time.monotonic() + _LAST_WORDS_S
        while (self._jails or self._zygotes) and time.monotonic() < deadline:
            due_s = self._unthrottle_dying()
            left_s = deadline - time.monotonic()
            self._turn(left_s if due_s is None else min(left_s, due_s))
        if self._hierarchy is not None:
            try:
                self._hierarchy.close()
            except OSError as error:
                _say(f"cgroups are left: {error}")

    # -- the loop -------------------------------------------------------------------------------

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # An earlier one of this turn may have ended it, and given its number to another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _watch(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def _send(self, packet: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(packet).encode())
        except OSError:
            self._serving = False

    def _jail(self, name: str) -> _Jail:
        try:
            return self._jails[name]
        except KeyError:
            raise Broken(f"there is no jail {name}", code="jail_gone") from None


def _enter_own_namespaces(uid: int, gid: int) -> None:
    namespaces.unshare(namespaces.Namespace.USER | namespaces.Namespace.MOUNT)
    namespaces.map_ids_to_self(uid, gid)
    shares.keep_half_of_inotify()
    mounts.receive_only("/")


def _in_child(act: Callable[[], object]) -> bool:
    """Whether `act` works, tried in a child.

    Where AppArmor restricts user namespaces, unshare(2) succeeds and what follows is refused: a
    process that tried it for itself would be stuck there as nobody, and its bwrap with it, although
    bwrap has a profile of its own under which all would go well.
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


def _layers(hierarchy: cgroups.Hierarchy) -> list[probe.Layer]:
    """What the groups can limit, in the words of the other layers."""
    found = hierarchy.capabilities
    layers = []
    for name in cgroups.CONTROLLERS:
        if name in found.controllers:
            detail = f"cgroup v{found.version}"
            if name == "io" and found.version == 1:
                detail += ": direct and synchronous writes only, not those through the page cache"
            layers.append(probe.Layer(name, True, detail))
        else:
            missing = found.missing[name]
            layers.append(
                probe.Layer(name, False, "no cgroup limit", missing.cause, missing.remedy)
            )
    return layers


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _say(text: str) -> None:
    print(f"sbx broker: {text}", file=sys.stderr, flush=True)


def _remove(group: cgroups.JailGroup) -> None:
    """As a rule it is empty by now; what a killed monitor left in it is killed first."""
    try:
        group.remove(0)
    except TimeoutError:
        group.kill()
        group.remove(_REMOVE_S)


def _counters(jail: _Jail) -> dict[str, int]:
    try:
        events = jail.group.group.events() if jail.group is not None else cgroups.CgroupEvents()
    except OSError as error:
        _say(f"what the group of jail {jail.name} counted is not known: {error}")
        events = cgroups.CgroupEvents()
    return {"oom_kills": events.oom_kills, "pids_max_hits": events.pids_max_hits}


def _unlinked(jail: _Jail, device: int) -> dict[str, int]:
    """Every order waits meanwhile, so only a few thousand files are looked at each time."""
    roots = [pid for pid in (jail.pid1, jail.kernel) if pid is not None]
    pids = [pid for root in roots for pid in procfs.descendants(root)]
    try:
        found, files = procfs.unlinked_of(pids, device, _UNLINKED_S)
    except PermissionError as error:
        _say(f"a jail hides which files it holds open: {error}")
        found = files = 0
    return {"bytes": found, "files": files}


def _min_deadline(one_s: float | None, other_s: float | None) -> float | None:
    return min((due_s for due_s in (one_s, other_s) if due_s is not None), default=None)


def _first_child(pid: int) -> int | None:
    return next(iter(procfs.children(pid)), None)


def _network(jails: Sequence[int]) -> list[int] | None:
    """Bytes that live jails received and sent, and what they sent to themselves."""
    received = sent = loopback = 0
    seen = False
    for pid in jails:
        try:
            interfaces = procfs.traffic(pid)
        except (OSError, ValueError, IndexError):
            continue
        seen = True
        loopback += interfaces.pop("lo", (0, 0))[1]
        received += sum(one for one, _ in interfaces.values())
        sent += sum(other for _, other in interfaces.values())
    return [received, sent, loopback] if seen or not jails else None


def main() -> None:
    """Serve on fd 0 until the runtime ends."""
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # the program's may be 077, and other uids must be able to walk the stage
    prctl.set_child_subreaper(True)
    # To pass descriptors while a jail has many in flight: Linux compares the number that the user
    # has in flight with the limit of the sender.
    raise_nofile_limit(_OPEN_FILES_MAX)
    BrokerServer(sock).serve()
    sys.exit(0)
