"""The memory in the queues of sockets, in a network namespace of the test."""

import os
import socket
from contextlib import suppress

import pytest

from sbx.linux import namespaces, sock_diag
from tests.unit.in_child import in_child

pytestmark = pytest.mark.needs("root")
MIB = 1 << 20


def in_empty_namespace(*, close_sender: bool) -> tuple[int, int, int]:
    """Return the bytes before and after queues were filled, and the bytes that were sent."""
    namespaces.unshare(namespaces.Namespace.NET)
    with sock_diag.open_diag() as diag:
        before, sent, held = sock_diag.queued(diag), 0, []
        for _ in range(10):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sent += ours.send(bytes(8192))
            held.append(theirs)
            if close_sender:
                ours.close()
            else:
                held.append(ours)
        return before, sock_diag.queued(diag), sent


@pytest.mark.parametrize("close_sender", [False, True])
def test_unread_bytes_of_unix_sockets_are_counted(close_sender: bool) -> None:
    """Linux charges the sender, which no longer shows once it is closed."""

    def act(_report: int) -> str:
        return " ".join(map(str, in_empty_namespace(close_sender=close_sender)))

    before, after, sent = map(int, in_child(act).split())
    assert before == 0
    assert sent <= after < 3 * sent


def test_queue_of_a_socket_in_flight_is_counted() -> None:
    def act(_report: int) -> int:
        namespaces.unshare(namespaces.Namespace.NET)
        carrier, end = socket.socketpair()
        ours, theirs = socket.socketpair()
        ours.send(bytes(100_000))
        socket.send_fds(carrier, [b"x"], [ours.fileno(), theirs.fileno()])
        ours.close()
        theirs.close()
        with sock_diag.open_diag() as diag, carrier, end:
            return sock_diag.queued(diag)

    assert int(in_child(act)) >= 100_000


def test_sockets_of_another_namespace_are_not_counted() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(bytes(100_000))
        pid = os.getpid()

        def act(_report: int) -> str:
            namespaces.unshare(namespaces.Namespace.NET)
            with sock_diag.open_diag() as diag:
                return f"{sock_diag.queued(diag)} {os.getppid() == pid}"

        assert in_child(act) == "0 True"
