"""The runtime's end of the broker's socket: start the broker, launch jails, learn of their end.

`launch` is the one place where a plan becomes processes. Everything here is asyncio and adds
nothing to the embedding program but one child process; orders have deadlines, and when the broker
dies every jail is known to be gone (bubblewrap dies with its parent).
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbx import errors
from sbx.isolation import cgroups, staging
from sbx.isolation.argv import bwrap_argv
from sbx.isolation.forked import check_process
from sbx.isolation.patience import in_thread, to_the_end
from sbx.isolation.plan import Bind, GroupLimits, LaunchPlan
from sbx.isolation.probe import Capabilities

_log = logging.getLogger(__name__)
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from sbx.isolation.broker import main; main()"
_ORDER_S = 30.0
_END_S = 5.0
_BEHIND_S = 0.002
_PACKET_MAX = 1 << 18


@dataclass(frozen=True, slots=True)
class End:
    """How a jail ended, as the broker saw it: counters of its cgroup, last words of bwrap."""

    stderr: str = ""
    oom_kills: int = 0
    pids_max_hits: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """The ids on the host that a sandbox's processes and files have."""

    uid: int
    gid: int


class Jail:
    """One launched jail. `control` and `kernel` are the runtime's ends of its two sockets."""

    def __init__(self, broker: "Broker", name: str, plan: LaunchPlan) -> None:
        self._broker = broker
        self.name = name
        self.plan = plan
        self.pid: int | None = None
        self.control, self._control_inside = _pair()
        self.kernel, self._kernel_inside = _pair()
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        """Whether every process of the jail has ended and its cgroup and mounts are removed."""
        return self._end.done()

    async def end(self) -> End:
        """Wait until nothing of the jail is left."""
        return await asyncio.shield(self._end)

    async def kill(self) -> End:
        """SIGKILL to everything inside; returns when it is gone, Broken after 5 seconds."""
        if not self.gone:
            with contextlib.suppress(errors.SbxError):  # a broker that ends takes every jail along
                await self._broker.order("kill", jail=self.name)
        try:
            return await asyncio.wait_for(self.end(), _END_S)
        except TimeoutError:
            raise errors.Broken(
                f"the jail {self.name} was killed and is not gone after {_END_S:g} s"
            ) from None

    async def inspect(self) -> dict[str, Any]:
        """What linux says of PID 1 and the kernel: ids, capabilities, seccomp, namespaces."""
        return await self._broker.order("inspect", jail=self.name)

    async def counters(self) -> End:
        """The cgroup's counters so far; those of its end when it is gone already."""
        if self.gone:
            return self._end.result()
        try:
            return End("", **await self._broker.order("counters", jail=self.name))
        except errors.Broken:
            return await asyncio.wait_for(self.end(), _END_S)

    def close(self) -> None:
        """Close both sockets; the jail's PID 1 ends when it sees that."""
        for sock in (self.control, self.kernel):
            sock.close()
        self._close_inside()

    def _close_inside(self) -> None:
        for sock in (self._control_inside, self._kernel_inside):
            sock.close()

    def _ended(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)


class Broker:
    """The runtime's handle of its broker process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._sock: socket.socket | None = None
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._jails: dict[str, Jail] = {}
        self.capabilities: Capabilities | None = None

    @classmethod
    async def start(
        cls, *, bwrap: str | None = None, uids: tuple[int, int], groups: bool = True
    ) -> "Broker":
        """Start the process and let it find out what this host can do. `uids`: (first, count)."""
        prefix = await in_thread(_scope) if groups else []
        for words in ([prefix] if prefix else []) + [[]]:
            broker = cls()
            try:
                await broker._open(words)
                raw = await broker.order(
                    "hello",
                    runtime=os.getpid(),
                    bwrap=bwrap,
                    uids=uids,
                    groups=groups,
                    id=secrets.token_hex(4),
                )
            except BaseException as error:
                await broker.close()
                if words and getattr(error, "code", "") in ("broker_died", "broker_silent"):
                    continue  # systemd-run could not, or waits: without a scope, without cgroups
                raise
            broker.capabilities = Capabilities.from_json(raw)
            return broker
        raise AssertionError  # the last round returned or raised

    @property
    def alive(self) -> bool:
        """Whether the process still answers; when not, every jail has ended with it."""
        return self._sock is not None

    async def make_sandbox(self, name: str, limits: GroupLimits, uid: int | None = None) -> Host:
        """Prepare the cgroup and the host uid that all jails of one sandbox share."""
        return Host(
            **await self.order("make_sandbox", sandbox=name, limits=asdict(limits), uid=uid)
        )

    async def drop_sandbox(self, name: str) -> None:
        """Kill what is left of a sandbox and remove its cgroup. A broker that is gone did so."""
        if self.alive:
            await self.order("drop_sandbox", sandbox=name)

    async def launch(
        self, sandbox: str, plan: LaunchPlan, identities: Mapping[str, tuple[int, int]]
    ) -> Jail:
        """Start a jail by its plan; returns when bubblewrap has made the view and PID 1 runs.

        `identities` gives the (device, inode) that a host path must still have when it is mounted.
        Raises Unavailable `launch_failed` with bwrap's own words when it could not.
        """
        name = secrets.token_hex(8)
        jail = Jail(self, name, plan)
        self._jails[name] = jail
        staged = [
            (index, mount.source, identities.get(mount.source))
            for index, mount in enumerate(plan.mounts)
            if isinstance(mount, Bind) and mount.staged
        ]
        try:
            answer = await self.order(
                "launch",
                fds=(jail._control_inside.fileno(), jail._kernel_inside.fileno()),
                sandbox=sandbox,
                jail=name,
                bwrap=plan.bwrap,
                args=bwrap_argv(plan, lambda index: staging.place(name, index)),
                command=plan.command,
                files=[file.content for file in plan.files],
                filter=plan.filter.program.hex(),
                stage=staged,
            )
        except asyncio.CancelledError:
            await self._abandon(jail)
            raise
        except BaseException:
            self._jails.pop(name, None)
            jail.close()
            raise
        jail._close_inside()
        jail.pid = answer["pid"]
        return jail

    async def order(self, do: str, *, fds: Sequence[int] = (), **words: Any) -> dict[str, Any]:
        """Send one order and wait for its outcome. Raises what the broker answered, by its code."""
        check_process(self._pid)
        if self._sock is None:
            raise _closed() if self._closed else _broker_died()
        self._seq += 1
        seq = self._seq
        packet = json.dumps({"seq": seq, "do": do, **words}).encode()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = answer
        try:
            async with asyncio.timeout(_ORDER_S):
                await self._send(packet, fds)
                return await answer
        except (BrokenPipeError, ConnectionResetError):
            raise _broker_died() from None
        except TimeoutError:
            message = f"the broker did not {do} within {_ORDER_S:g} s"
            raise errors.Broken(message, code="broker_silent") from None
        finally:
            self._waiting.pop(seq, None)

    async def _open(self, prefix: Sequence[str]) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def start() -> None:
            with its:
                self._process = _start_process(its.fileno(), prefix)

        try:
            await in_thread(start)
        except BaseException:
            ours.close()
            raise
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        """One packet; waits while the broker is behind with reading them."""
        while self._sock is not None:
            try:
                socket.send_fds(self._sock, [packet], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(_BEHIND_S)
        raise _broker_died()

    async def close(self) -> None:
        """End the broker and with it every jail. Never raises for what is gone already."""
        self._closed = True
        self._hang_up()
        process, self._process = self._process, None
        if process is not None:
            await in_thread(_wait_for, process)

    async def _abandon(self, jail: Jail) -> None:
        """A launch whose caller went away: kill what it has started by now, leave no socket."""
        jail.close()
        self._jails.pop(jail.name, None)
        with contextlib.suppress(errors.SbxError):
            await to_the_end(self.order("kill", jail=jail.name))

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            packet = self._sock.recv(_PACKET_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._hang_up()
            return
        message = json.loads(packet)
        if message.get("event") == "gone":
            self._gone(message)
            return
        waiting = self._waiting.get(message["seq"])
        if waiting is None or waiting.done():
            return
        if "ok" in message:
            waiting.set_result(message["ok"])
        else:
            waiting.set_exception(_revive(message["error"]))

    def _gone(self, message: Mapping[str, Any]) -> None:
        jail = self._jails.pop(message["jail"], None)
        if jail is not None:
            end = End(message["stderr"], message["oom_kills"], message["pids_max_hits"])
            jail._ended(end)

    def _hang_up(self) -> None:
        """The socket's end, from either side: no order is answered any more, every jail ends."""
        if self._sock is None:
            return
        sock, self._sock = self._sock, None
        with contextlib.suppress(RuntimeError):  # the loop may be closed when the process ends
            asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_broker_died())
        for jail in self._jails.values():
            jail._ended(End("the broker ended"))
        self._jails.clear()


def _start_process(its: int, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """A session of its own, so that Ctrl-C in a terminal reaches the program and not the broker."""
    environment = {
        name: os.environ[name]
        for name in ("LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
        if name in os.environ
    }
    return subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_ROOT],
        stdin=its,
        stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("SBX_DEBUG") else subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def _scope() -> list[str]:
    """The words that give the broker a delegated cgroup of its own, where systemd has to do it."""
    return cgroups.scope_command(cgroups.probe()) or []


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, inside


def _closed() -> errors.Closed:
    return errors.Closed("the runtime is closed", hint="make a new one")


def _broker_died() -> errors.Broken:
    return errors.Broken(
        "the broker ended, and every sandbox of this runtime with it",
        code="broker_died",
        hint="close this runtime and make a new one",
    )


def _revive(raw: Mapping[str, Any]) -> errors.SbxError:
    """The broker's error as the class a caller can catch."""
    kinds = {"launch_failed": errors.Unavailable, "unavailable": errors.Unavailable}
    kind = kinds.get(raw["code"], errors.Broken)
    return kind(raw["message"], code=raw["code"], hint=raw.get("hint"), details=raw.get("details"))
