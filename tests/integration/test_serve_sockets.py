"""The socket of a service: whose it is, who may connect, and what it does about an older one."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import short_directory

from sbx.api.server.settings import ServiceSettings
from sbx.api.server.sockets import Listener, listen_on_tcp, listen_on_unix
from sbx.errors import BadRequest, Conflict, Denied, Unavailable


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def listen(path: Path, **more: Any) -> Listener:
    return listen_on_unix(ServiceSettings(socket=path, data_dir=path.parent, **more))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_private_whatever_the_umask_is(top: Path) -> None:
    before = os.umask(0)
    try:
        listener = listen(top / "sbx" / "sbx.sock")
    finally:
        assert os.umask(before) == 0
    assert (mode(top / "sbx"), mode(top / "sbx" / "sbx.sock")) == (0o700, 0o600)
    listener.close()


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("more", "of_directory", "of_socket"),
    [
        ({"socket_group": "12345"}, 0o710, 0o660),
        ({"socket_group": "12345", "socket_mode": 0o600}, 0o700, 0o600),
        ({"socket_mode": 0o666}, 0o711, 0o666),
    ],
)
def test_it_is_opened_to_whom_the_operator_names(
    top: Path, more: dict[str, Any], of_directory: int, of_socket: int
) -> None:
    path = top / "sbx" / "sbx.sock"
    listener = listen(path, **more)
    assert (mode(path.parent), mode(path)) == (of_directory, of_socket)
    if "socket_group" in more:
        assert path.stat().st_gid == path.parent.stat().st_gid == 12345
    listener.close()


def test_a_group_that_is_not_there_is_refused(top: Path) -> None:
    with pytest.raises(BadRequest, match="no group nobody-here"):
        listen(top / "sbx.sock", socket_group="nobody-here")


def test_what_a_dead_service_left_is_replaced(top: Path) -> None:
    path = top / "sbx.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    listener = listen(path)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
    listener.close()


def test_a_living_service_is_not_touched(top: Path) -> None:
    path = top / "sbx.sock"
    first = listen(path)
    with pytest.raises(Conflict) as raised:
        listen(path)
    assert raised.value.code == "already_running"
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
    first.close()


def test_a_service_that_is_too_busy_to_answer_lives(top: Path) -> None:
    path = top / "sbx.sock"
    waiting = []
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(2):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect_ex(str(path))
            waiting.append(one)
        with pytest.raises(Conflict):
            listen(path)
        for one in waiting:
            one.close()


def test_what_is_no_socket_is_never_removed(top: Path) -> None:
    path = top / "sbx.sock"
    path.write_text("mine")
    with pytest.raises(Conflict) as raised:
        listen(path)
    assert raised.value.code == "socket_path_taken"
    assert path.read_text() == "mine"


def test_a_symlink_is_not_followed(top: Path) -> None:
    (top / "elsewhere").write_text("mine")
    (top / "sbx.sock").symlink_to(top / "elsewhere")
    with pytest.raises(Conflict):
        listen(top / "sbx.sock")
    assert (top / "elsewhere").read_text() == "mine"


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777])
def test_a_directory_where_others_write_is_refused(top: Path, bits: int) -> None:
    shared = top / "shared"
    shared.mkdir()
    shared.chmod(bits)
    with pytest.raises(Denied) as raised:
        listen(shared / "sbx.sock")
    assert raised.value.code == "socket_directory_not_private"


def test_another_s_socket_in_its_place_is_left_at_the_end(top: Path) -> None:
    path = top / "sbx.sock"
    listener = listen(path)
    path.unlink()
    path.write_text("somebody's")
    listener.close()
    assert path.exists()


def test_a_path_that_is_too_long_is_told(top: Path) -> None:
    with pytest.raises(Unavailable) as raised:
        listen(top / ("x" * 120) / "sbx.sock")
    assert raised.value.code == "socket_unavailable"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_tcp_listens_where_it_is_told(host: str) -> None:
    try:
        listener = listen_on_tcp(f"{host}:0")
    except Unavailable:
        if host == "127.0.0.1":
            raise
        pytest.skip("this host has no IPv6")
    assert listener.shown.startswith(f"http://{host}:")
    with pytest.raises(Unavailable) as raised:
        listen_on_tcp(listener.shown.removeprefix("http://"))
    assert raised.value.code == "address_unavailable"
    listener.close()
