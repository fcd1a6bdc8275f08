"""`sbx serve` as its own process, with the settings of an operator."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from command import environment, in_process
from forked_serve import ServeProcess

START_S = 60.0
END_S = 60.0


@dataclass(frozen=True)
class Service:
    """A service that runs: where it is, and how to speak to it."""

    socket: Path
    data: Path
    log: Path
    process: ServeProcess

    def quick(
        self, *words: str | Path, stdin: bytes = b"", **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """A command of ours against it, in this process."""
        return in_process(*words, stdin=stdin, SBX_SOCKET=str(self.socket), **env)

    def empty(self) -> None:
        """Delete the sandboxes of the user who runs the tests."""
        ended = self.quick("rm", "--all", "--yes")
        assert ended.returncode == 0, ended.stderr

    def http(self, key: str | None = None) -> httpx.Client:
        """Plain HTTP over its socket; without a key, as the user who runs the tests."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://sbx", headers=headers, timeout=60)


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user can read. As root the service is another one, and pytest's own
    directories are 0700."""
    path = Path(tempfile.mkdtemp(prefix="serving-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def service(
    *options: str | Path, env: Mapping[str, str] | None = None, top: Path | None = None
) -> Iterator[Service]:
    """A service of its own, ended by SIGTERM. With `top` its data is kept there for a next one."""
    with ExitStack() as held:
        kept = top or held.enter_context(open_directory())
        socket, data, log = kept / "run" / "sbx.sock", kept / "data", kept / "log"
        words = ["serve", "--socket", str(socket), "--data-dir", str(data), *map(str, options)]
        said_before = log.stat().st_size if log.exists() else 0
        log.touch()
        process = ServeProcess(words, log=log, env=environment(**(env or {})), cwd=kept)
        held.callback(_end, process)
        _wait_for(process, log, said_before)
        yield Service(socket, data, log, process)


def _wait_for(process: ServeProcess, log: Path, said_before: int) -> None:
    deadline = time.monotonic() + START_S
    while b"listening on" not in log.read_bytes()[said_before:]:
        assert process.poll() is None, f"it ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"it does not answer: {log.read_text()}"
        time.sleep(0.05)


def _end(process: ServeProcess) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
