"""The process of a broker, from its start to the runtime that takes it over.

`BrokerConnection` starts one, or takes over one that was started before the runtime was imported.
This module imports little, so that the process starts as early as possible.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sbx.isolation import cgroups
from sbx.isolation.broker import watchdog

if TYPE_CHECKING:
    from sbx.isolation.broker.early_orders import EarlyOrders

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sbx.isolation.broker.server import main; main()"
)
END_S = 5.0


@dataclass(frozen=True, slots=True)
class SpawnedBroker:
    """The process of a broker. `in_scope`: systemd-run starts it, in a delegated cgroup. `early`:
    the orders that it has already; None for a process that keeps none."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    in_scope: bool
    early: "EarlyOrders | None" = None

    def close(self) -> None:
        """End it. If a runtime has taken it over, call this after the end of the runtime."""
        self.sock.close()
        watchdog.end(self.process, None, END_S)


def label_of(policy: str, workspace: str | Path | None) -> str:
    """Return the label of the early orders for a sandbox."""
    return f"{policy} {os.path.abspath(workspace)}" if workspace else policy


def spawn_broker(label: str | None = None, *, in_scope: bool = True) -> SpawnedBroker:
    """Start the process, with `in_scope` in a scope of systemd where cgroups need one. It starts
    while the caller imports the runtime. `label`: that of early orders."""
    words = scope() if in_scope else []
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        with its:
            spawned = SpawnedBroker(start_process(its.fileno(), words), ours, bool(words))
    except BaseException:
        ours.close()
        raise
    try:
        return replace(spawned, early=_send_early(ours, label))
    except BaseException:  # Ctrl-C
        spawned.close()
        raise


def scope() -> list[str]:
    """Return the command prefix that gets a delegated cgroup from systemd, if that is needed."""
    return cgroups.scope_command(cgroups.probe()) or []


def _send_early(sock: socket.socket, label: str | None) -> "EarlyOrders | None":
    if label is None:
        return None
    from sbx.isolation.broker import early_orders  # 10 ms, in which the process starts

    return early_orders.send(sock, label)


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
