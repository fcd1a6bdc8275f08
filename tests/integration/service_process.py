"""`sbx serve` as its own process, as systemd or a shell would start it."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from command import environment
from forked_serve import ServeProcess

START_S = 60.0
END_S = 60.0


@dataclass(frozen=True)
class Service:
    """A service that answers. `log` is what it has written so far, of both streams."""

    process: "subprocess.Popen[bytes] | ServeProcess"
    socket: Path
    data: Path
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, key: str | None = None) -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)),
            base_url="http://sbx",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=60,
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def kill(self) -> None:
        """kill -9, and wait until everything that it had started is gone as well."""
        family = psutil.Process(self.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(END_S)
        psutil.wait_procs(family, timeout=END_S)


@contextlib.contextmanager
def service(
    top: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    within: Path | None = None,
    executed: bool = False,
) -> Iterator[Service]:
    """Start one over `top`, wait until it answers, and end it at the end. `executed`: as a new
    Python, which a test of the start itself needs."""
    path, data, log = top / "run" / "sbx.sock", top / "data", top / "log"
    places = ["--socket", str(path), "--data-dir", str(data), "--log-format", "json"]
    command = ["serve", *places, *words]
    variables, directory = environment(**(env or {})), within or top
    process: subprocess.Popen[bytes] | ServeProcess
    if executed or launcher or pass_fds:
        with log.open("ab") as writing:
            process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "sbx", *command],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=variables,
                cwd=directory,
                pass_fds=tuple(pass_fds),
            )
    else:
        log.touch()
        process = ServeProcess(command, log=log, env=variables, cwd=directory)
    started = Service(process, path, data, log)
    try:
        wait_until(lambda: answers(started), process, log)
        yield started
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(started: Service) -> bool:
    """Asked by hand: httpx leaves the socket of a connection that is refused to the collector."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(START_S)
        try:
            asking.connect(str(started.socket))
            asking.sendall(b"GET /health HTTP/1.1\r\nhost: sbx\r\nconnection: close\r\n\r\n")
            return asking.recv(100).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


def wait_until(
    ready: Callable[[], bool], process: "subprocess.Popen[bytes] | ServeProcess", log: Path
) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        assert process.poll() is None, f"it ended: {log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"it did not answer: {log.read_text()[-4000:]}"
        time.sleep(0.02)
