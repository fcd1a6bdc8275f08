"""No packet leaves, none comes in, and no socket of the host is in reach.

The host listens, in this test process; the control shares its network namespace with the jail.
"""

# a look at /proc blocks nothing that matters to a test

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from attacking import Fresh, Without, attack, attack_by_shell, tell

from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core


class Listener:
    """A server of the host that says hello to whoever connects."""

    def __init__(self, family: int, address: object) -> None:
        self._sock = socket.socket(family)
        self._sock.bind(address)  # type: ignore[arg-type]
        self._sock.listen()
        self.address = self._sock.getsockname()
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._sock.accept()
                with peer:
                    peer.sendall(b"hello")

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()


@pytest.fixture
def loopback() -> Iterator[Listener]:
    listener = Listener(socket.AF_INET, ("127.0.0.1", 0))
    yield listener
    listener.close()


CONNECT = """
sock = socket.socket({family})
sock.settimeout(5)
sock.connect({address!r})
assert sock.recv(5) == b'hello'
"""


@pytest.mark.unprivileged
async def test_the_loopback_of_the_host_is_another_one(
    box: AsyncSandbox, without: Without, loopback: Listener
) -> None:
    connect = CONNECT.format(family="socket.AF_INET", address=loopback.address)
    assert await attack(box, connect) == "ECONNREFUSED"
    assert await attack_by_shell(box, connect) == "ECONNREFUSED"
    assert await attack(await without("net"), connect) == "ok"


@pytest.mark.unprivileged
async def test_the_local_network_is_unreachable(box: AsyncSandbox, without: Without) -> None:
    addresses = [
        one.address
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    if not addresses:
        pytest.skip("this host has no address but its loopback's")
    listener = Listener(socket.AF_INET, (addresses[0], 0))
    connect = CONNECT.format(family="socket.AF_INET", address=listener.address)
    try:
        assert await attack(box, connect) == "ENETUNREACH"
        assert await attack(await without("net"), connect) == "ok"
    finally:
        listener.close()


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "169.254.169.254", "10.0.0.1", "1.1.1.1", "255.255.255.255"]
)
@pytest.mark.unprivileged
async def test_no_address_has_a_route(box: AsyncSandbox, address: str) -> None:
    for kind in ("STREAM", "DGRAM"):
        connect = f"socket.socket(socket.AF_INET, socket.SOCK_{kind}).connect(({address!r}, 80))"
        assert await attack(box, connect) in ("ENETUNREACH", "EACCES")
    assert await attack(
        box, f"socket.socket(socket.AF_INET6).connect(('::ffff:{address}', 80))"
    ) in ("ENETUNREACH", "EADDRNOTAVAIL")


async def test_no_name_is_resolved(box: AsyncSandbox) -> None:
    assert await attack(box, "socket.getaddrinfo('example.org', 80)") == "gaierror"
    assert (await box.shell("exec 3<>/dev/tcp/example.org/80")).exit_code != 0
    assert await tell(box, "socket.gethostbyname('localhost')") == "127.0.0.1"


@pytest.mark.unprivileged
async def test_the_only_interface_is_a_loopback(box: AsyncSandbox, without: Without) -> None:
    names = "sorted(name for _, name in socket.if_nameindex())"
    assert await tell(box, names) == ["lo"]
    assert await tell(await without("net"), names) == sorted(
        name for _, name in socket.if_nameindex()
    )


async def test_nobody_comes_in(box: AsyncSandbox) -> None:
    """A server inside is for the inside: it is found by a command, and not by the host."""
    port = await tell(box, "server = socket.create_server(('0.0.0.0', 0)); server.getsockname()[1]")
    assert (await box.shell(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).exit_code == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.unprivileged
async def test_abstract_sockets_of_the_host_are_out_of_reach(
    box: AsyncSandbox, without: Without
) -> None:
    """By the network namespace, and by Landlock's scope even where that is shared."""
    listener = Listener(socket.AF_UNIX, "\0sbx-test-listener")
    connect = CONNECT.format(family="socket.AF_UNIX", address="\0sbx-test-listener")
    try:
        assert await attack(box, connect) == "ECONNREFUSED"
        shared = await attack(await without("net"), connect)
        assert shared in ("EPERM", "ok")  # ok before Landlock's ABI 6
        assert await attack(await without("net", "landlock"), connect) == "ok"
    finally:
        listener.close()


async def test_a_socket_on_the_hosts_file_system_is_not_in_the_view(
    box: AsyncSandbox, fresh: Fresh, own_temporary_directory: Path
) -> None:
    """docker.sock, D-Bus. One in a folder that the policy mounts is masked, unless the policy says
    `unix_sockets = "any"`: then it can be reached, although the mount is read-only."""
    folder = own_temporary_directory / "with-socket"
    folder.mkdir()
    folder.chmod(0o755)
    listener = Listener(socket.AF_UNIX, str(folder / "s"))
    (folder / "s").chmod(0o777)
    try:
        connect = CONNECT.format(family="socket.AF_UNIX", address=str(folder / "s"))
        assert await attack(box, connect) == "ENOENT"
        policy = load("default")
        shown = {"source": str(folder), "target": "/opt/mounted"}
        filesystem = policy.filesystem.model_validate({"mount": [shown]})
        shows = policy.model_copy(update={"filesystem": filesystem})
        connect = CONNECT.format(family="socket.AF_UNIX", address="/opt/mounted/s")
        assert await attack(await fresh(shows), connect) == "EACCES"
        control = await fresh(shows.model_copy(update={"unix_sockets": "any"}))
        assert await attack(control, connect) == "ok"
    finally:
        listener.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("family", "kind", "protocol"),
    [
        ("AF_PACKET", "SOCK_RAW", 3),
        ("AF_INET", "SOCK_RAW", 1),
        ("AF_INET", "SOCK_STREAM", 262),
        ("AF_NETLINK", "SOCK_RAW", 9),
        ("AF_NETLINK", "SOCK_RAW", 12),
        ("AF_NETLINK", "SOCK_RAW", 15),
        ("AF_VSOCK", "SOCK_STREAM", 0),
        ("AF_ALG", "SOCK_SEQPACKET", 0),
        ("AF_TIPC", "SOCK_STREAM", 0),
        ("AF_CAN", "SOCK_RAW", 1),
    ],
)
async def test_no_socket_of_a_rare_family_or_protocol(
    box: AsyncSandbox, without: Without, family: str, kind: str, protocol: int
) -> None:
    """The control tells whether this linux has it at all; some need a module or a capability."""
    make = f"socket.socket(socket.{family}, socket.{kind}, {protocol}).close()"
    refused = ("EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT")
    assert await attack(box, make) in refused
    assert await attack_by_shell(box, make) in refused
    control = await attack(await without("seccomp"), make)
    if (family, protocol) in (("AF_NETLINK", 9), ("AF_NETLINK", 15)):
        assert control == "ok"


# Every family of Linux, with every type and protocol: `AF_MAX` is 46, MPTCP has the protocol 262.
EVERY_SOCKET = """
import itertools
opened = set()
def attempt(make, family, kind, protocol):
    try:
        made = make(family, kind, protocol)
    except OSError:
        return
    opened.add((make is socket.socketpair, family, kind, protocol))
    for one in made if isinstance(made, tuple) else (made,):
        one.close()
for family, kind in itertools.product(FAMILIES, (1, 2, 3, 4, 5, 6, 10)):
    for protocol in range(264):
        attempt(socket.socket, family, kind, protocol)
    for protocol in range(3):
        attempt(socket.socketpair, family, kind, protocol)
sorted(opened)
"""
# Linux makes a datagram socket of a raw Unix socket.
USUAL_SOCKETS = {
    *((pair, 1, kind, protocol) for pair in (False, True) for kind in (1, 2, 3, 5)
      for protocol in (0, 1)),
    *((False, family, 1, protocol) for family in (2, 10) for protocol in (0, 6)),
    *((False, family, 2, protocol) for family in (2, 10) for protocol in (0, 17)),
    *((False, 16, kind, 0) for kind in (2, 3)),
}  # fmt: skip


@pytest.mark.unprivileged
async def test_no_other_combination_makes_a_socket(box: AsyncSandbox, without: Without) -> None:
    """CVE-2026-43284 and others: netlink for IPsec, AF_RXRPC, AF_ALG, vsock."""
    assert set(await tell(box, f"FAMILIES = range(48)\n{EVERY_SOCKET}")) == USUAL_SOCKETS
    netlinks = await tell(await without("seccomp"), f"FAMILIES = (16,)\n{EVERY_SOCKET}")
    assert set(netlinks) - USUAL_SOCKETS


@pytest.mark.unprivileged
async def test_urgent_data_of_unix_sockets_is_refused(box: AsyncSandbox, without: Without) -> None:
    """CVE-2025-38236."""
    send = "one, two = socket.socketpair()\none.send(b'x', socket.MSG_OOB)"
    assert await attack(box, send) == "ENOTSUP"
    assert await attack_by_shell(box, send) == "ENOTSUP"
    assert await attack(box, "socket.socketpair()[0].recv(1, socket.MSG_OOB)") == "ENOTSUP"
    assert await attack(await without("seccomp"), send) in ("ok", "ENOTSUP")  # CONFIG_AF_UNIX_OOB


@pytest.mark.unprivileged
async def test_buffers_of_sockets_stay_at_their_default(
    box: AsyncSandbox, without: Without
) -> None:
    """Sockets with buffers of rmem_max held gigabytes that cgroup v1 does not count (holes 5)."""
    sizes = """
sizes = []
for sock in (*socket.socketpair(), socket.socket(), socket.socket(type=socket.SOCK_DGRAM)):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        before = sock.getsockopt(socket.SOL_SOCKET, option)
        sock.setsockopt(socket.SOL_SOCKET, option, before // 4)
        sizes.append(sock.getsockopt(socket.SOL_SOCKET, option) == before)
(all(sizes), any(sizes))
"""
    assert await tell(box, sizes) == (True, True)
    assert await tell(await without("seccomp"), sizes) == (False, False)


@pytest.mark.unprivileged
async def test_ipc_of_the_host_is_out_of_reach(box: AsyncSandbox, without: Without) -> None:
    """System V shared memory, by the number that the host knows it by."""
    attach = "call('shmat', {segment}, 0, 0o10000)"
    bare = await without("ipc")
    segment = await tell(bare, "call('shmget', 0, 4096, 0o1666)")  # IPC_PRIVATE: of this test alone
    assert await attack(bare, attach.format(segment=segment)) == "ok"
    assert await attack(box, attach.format(segment=segment)) == "EINVAL"
    assert await attack(bare, f"call('shmctl', {segment}, 0, 0)") == "ok"


async def test_the_name_of_the_host_is_not_told(box: AsyncSandbox) -> None:
    assert await tell(box, "socket.gethostname()") == "sandbox"
    if socket.gethostname() != "sandbox":
        assert socket.gethostname() not in (await box.shell("cat /etc/hostname; env")).stdout
