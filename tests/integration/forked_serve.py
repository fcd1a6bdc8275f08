"""Start `sbx serve` without the second of CPU that its imports take.

A process that has imported the service forks each one. The fork gets the words, the environment,
the directory and the log, and runs the command from its beginning. Its parent ends at once, so it
becomes a child of the tests, which adopt orphans (tests/conftest.py). Tests of the start of the
service execute the command instead.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WORDS_MAX = 1 << 20
_START_S = 60.0
_FORKING = """
import sys; sys.path[:0] = sys.argv[1:3]
import sbx.api.server.serve, sbx.cli.serve
import forked_serve; forked_serve.fork_services(int(sys.argv[3]))
"""


class ForkServer:
    """The process that forks services. It ends when this object is closed."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_START_S)
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-c", _FORKING, str(ROOT), str(Path(__file__).parent)]
            self.process = subprocess.Popen(
                [*command, str(fd)], stdin=subprocess.DEVNULL, pass_fds=[fd]
            )

    def close(self) -> None:
        self.control.close()
        self.process.wait()


_servers: list[ForkServer] = []  # none until the first service starts


def running() -> ForkServer | None:
    return _servers[0] if _servers else None


def close() -> None:
    while _servers:
        _servers.pop().close()


class ServeProcess:
    """A running `sbx serve`, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, words: list[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> None:
        if not _servers:
            _servers.append(ForkServer())
        control = _servers[0].control
        request = json.dumps([words, str(log), dict(env), str(cwd)]).encode()
        control.send(request)
        self.pid = int(control.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            fd = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([fd], [], [], timeout)
            finally:
                os.close(fd)
            if not ended:
                raise subprocess.TimeoutExpired("sbx serve", timeout or 0.0)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_services(fd: int) -> None:
    """Fork a service for each request, until the tests close the socket."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    while request := control.recv(_WORDS_MAX):
        reading, writing = os.pipe()
        if (parent := os.fork()) == 0:
            if (service := os.fork()) == 0:
                control.close()
                os.close(reading)
                os.close(writing)
                _serve(*json.loads(request))
            os.write(writing, str(service).encode())
            os._exit(0)
        os.waitpid(parent, 0)  # now the tests are the parent of the service
        control.send(os.read(reading, 100))
        os.close(reading)
        os.close(writing)


def _serve(words: list[str], log: str, env: Mapping[str, str], cwd: str) -> None:
    from sbx.cli import main  # the tests need no command line here

    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    sys.argv = ["sbx", *words]
    sys.exit(main(words))
