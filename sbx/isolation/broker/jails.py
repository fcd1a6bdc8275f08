"""The jails of the broker, from their start until nothing of them is left.

A jail is killed by the pidfd of its PID 1, and by its cgroup if it has one. No pid is remembered
and signalled later. A jail of the cold path is started here; `zygotes` forks the others.
"""

import json
import os
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from sbx.errors import Broken, Unavailable, out_of_files
from sbx.isolation import cgroups, process_state
from sbx.isolation.broker import bind_staging, spawn
from sbx.isolation.broker.loop import BrokerLoop, log
from sbx.isolation.broker.sandboxes import REMOVE_S, BrokerSandbox, BrokerSandboxes, Group
from sbx.linux import hidden_files, procfs

_STDERR_MAX = 4096
_DIES_BY_ITSELF_S = 0.03
_UNLINKED_S = 0.01
_SHORT_LOOK_S = 0.005


@dataclass(slots=True)
class BrokerJail:
    """A jail as the broker knows it, until everything of it is gone.

    A jail of the cold path has its own bubblewrap, `started`, and is in a sandbox from the first. A
    jail that a zygote forked has a `setup` socket until it enters a sandbox.
    """

    name: str
    seq: int
    sandbox: BrokerSandbox | None = None
    group: Group | None = None
    started: spawn.Started | None = None
    setup: socket.socket | None = None
    zygote: str | None = None
    info: bytes | None = None
    last_words: str = ""
    killed: bool = False
    idle: bool = False
    pid1: int | None = None
    pid1_fd: int | None = None
    kernel: int | None = None
    kernel_fd: int | None = None
    answered: bool = False
    guarded: bool = False
    attached: dict[str, int] = field(default_factory=dict)

    def counters(self) -> dict[str, int]:
        try:
            events = self.group.group.events() if self.group is not None else cgroups.CgroupEvents()
        except OSError as error:
            log(f"the counters of jail {self.name} cannot be read: {error}")
            events = cgroups.CgroupEvents()
        return {"oom_kills": events.oom_kills, "pids_max_hits": events.pids_max_hits}

    def inspect(self, *, fresh: bool) -> dict[str, Any]:
        """Return the facts about its processes now, and with `fresh` about its group.

        Otherwise the limits are those of the time when the group was made: a caller that waits for
        a start need not read them again.
        """
        if self.pid1 is None or self.group is None:
            raise Broken("the jail is in no sandbox yet")
        kernel = self.kernel or _first_child(self.pid1)
        if self.guarded and self.kernel is None and kernel is not None:
            kernel = _first_child(kernel)  # the path guard is PID 1, and the supervisor its child
        read = process_state.read(self.pid1, kernel)
        if not fresh:
            return {**read, "limits": self.group.limits._asdict(), "in_group": None}
        group = self.group.group
        inside = {self.pid1, kernel} <= {*group.pids(), None} if group.path else None
        return {**read, "limits": group.limits()._asdict(), "in_group": inside}

    def unlinked(self, device: int) -> dict[str, int]:
        """Count its open files without a name. Every order waits meanwhile, so only a few thousand
        files are looked at each time."""
        roots = [pid for pid in (self.pid1, self.kernel) if pid is not None]
        pids = [pid for root in roots for pid in procfs.descendants(root)]
        return hidden_files.unlinked_of(pids, device, _UNLINKED_S, count_hidden=True)._asdict()


class BrokerJails:
    def __init__(self, loop: BrokerLoop, sandboxes: BrokerSandboxes) -> None:
        self._loop = loop
        self._sandboxes = sandboxes
        self.by_name: dict[str, BrokerJail] = {}
        self.own_namespaces = False
        self.dying: dict[str, float] = {}

    def get(self, name: str) -> BrokerJail:
        try:
            return self.by_name[name]
        except KeyError:
            raise Broken(f"jail {name} does not exist", code="jail_gone") from None

    def pids_in(self, sandbox: BrokerSandbox | None) -> list[int]:
        jails = (jail for jail in self.by_name.values() if jail.sandbox is sandbox)
        return [jail.pid1 for jail in jails if jail.pid1 is not None]

    # -- the cold path --------------------------------------------------------------------------

    def launch(self, order: dict[str, Any], fds: list[int]) -> None:
        """Start bwrap; answered when bwrap reports which process is PID 1, or ends before that."""
        name, sandbox = order["jail"], self._sandboxes.by_name[order["sandbox"]]
        control, kernel = fds
        with ExitStack() as undo:
            group = self._sandboxes.take_group(sandbox)
            undo.callback(group.group.remove, REMOVE_S)
            undo.callback(bind_staging.clear, name)
            order = {**order, "own_shares": self.own_namespaces}
            try:
                started = spawn.start_jail(
                    order, (control, kernel), sandbox.become, group.group.enter, sandbox.owners
                )
            except OSError as error:
                failure = _launch_failed(f"the jail could not be started: {error}")
                raise out_of_files(error) or failure from error
            undo.pop_all()
        guarded = bool(order.get("guarded"))
        jail = BrokerJail(name, order["seq"], sandbox, group, started, info=b"", guarded=guarded)
        self.by_name[name] = jail
        self._loop.children.add(started.monitor)
        self._loop.watch(started.info_fd, lambda: self._read_pid1(jail, started))
        self._loop.watch(started.monitor_fd, lambda: self._on_monitor_exit(jail, started))

    def _read_pid1(self, jail: BrokerJail, started: spawn.Started) -> None:
        assert jail.info is not None
        chunk = os.read(started.info_fd, 4096)
        jail.info += chunk
        try:
            pid = int(json.loads(jail.info)["child-pid"])
        except ValueError:
            if not chunk:
                self._close_info(jail, started)
            return
        self._close_info(jail, started)
        try:
            jail.pid1_fd = os.pidfd_open(pid)
            if procfs.status(pid).get("PPid") != str(started.monitor):
                return  # it ended already: the monitor's end, which follows, gives the answer
        except OSError:
            return
        jail.pid1 = pid
        self.answer(jail, {"pid": pid})

    def _close_info(self, jail: BrokerJail, started: spawn.Started) -> None:
        jail.info = None
        self._loop.unwatch(started.info_fd)
        os.close(started.info_fd)

    def answer(self, jail: BrokerJail, outcome: dict[str, Any]) -> None:
        jail.answered = True
        self._loop.send({"seq": jail.seq, "ok": outcome})

    # -- the end --------------------------------------------------------------------------------

    def kill(self, jail: BrokerJail | None) -> dict[str, Any]:
        if jail is None:
            return {}
        self.close_setup(jail)
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
        self.dying.setdefault(jail.name, time.monotonic() + _DIES_BY_ITSELF_S)
        return {}

    def end_short(self) -> float | None:
        """End each jail in which a process was killed for memory, and return the seconds to the
        next look.

        Processes that waited for the killed one would hang, or continue with a part of their state.
        Linux reports the shortage before it kills, so this looks for a while.
        """
        short = self._sandboxes.short
        for jail in self.by_name.values() if short else ():
            if jail.sandbox in short and jail.name not in self.dying and jail.group is not None:
                with suppress(OSError):  # then its counters are read when it has ended
                    if jail.group.group.events().oom_kills > 0:
                        self.kill(jail)
        return _SHORT_LOOK_S if short else None

    def unthrottle_dying(self) -> float | None:
        """Lift the CPU quota of sandboxes with a jail that is still dying, and return the seconds
        to the next one.

        Under a small quota a killed fork bomb dies for many seconds. Most jails are gone within a
        few milliseconds, and to change a quota takes Linux as long: it rewrites its own code when
        the first one comes or the last one goes.
        """
        now = time.monotonic()
        for name in [name for name, due in self.dying.items() if due <= now]:
            del self.dying[name]
            if (jail := self.by_name.get(name)) is not None and jail.sandbox is not None:
                jail.sandbox.dying.add(name)
                jail.sandbox.throttle()
        return min(self.dying.values()) - now if self.dying else None

    def _on_monitor_exit(self, jail: BrokerJail, started: spawn.Started) -> None:
        """Handle the end of the monitor. PID 1 and its whole namespace ended before it."""
        jail.last_words, jail.killed = self.reap(started)
        if jail.info is not None:
            self._close_info(jail, started)
        self.on_exit(jail)

    def reap(self, started: spawn.Started) -> tuple[str, bool]:
        """Reap a bubblewrap that has ended. Return its last words, and whether it was killed."""
        self._loop.unwatch(started.monitor_fd)
        _, status = os.waitpid(started.monitor, 0)
        self._loop.children.discard(started.monitor)
        os.close(started.monitor_fd)
        self._kill_orphans()
        words = os.pread(started.stderr_fd, _STDERR_MAX, 0).decode(errors="replace").strip()
        os.close(started.stderr_fd)
        code = os.waitstatus_to_exitcode(status)
        killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)  # it, or its child
        if words or code == 0:
            return words, killed
        return f"killed by signal {-code}" if code < 0 else f"it ended with code {code}", killed

    def on_exit(self, jail: BrokerJail) -> None:
        """Leave nothing of a jail behind.

        Every process of it has ended, or will by the end of its sockets, if its zygote ended before
        it reported them.
        """
        self.close_setup(jail)
        if jail.pid1_fd is not None:
            if jail.started is None:
                self._loop.unwatch(jail.pid1_fd)
            os.close(jail.pid1_fd)
        if jail.kernel_fd is not None:
            os.close(jail.kernel_fd)
        for tree in jail.attached.values():
            os.close(tree)
        counters = jail.counters()
        del self.by_name[jail.name]
        # Before anything is cleared away: the next order is obeyed after that in any case.
        if jail.answered:
            event = {"event": "gone", "jail": jail.name, "stderr": jail.last_words, **counters}
            self._loop.send(event)
        else:
            self._send_failure(jail, counters["oom_kills"])
        self.clear_away(jail)
        self.dying.pop(jail.name, None)
        if jail.sandbox is not None and jail.name in jail.sandbox.dying:
            jail.sandbox.dying.remove(jail.name)
            jail.sandbox.throttle()

    def _send_failure(self, jail: BrokerJail, oom_kills: int) -> None:
        is_cold = jail.zygote is None
        step = "bwrap could not start the jail" if is_cold else "no jail could be forked"
        failed = _launch_failed(f"{step}: {jail.last_words or 'it ended without a message'}")
        failed.details.update({"killed": jail.killed, "oom_kills": oom_kills})
        self._loop.send({"seq": jail.seq, "error": failed})

    def close_setup(self, jail: BrokerJail) -> None:
        if jail.setup is not None:
            self._loop.unwatch(jail.setup.fileno())
            jail.setup.close()
            jail.setup = None

    def _kill_orphans(self) -> None:
        """Kill the processes of a monitor that was itself killed, and wait a bounded time for them.

        bwrap's first child waits for its monitor without end until it has set a parent-death
        signal, and without a cgroup nothing else would find it. A subreaper's orphans are its own
        children, so their numbers are theirs until they are reaped here.
        """
        for pid in set(procfs.children(os.getpid())) - self._loop.children:
            os.kill(pid, signal.SIGKILL)
            ending = os.pidfd_open(pid)
            try:
                poll = select.poll()  # select(2) knows no descriptor beyond 1023
                poll.register(ending, select.POLLIN)
                if poll.poll(REMOVE_S * 1000):
                    os.waitpid(pid, 0)
            finally:
                os.close(ending)

    def clear_away(self, jail: BrokerJail) -> None:
        sandbox = jail.sandbox
        try:
            if jail.group is not None and sandbox is not None and not sandbox.removed:
                _remove(jail.group.group)
                if sandbox.dropped:
                    sandbox.remove_group(in_use=self.is_used(sandbox))
        except OSError as error:
            log(f"the cgroup of jail {jail.name} is left: {error}")
        try:
            if jail.started is not None:
                bind_staging.clear(jail.name)
        except OSError as error:
            log(f"a bind of jail {jail.name} is left until the broker ends: {error}")

    def is_used(self, sandbox: BrokerSandbox) -> bool:
        return any(jail.sandbox is sandbox for jail in self.by_name.values())


def _launch_failed(message: str) -> Unavailable:
    return Unavailable(
        message,
        code="launch_failed",
        hint="run `sbx doctor`: it names the layer that this host refuses and the remedy",
    )


def _remove(group: cgroups.JailGroup) -> None:
    """Remove a group, which is usually empty by now. If a killed monitor left processes, kill
    them."""
    try:
        group.remove(0)
    except TimeoutError:
        group.kill()
        group.remove(REMOVE_S)


def _first_child(pid: int) -> int | None:
    return next(iter(procfs.children(pid)), None)
