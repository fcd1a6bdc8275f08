"""The broker: the one process that holds namespaces, mounts, cgroups and the right to choose uids.

A program that embeds sbx must not be changed by it (no unshare, no signal handler, no fork beside
its threads), and a process that parses HTTP needs no privilege. So the runtime starts this process
once, with `python -I -S`, and asks it for everything that needs a privilege or a fork. It has one
thread and imports the standard library only.

It talks on a SOCK_SEQPACKET socket, its fd 0: one JSON object a packet.

    → {"seq": n, "do": "hello", "runtime": pid, "bwrap": path|null, "uids": [first, count],
       "groups": bool, "id": str}                                          ← capabilities
    → {"seq": n, "do": "make_sandbox", "sandbox": id, "limits": {…}, "uid": n|null} ← {"uid", "gid"}
    → {"seq": n, "do": "drop_sandbox", "sandbox": id}                     ← {}
    → {"seq": n, "do": "launch", "sandbox", "jail", "bwrap", "args": […], "command": […],
       "files": [text], "filter": hex, "stage": [[index, source, [dev, ino]|null], …]}
      with two fds: the jail's ends of its control and kernel sockets     ← {"pid": PID 1's}
    → {"seq": n, "do": "inspect", "jail": id}   ← {"pid1": facts, "kernel": facts, "limits": {…}}
    → {"seq": n, "do": "counters", "jail": id}  ← {"oom_kills", "pids_max_hits"}
    → {"seq": n, "do": "kill", "jail": id}      ← {}; the `gone` event says when it is over
    ← {"seq": n, "ok": {…}}  or  {"seq": n, "error": {"code", "message", "hint", "details"}}
    ← {"event": "gone", "jail": id, "stderr": text, "oom_kills": n, "pids_max_hits": n}

It ends when that socket does or when the runtime's process does, whichever is seen first (a forked
child of the runtime may keep the socket open), never by a parent-death signal: those fire when a
*thread* of the parent ends. Everything it started ends with it.

A jail is killed by the pidfd of its PID 1, and by its cgroup where there is one; no pid is
remembered and signalled later.
"""

import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from sbx.errors import Broken, SbxError, Unavailable
from sbx.isolation import cgroups, probe, spawn, staging
from sbx.linux import mounts, namespaces, prctl, procfs

PACKET_MAX = 1 << 17
_FDS_MAX = 4
_STDERR_MAX = 4096
_LAST_WORDS_S = 3.0
_REMOVE_S = 1.0
_NO_GROUPS = cgroups.CgroupCapabilities(
    version=0,
    controllers={},
    missing=dict.fromkeys(
        ("memory", "tasks", "cpu", "io"),
        cgroups.Missing("cgroups are turned off by the settings", "set cgroups = true"),
    ),
)


@dataclass(slots=True)
class _Sandbox:
    group: cgroups.SandboxGroup
    become: tuple[int, int] | None
    dying: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Jail:
    """What the broker holds of one jail, until everything of it is gone."""

    name: str
    seq: int
    sandbox: _Sandbox
    group: cgroups.JailGroup
    started: spawn.Started
    info: bytes | None = b""
    pid1: int | None = None
    pid1_fd: int | None = None


class Broker:
    """Serves one runtime. `serve` returns when the runtime is gone and all jails with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._sandboxes: dict[str, _Sandbox] = {}
        self._jails: dict[str, _Jail] = {}
        self._hierarchy: cgroups.Hierarchy | None = None
        self._root = os.geteuid() == 0
        self._own_namespaces = False
        self._serving = True

    def serve(self) -> None:
        self._watch(self._sock.fileno(), self._receive)
        while self._serving:
            self._turn(None)
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
        order = json.loads(packet)
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
            for fd in fds:
                os.close(fd)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        match order["do"]:
            case "hello":
                return self._hello(order)
            case "make_sandbox":
                return self._make_sandbox(order)
            case "drop_sandbox":
                return self._drop_sandbox(order["sandbox"])
            case "launch":
                self._launch(order, fds)
                return None  # answered when bwrap has said which process is PID 1
            case "inspect":
                return self._inspect(self._jail(order["jail"]))
            case "counters":
                return _counters(self._jail(order["jail"]).group)
            case "kill":
                return self._kill(self._jails.get(order["jail"]))
            case unknown:
                raise Broken(f"the broker knows no order {unknown!r}")

    def _hello(self, order: dict[str, Any]) -> dict[str, Any]:
        runtime = os.pidfd_open(order["runtime"])
        self._watch(runtime, self._runtime_ended)
        self._uids = range(order["uids"][0], order["uids"][0] + order["uids"][1])
        groups = cgroups.probe() if order["groups"] else _NO_GROUPS
        self._hierarchy = cgroups.open_hierarchy(groups, order["id"])
        self._hierarchy.sweep()
        self._take_namespaces()
        become = (self._uids[0], self._uids[0]) if self._root else None
        return probe.probe(
            own_namespaces=self._own_namespaces,
            cgroup_layers=_layers(self._hierarchy),
            become=become,
            bwrap=order["bwrap"],
        ).to_json()

    def _take_namespaces(self) -> None:
        """Own namespaces where this host lets us have them; the cold path does without.

        Root needs a mount namespace for the stage: without one it could start no jail as another
        uid, so there the failure is final.
        """
        if self._root:
            namespaces.unshare(namespaces.Namespace.MOUNT)
            mounts.receive_only("/")
            staging.open_stage()
            self._own_namespaces = True
            return
        uid, gid = os.geteuid(), os.getegid()
        if _in_child(lambda: _enter_own_namespaces(uid, gid)):
            _enter_own_namespaces(uid, gid)
            self._own_namespaces = True

    def _make_sandbox(self, order: dict[str, Any]) -> dict[str, Any]:
        uid = order["uid"]
        if not self._root:
            become = None
        else:
            uid = self._free_uid() if uid is None else uid
            if uid == 0:
                raise Broken("no sandbox may run as uid 0 of the host")
            become = (uid, uid)
        assert self._hierarchy is not None  # hello came first
        group = self._hierarchy.make_sandbox(order["sandbox"], cgroups.Limits(**order["limits"]))
        self._sandboxes[order["sandbox"]] = _Sandbox(group, become)
        uid, gid = become or (os.geteuid(), os.getegid())
        return {"uid": uid, "gid": gid}

    def _free_uid(self) -> int:
        """A uid that no other sandbox of this broker has; random, as other runtimes choose too."""
        taken = {sandbox.become[0] for sandbox in self._sandboxes.values() if sandbox.become}
        if len(taken) >= len(self._uids):
            raise Unavailable(
                "every host uid of the range for sandboxes is in use",
                hint="widen the setting uid_range, or close sandboxes",
            )
        while True:
            chosen = int.from_bytes(os.urandom(8)) % len(self._uids)
            if self._uids[chosen] not in taken:
                return self._uids[chosen]

    def _drop_sandbox(self, name: str) -> dict[str, Any]:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.group.remove(_REMOVE_S)
        return {}

    def _launch(self, order: dict[str, Any], fds: list[int]) -> None:
        """Start bwrap; answered when bwrap says which process is PID 1, or ends before that."""
        name, sandbox = order["jail"], self._sandboxes[order["sandbox"]]
        control, kernel = fds
        with ExitStack() as undo:
            group = sandbox.group.make_jail(name)
            undo.callback(group.remove, _REMOVE_S)
            undo.callback(staging.clear, name)
            started = spawn.start_jail(order, (control, kernel), sandbox.become, group.enter)
            undo.pop_all()
        jail = _Jail(name, order["seq"], sandbox, group, started)
        self._jails[name] = jail
        self._watch(started.info_fd, lambda: self._learn_pid1(jail))
        self._watch(started.monitor_fd, lambda: self._bury(jail))

    def _learn_pid1(self, jail: _Jail) -> None:
        assert jail.info is not None
        chunk = os.read(jail.started.info_fd, 4096)
        jail.info += chunk
        try:
            pid = int(json.loads(jail.info)["child-pid"])
        except ValueError:
            if not chunk:
                self._forget_info(jail)
            return
        self._forget_info(jail)
        try:
            jail.pid1_fd = os.pidfd_open(pid)
            if procfs.status(pid).get("PPid") != str(jail.started.monitor):
                return  # it ended already: the monitor's end, which follows, gives the answer
        except OSError:
            return
        jail.pid1 = pid
        self._send({"seq": jail.seq, "ok": {"pid": pid}})

    def _forget_info(self, jail: _Jail) -> None:
        jail.info = None
        self._unwatch(jail.started.info_fd)
        os.close(jail.started.info_fd)

    def _inspect(self, jail: _Jail) -> dict[str, Any]:
        if jail.pid1 is None:
            raise Broken("the jail has no PID 1 to inspect")
        inside = procfs.children(jail.pid1)
        return {
            "pid1": _facts(jail.pid1),
            "kernel": _facts(inside[0]) if inside else None,
            "limits": jail.group.limits()._asdict(),
        }

    def _kill(self, jail: _Jail | None) -> dict[str, Any]:
        if jail is None:
            return {}
        for fd in (jail.pid1_fd, jail.started.monitor_fd):
            if fd is not None:
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    break
                except ProcessLookupError:
                    continue
        jail.sandbox.dying.add(jail.name)
        self._throttle(jail.sandbox)
        return {}

    def _throttle(self, sandbox: _Sandbox) -> None:
        """No CPU quota while a jail of the sandbox dies: it would make that take long."""
        try:
            sandbox.group.throttle(not sandbox.dying)
        except OSError as error:
            _say(f"the CPU quota of a sandbox is not as it should be: {error}")

    # -- ends -----------------------------------------------------------------------------------

    def _bury(self, jail: _Jail) -> None:
        """The monitor ended, and PID 1 and all of its namespace before it: leave nothing behind."""
        started = jail.started
        self._unwatch(started.monitor_fd)
        os.waitpid(started.monitor, 0)
        os.close(started.monitor_fd)
        self._end_orphans()
        if jail.info is not None:
            self._forget_info(jail)
        if jail.pid1_fd is not None:
            os.close(jail.pid1_fd)
        said = os.pread(started.stderr_fd, _STDERR_MAX, 0).decode(errors="replace").strip()
        os.close(started.stderr_fd)
        counters = _counters(jail.group)
        self._clear_away(jail)
        del self._jails[jail.name]
        if jail.name in jail.sandbox.dying:
            jail.sandbox.dying.remove(jail.name)
            self._throttle(jail.sandbox)
        if jail.pid1 is not None:
            self._send({"event": "gone", "jail": jail.name, "stderr": said, **counters})
            return
        failed = Unavailable(
            f"bwrap could not start the jail: {said or 'it ended without a word'}",
            code="launch_failed",
            hint="run `sbx doctor`: it names the layer that this host refuses and the remedy",
        )
        self._send({"seq": jail.seq, "error": failed.to_dict()})

    def _end_orphans(self) -> None:
        """Kill what a monitor left that was itself killed, and see it gone within a bounded time.

        bwrap's first child waits for its monitor without end until it has set a parent-death
        signal, and where there is no cgroup nobody else would find it. A subreaper's orphans are
        its own children, so their numbers are theirs until they are reaped here.
        """
        monitors = {jail.started.monitor for jail in self._jails.values()}
        for pid in set(procfs.children(os.getpid())) - monitors:
            os.kill(pid, signal.SIGKILL)
            ending = os.pidfd_open(pid)
            try:
                if select.select([ending], [], [], _REMOVE_S)[0]:
                    os.waitpid(pid, 0)
            finally:
                os.close(ending)

    def _clear_away(self, jail: _Jail) -> None:
        """Its group and its binds. What cannot be removed now is swept by the next runtime."""
        try:
            jail.group.kill()
            jail.group.remove(_REMOVE_S)
        except OSError as error:
            _say(f"the cgroup of jail {jail.name} is left: {error}")
        try:
            staging.clear(jail.name)
        except OSError as error:
            _say(f"a bind of jail {jail.name} is left until the broker ends: {error}")

    def _runtime_ended(self) -> None:
        self._serving = False

    def _end(self) -> None:
        """Everything ends with the broker, and within a bounded time."""
        for jail in self._jails.values():
            self._kill(jail)
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._jails and time.monotonic() < deadline:
            self._turn(deadline - time.monotonic())
        if self._hierarchy is not None:
            try:
                self._hierarchy.close()
            except OSError as error:
                _say(f"cgroups are left: {error}")

    # -- the loop -------------------------------------------------------------------------------

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map():  # an earlier one of this turn may have ended it
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


def _layers(hierarchy: cgroups.Hierarchy) -> list[probe.Layer]:
    """What the groups can limit, in the words of the other layers."""
    found = hierarchy.capabilities
    layers = []
    for name in ("memory", "tasks", "cpu"):
        if name in found.controllers:
            layers.append(probe.Layer(name, True, f"cgroup v{found.version}"))
        else:
            missing = found.missing[name]
            layers.append(
                probe.Layer(name, False, "no cgroup limit", missing.cause, missing.remedy)
            )
    return layers


def _say(text: str) -> None:
    print(f"sbx broker: {text}", file=sys.stderr, flush=True)


def _facts(pid: int) -> dict[str, Any]:
    """What linux itself says of a process inside: never what the process says."""
    status = procfs.status(pid)
    return {
        "pid": pid,
        "uid": int(status["Uid"].split()[0]),
        "capabilities": int(status["CapEff"], 16),
        "no_new_privs": status["NoNewPrivs"] == "1",
        "seccomp": int(status["Seccomp"]),
        "filters": int(status.get("Seccomp_filters", "1")),
        "namespaces": procfs.namespaces(pid),
    }


def _counters(group: cgroups.JailGroup) -> dict[str, int]:
    events = group.events()
    return {"oom_kills": events.oom_kills, "pids_max_hits": events.pids_max_hits}


def main() -> None:
    """Serve on fd 0 until the runtime ends."""
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # the program's may be 077, and other uids must be able to walk the stage
    prctl.set_child_subreaper(True)
    Broker(sock).serve()
    sys.exit(0)
