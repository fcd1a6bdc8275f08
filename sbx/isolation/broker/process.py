"""The start of the broker's process, and the errors that it causes.

A service that gives up root's rights starts it with `start_broker`, before it has an event loop;
`BrokerConnection` starts it otherwise.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sbx import errors
from sbx.isolation import cgroups
from sbx.isolation.broker import spawn, watchdog
from sbx.isolation.broker.pulse import RETRY_AFTER_S
from sbx.isolation.broker.watchdog import Watchdog
from sbx.isolation.probe import Capabilities

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sbx.isolation.broker.server import main; main()"
)
ORDER_S = 30.0
END_S = 5.0
PACKET_MAX = 1 << 18


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """A running broker that has reported the capabilities of this host; `BrokerClient.adopt` takes
    it, once."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    capabilities: Capabilities
    watchdog: Watchdog

    def confine(self, granted: Mapping[str, Any]) -> None:
        """Send the grants for jails (`grants`), once. Before that the broker does nothing.

        Call this with root's rights, before the service reads hostile data.
        """
        grants = spawn.memory_file(json.dumps(granted).encode(), "grants")
        try:
            self.sock.settimeout(ORDER_S)
            socket.send_fds(self.sock, [b'{"seq": 0, "do": "confine"}'], [grants])
            packet = self.sock.recv(PACKET_MAX)
        except OSError as error:
            raise broker_died() from error
        finally:
            self.sock.setblocking(False)
            os.close(grants)
        if not packet:
            raise broker_died()
        if "error" in (reply := json.loads(packet)):
            raise revive(reply["error"])

    def close(self) -> None:
        """End a broker that was not adopted."""
        self.sock.close()
        watchdog.end(self.process, self.watchdog, END_S)


def start_broker(
    *, bwrap: str | None = None, uids: tuple[int, int], groups: bool = True
) -> BrokerProcess:
    """Start a broker for a program that drops its privileges before it has an event loop.

    No order gives the privileges back. The broker does nothing before `confine`. A watchdog keeps
    the right to kill it. Block while the broker probes the host, 30 s at most.
    """
    words = scope() if groups else []
    while True:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = start_process(its.fileno(), words)
        try:
            ours.settimeout(ORDER_S)
            greeting = hello(bwrap, uids, groups, confined=True)
            ours.send(json.dumps({"seq": 0, "do": "hello", **greeting}).encode())
            packet = ours.recv(PACKET_MAX)
            if packet and "ok" in (reply := json.loads(packet)):
                ours.setblocking(False)
                capabilities = Capabilities.from_json(reply["ok"])
                return BrokerProcess(process, ours, capabilities, Watchdog(process))
            error = revive(reply["error"]) if packet else broker_died()
        except OSError:  # TimeoutError is one
            error = broker_died()
        ours.close()
        watchdog.end(process, None, END_S)
        if not words or error.code != "broker_died":
            raise error
        words = []  # systemd-run failed: continue without a scope and cgroups


def start_process(its: int, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process in a separate session, so that Ctrl-C in a terminal does not reach it."""
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


def hello(
    bwrap: str | None, uids: tuple[int, int], groups: bool, *, confined: bool = False
) -> dict[str, Any]:
    return {
        "runtime": os.getpid(),
        "bwrap": bwrap,
        "uids": uids,
        "groups": groups,
        "id": secrets.token_hex(4),
        "confined": confined,
    }


def scope() -> list[str]:
    """Return the command prefix that gets a delegated cgroup from systemd, if that is needed."""
    return cgroups.scope_command(cgroups.probe()) or []


def closed() -> errors.Closed:
    return errors.Closed("the runtime is closed", hint="make a new one")


def broker_died() -> errors.Broken:
    return errors.Broken(
        "the broker ended, and every sandbox of this runtime with it",
        code="broker_died",
        hint="close this runtime and make a new one",
        details={"retry_after_s": RETRY_AFTER_S},
    )


def broker_silent(message: str = "the broker does not answer") -> errors.Unavailable:
    return errors.Unavailable(
        message,
        code="broker_silent",
        hint="try again; a service whose broker stays silent ends, so that it is started again",
        details={"retry_after_s": RETRY_AFTER_S},
    )


def state(pid: int) -> str:
    """Return what the log reports about a process that does not answer."""
    try:
        broker = psutil.Process(pid)
        with broker.oneshot():
            used, memory = broker.cpu_times(), broker.memory_info()
            return (
                f"{broker.status()}, {used.user + used.system:.1f} s of CPU,"
                f" {memory.rss >> 20} MiB, load of the host {psutil.getloadavg()[0]:.1f}"
            )
    except psutil.Error:
        return "ended"


def revive(raw: Mapping[str, Any]) -> errors.SbxError:
    kind = _KINDS.get(raw["code"], errors.Broken)
    return kind(raw["message"], code=raw["code"], hint=raw.get("hint"), details=raw.get("details"))


_KINDS: dict[str, type[errors.SbxError]] = {
    **dict.fromkeys(
        (
            *("launch_failed", "unavailable", "zygote_failed", "zygote_gone"),
            *("mount_failed", "live_mount_unavailable", "sockets_not_masked"),
        ),
        errors.Unavailable,
    ),
    **dict.fromkeys(("not_granted", "workspace_owned_by_root"), errors.Denied),
    **dict.fromkeys(("already_mounted", "target_moved"), errors.Conflict),
    "not_mounted": errors.NotFound,
}
