"""The relay inside: bytes both ways, ends of either side, and a proxy that is gone."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbx.guest.supervisor import proxy_relay

SOCKET_S = 60


@pytest.fixture
def relayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Relayed"]:
    monkeypatch.setattr(proxy_relay, "_IDLE_S", 0.2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(proxy_relay, "SOCKET", "s")  # a short path, wherever the tests run
    made = Relayed()
    yield made
    made.close()


class Relayed:
    """A relay in a thread; `proxy` says what becomes of a connection outside."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.outside = socket.socket(socket.AF_UNIX)
        self.threads: list[threading.Thread] = []

    def proxy(self, act: Callable[[socket.socket], object]) -> None:
        self.outside.bind("s")
        self.outside.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = self.outside.accept()
                except OSError:
                    return
                with peer:
                    act(peer)

        self._start(serve)

    def start(self) -> None:
        self._start(lambda: proxy_relay.serve(self.listener))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=SOCKET_S)

    def _start(self, act: Callable[[], object]) -> None:
        self.threads.append(threading.Thread(target=act))
        self.threads[-1].start()

    def close(self) -> None:
        with self.outside:
            if self.outside.getsockname():
                self.outside.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(SOCKET_S)
            assert not thread.is_alive()
        self.listener.close()


def everything(sock: socket.socket) -> bytes:
    found = b""
    while piece := sock.recv(1 << 16):
        found += piece
    return found


def echo(peer: socket.socket) -> None:
    while piece := peer.recv(1 << 16):
        peer.sendall(piece)


def test_more_than_any_buffer_holds_comes_back_whole_and_in_order(relayed: Relayed) -> None:
    relayed.proxy(echo)
    relayed.start()
    sent = bytes(range(256)) * 40_000
    with relayed.connect() as inside:

        def send() -> None:
            inside.sendall(sent)
            inside.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        assert everything(inside) == sent
        sending.join()


def test_end_of_what_is_asked_is_told_and_the_answer_still_comes(relayed: Relayed) -> None:
    relayed.proxy(lambda peer: peer.sendall(everything(peer)[::-1]))
    relayed.start()
    with relayed.connect() as inside:
        inside.sendall(b"question")
        inside.shutdown(socket.SHUT_WR)
        assert everything(inside) == b"noitseuq"


def test_one_that_does_not_read_holds_up_nobody_else(relayed: Relayed) -> None:
    relayed.proxy(lambda peer: threading.Thread(target=flood, args=(peer.dup(),)).start())
    relayed.start()
    with relayed.connect() as lazy, relayed.connect() as keen:
        assert lazy.fileno() != keen.fileno()
        received = 0
        while received < 4 << 20:
            received += len(keen.recv(1 << 16))


def flood(peer: socket.socket) -> None:
    with peer:
        try:
            while True:
                peer.sendall(b"x" * 65536)
        except OSError:
            return


def test_proxy_that_hangs_up_ends_the_connection_inside(relayed: Relayed) -> None:
    relayed.proxy(lambda peer: peer.close())
    relayed.start()
    with relayed.connect() as inside:
        assert inside.recv(1) == b""


def test_without_a_proxy_the_answer_says_so_in_http(relayed: Relayed) -> None:
    relayed.start()
    with relayed.connect() as inside:
        inside.sendall(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
        answer = everything(inside)
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"the proxy of this sandbox does not answer" in answer


def test_more_connections_than_it_holds_wait_for_their_turn(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_relay, "_MOST", 2)
    relayed.proxy(lambda peer: threading.Thread(target=echo_and_close, args=(peer.dup(),)).start())
    relayed.start()
    open_ones = [relayed.connect() for _ in range(5)]
    for inside in open_ones:
        with inside:
            inside.sendall(b"hello")
            assert inside.recv(5) == b"hello"


def echo_and_close(peer: socket.socket) -> None:
    with peer:
        echo(peer)


def test_it_ends_when_nobody_has_used_it_for_a_while(relayed: Relayed) -> None:
    relayed.start()
    relayed.threads[-1].join(SOCKET_S)
    assert not relayed.threads[-1].is_alive()
