"""A real `sbx serve` on a small file system, started again whenever it ends, as systemd would."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench.torture import model
from bench.torture.ledger import Ledger, Life, Sample

API_KEY = "sk-torture-operator-0123456789abcdef"
SMALL_BYTES = 256 << 20
_START_S = 60.0  # for a process to answer
_END_S = {"terminate": 40.0, "kill": 20.0, "broker_kill": 40.0, "broker_silent": 60.0}
_RESTART_S = 0.1  # less than the units of systemd have, for more lives in a run
_RESTART_FAILED_S = 1.0
_SAMPLE_S = 2.0
_LOOK_S = 0.05
_SETTINGS = {
    "SBX_KERNELS_MAX": "200",
    "SBX_KERNELS_PER_OWNER": "200",
    "SBX_SANDBOXES_PER_OWNER": "500",
    "SBX_WORKSPACES_PER_OWNER": "1000",
    "SBX_DRAIN_TIMEOUT": "5",
    "SBX_LOG_LEVEL": "warning",
    "SBX_API_KEY": API_KEY,
    "SBX_AGENT_API_KEY": model.KEY,
    "SBX_AGENT_MODEL_NAME": "scripted",
}


@dataclass(frozen=True, slots=True)
class Disk:
    """The directory of a run. `small`: a file system of its own, which can be filled."""

    top: Path
    small: bool

    @property
    def filler(self) -> Path:
        return self.top / "filler"

    @property
    def data(self) -> Path:
        return self.top / "data"


@contextmanager
def disk() -> Iterator[Disk]:
    """A tmpfs of SMALL_BYTES, or without the rights to mount one a plain directory."""
    top = Path(tempfile.mkdtemp(prefix="sbx-torture-", dir="/var/tmp"))
    top.chmod(0o755)  # as root it serves under another user
    small = os.geteuid() == 0 and _mounted(top)
    try:
        yield Disk(top, small)
    finally:
        if small:
            subprocess.run(["umount", "--lazy", str(top)], check=False)
        shutil.rmtree(top, ignore_errors=True)


def _mounted(top: Path) -> bool:
    options = f"size={SMALL_BYTES},mode=755"
    command = ["mount", "-t", "tmpfs", "-o", options, "sbx-torture", str(top)]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class ServiceUnderTest:
    """The service, one process after the other, until `close`.

    A fault that ends the process names itself by `expect` first. `excuses` are the faults that last
    and may hinder a start.
    """

    ledger: Ledger
    disk: Disk
    log: Path
    model_url: str
    epoch: float = field(default_factory=time.monotonic)
    pid: int = 0
    excuses: set[str] = field(default_factory=set)
    brokers: set[str] = field(default_factory=set)  # as the names of their cgroups end
    first_fds: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _cause: str = ""
    _until: float = 0.0
    _closing: bool = False
    _port: int = field(default_factory=_free_port)

    @property
    def socket(self) -> Path:
        return self.disk.top / "run" / "sbx.sock"

    @property
    def tcp(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def now(self) -> float:
        """Seconds since the begin of the run."""
        return round(time.monotonic() - self.epoch, 4)

    def client(self, *, tcp: bool = False) -> httpx.AsyncClient:
        """Return a client over TCP with the key of the operator, or over the Unix socket without
        one."""
        if tcp:
            headers = {"authorization": f"Bearer {API_KEY}"}
            url = f"http://127.0.0.1:{self._port}"
            return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False)
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        return httpx.AsyncClient(transport=transport, base_url="http://sbx", timeout=None)

    def expect(self, cause: str) -> None:
        """From now on this process ends because of `cause`, within the time that the cause has."""
        if not self._cause:
            self._cause, self._until = cause, self.now() + _END_S[cause]
            self.ready.clear()

    def broker(self) -> psutil.Process | None:
        """Return the broker of the process that serves now."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                if any("sbx.isolation.broker.server" in word for word in child.cmdline()):
                    return child
        return None

    async def run(self) -> None:
        """Serve, and start again, until `close`."""
        while not self._closing:
            served = await self._live()
            await asyncio.sleep(_RESTART_S if served else _RESTART_FAILED_S)

    async def close(self) -> None:
        """End the process that serves, and start no other one."""
        self._closing = True
        await self.restart()

    async def restart(self) -> None:
        """End the process by SIGTERM; `run` starts the next one."""
        self.expect("terminate")
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    async def _live(self) -> bool:
        """One process from its start to its end. Whether it has ever answered."""
        began, excuses = self.now(), set(self.excuses)
        process = self._started()
        self.pid, self._cause, ready, forced = process.pid, "", None, False
        starting = asyncio.create_task(self._answers())
        sampled = 0.0
        try:
            while process.poll() is None:
                excuses |= self.excuses
                if ready is None and starting.done():
                    ready = self.now()
                    self._begin(process)
                if not forced and self._is_late(began, ready):
                    forced = True
                    self._force(process)
                if ready is not None and self.now() - sampled >= _SAMPLE_S:
                    sampled = self.now()
                    self._sample(process.pid)
                await asyncio.sleep(_LOOK_S)
        finally:
            starting.cancel()
            self.ready.clear()
            if process.poll() is None:
                self._force(process)
                process.wait()
        excuse = ", ".join(sorted(excuses)) if ready is None else ""
        cause = self._cause or ("" if not forced else "its start")
        life = Life(
            process.pid,
            began,
            ready,
            self.now(),
            process.returncode,
            cause=cause,
            excuse=excuse,
            forced=forced,
        )
        self.ledger.lives.append(life)
        return ready is not None

    def _begin(self, process: "subprocess.Popen[bytes]") -> None:
        with suppress(psutil.Error, OSError):
            self.first_fds = len(os.listdir(f"/proc/{process.pid}/fd"))
            if (broker := self.broker()) is not None:
                stat = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
                self.brokers.add(f"-{broker.pid}-{stat[19]}")
        if not self._cause:
            self.ready.set()

    def _is_late(self, began: float, ready: float | None) -> bool:
        if self._cause:
            return self.now() > self._until
        return ready is None and self.now() > began + _START_S

    def _force(self, process: "subprocess.Popen[bytes]") -> None:
        """End it and its broker, which cannot remove its cgroups then."""
        broker = self.broker()
        process.kill()
        with suppress(psutil.Error):
            if broker is not None:
                prefix = f"-{broker.pid}-"
                self.brokers = {name for name in self.brokers if not name.startswith(prefix)}
                broker.kill()

    def _sample(self, pid: int) -> None:
        with suppress(OSError, psutil.Error):
            rss = psutil.Process(pid).memory_info().rss >> 10
            fds = len(os.listdir(f"/proc/{pid}/fd"))
            self.ledger.samples.append(Sample(pid, self.now(), rss, fds))

    def _started(self) -> "subprocess.Popen[bytes]":
        host, port = self.tcp
        places = ["--socket", str(self.socket), "--data-dir", str(self.disk.data)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sbx", "serve", *places, "--listen", f"{host}:{port}"],
                env=self._environment(),
                cwd=self.disk.top,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SBX_")}
        here = str(Path(__file__).resolve().parents[2])
        return {
            **kept,
            **_SETTINGS,
            "SBX_AGENT_BASE_URL": self.model_url,
            "PYTHONPATH": here,
        }

    async def _answers(self) -> None:
        while True:
            with suppress(httpx.HTTPError):
                async with self.client() as client, asyncio.timeout(5):
                    if (await client.get("/health")).status_code == 200:
                        return
            await asyncio.sleep(_LOOK_S)
