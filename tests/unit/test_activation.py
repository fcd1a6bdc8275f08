"""What systemd hands over, and what it is told."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sbx.api.server.systemd import Notifier, inherited_sockets
from sbx.errors import BadRequest

_AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), "1"
from sbx.api.server.systemd import inherited_sockets
[one] = inherited_sockets()
print(one.getsockname(), one.fileno(), os.get_inheritable(3), "LISTEN_FDS" in os.environ)
"""


@pytest.mark.parametrize(
    "environment",
    [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_PID": str(os.getpid())}],
)
def test_what_is_meant_for_another_process_is_left_alone(environment: dict[str, str]) -> None:
    assert inherited_sockets(environment) == []
    assert environment == {}


def test_a_listening_socket_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        answer = subprocess.run(
            [sys.executable, "-c", _AS_SYSTEMD, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
    assert answer.stdout.split() == [path, "3", "False", "False"]


def test_a_socket_that_does_not_listen_is_refused() -> None:
    script = _AS_SYSTEMD.replace("[one]", "one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        answer = subprocess.run(
            [sys.executable, "-c", script, str(deaf.fileno())],
            pass_fds=[deaf.fileno()],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
    assert BadRequest.__name__ in answer.stderr


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path: Path, abstract: bool) -> None:
    name = f"@sbx-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if abstract else name)
        systemd.settimeout(60)
        environment = {"NOTIFY_SOCKET": name}
        notifier = Notifier(environment)
        notifier.ready("listening on x")
        notifier.stopping()
        notifier.close()
        assert systemd.recv(100) == b"READY=1\nSTATUS=listening on x"
        assert systemd.recv(100).startswith(b"STOPPING=1")
        assert environment == {}


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_without_systemd_nothing_is_told(environment: dict[str, str]) -> None:
    notifier = Notifier(environment)
    notifier.ready("")
    notifier.close()


def test_a_systemd_that_went_away_is_no_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.ready("")
    notifier.stopping()
