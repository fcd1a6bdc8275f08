"""The start of a broker for a service that gives up root's rights, before it has an event loop; and
the errors that a broker causes.
"""

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx import errors
from sbx.isolation.broker import early_orders, spawn, watchdog
from sbx.isolation.broker.pulse import RETRY_AFTER_S
from sbx.isolation.broker.spawned import END_S, spawn_broker
from sbx.isolation.broker.watchdog import Watchdog
from sbx.isolation.probe import Capabilities

ORDER_S = 30.0
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
    in_scope = groups
    while True:
        spawned = spawn_broker(in_scope=in_scope)
        process, ours = spawned.process, spawned.sock
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
        spawned.close()
        if not spawned.in_scope or error.code != "broker_died":
            raise error
        in_scope = False  # systemd-run failed: continue without a scope and cgroups


def hello(
    bwrap: str | None, uids: tuple[int, int], groups: bool, *, confined: bool = False
) -> dict[str, Any]:
    words = {"bwrap": bwrap, "uids": uids, "groups": groups, "confined": confined}
    return {**words, **early_orders.of_process()}


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
    """Describe a process that does not answer, for the log."""
    import psutil  # 6 ms, which the start of a broker does not need

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
    """Return the error of a reply, of the class that the broker raised."""
    kind = errors.KINDS[raw["kind"]]
    return kind(raw["message"], code=raw["code"], hint=raw.get("hint"), details=raw.get("details"))
