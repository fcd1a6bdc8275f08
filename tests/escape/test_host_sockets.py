"""Sockets and FIFOs of the host, in every kind of directory that a sandbox is shown.

Each attack was carried out before they were covered: neither a read-only mount nor Landlock below
ABI 9 stops a connection. The control is a policy that allows them.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacking import attack, attack_by_shell, tell
from places import short_directory

from sbx import Runtime
from sbx.errors import Unavailable
from sbx.isolation import masking
from sbx.policy import Policy, load
from sbx.policy.tables import Imports, MountPolicy, WallsPolicy
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = [
    pytest.mark.core,
    pytest.mark.needs("landlock"),
]
OWNER = 4242
HELD = ("EACCES", "EPERM", "ECONNREFUSED", "EBUSY", "EROFS", "EXDEV")
STREAM = "socket.socket(socket.AF_UNIX).connect({path})"
DATAGRAM = "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {path})"

ATTACKS = {
    "stream": STREAM.format(path="f'{TOP}/sub/deep/stream'"),
    "datagram": DATAGRAM.format(path="f'{TOP}/datagram'"),
    "datagram from a pair": (
        "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', f'{TOP}/datagram')"
    ),
    "by a symlink": STREAM.format(path="f'{TOP}/link'"),
    "by a hard link of the host's": STREAM.format(path="f'{TOP}/hard'"),
    "by a descriptor of its directory": (
        "fd = os.open(f'{TOP}/sub/deep', os.O_PATH)\n"
        + STREAM.format(path="f'/proc/self/fd/{fd}/stream'")
    ),
    "by a link that is made inside": (
        "os.link(f'{TOP}/sub/deep/stream', f'{TOP}/made')\n" + STREAM.format(path="f'{TOP}/made'")
    ),
    "after a rename of its directory": (
        "os.rename(f'{TOP}/sub/deep', f'{TOP}/sub/moved')\n"
        + STREAM.format(path="f'{TOP}/sub/moved/stream'")
    ),
    "after a rename of a directory above": (
        "os.rename(f'{TOP}/sub', f'{TOP}/moved')\n"
        + STREAM.format(path="f'{TOP}/moved/deep/stream'")
    ),
    "after a rename of the socket": (
        "os.rename(f'{TOP}/datagram', f'{TOP}/moved')\n" + DATAGRAM.format(path="f'{TOP}/moved'")
    ),
    "write to a FIFO": ("os.write(os.open(f'{TOP}/sub/pipe', os.O_WRONLY | os.O_NONBLOCK), b'x')"),
    "write to a FIFO by both ends": (
        "os.write(os.open(f'{TOP}/sub/pipe', os.O_RDWR | os.O_NONBLOCK), b'x')"
    ),
}


@dataclass
class Daemon:
    """A program of the host that has two sockets and a FIFO in a directory of a user."""

    directory: Path
    held: ExitStack = field(default_factory=ExitStack)

    def listen(self) -> None:
        (self.directory / "sub/deep").mkdir(parents=True)
        self.stream = self._bound("sub/deep/stream", socket.SOCK_STREAM)
        self.stream.listen(64)
        self.datagram = self._bound("datagram", socket.SOCK_DGRAM)
        (self.directory / "link").symlink_to("sub/deep/stream")
        (self.directory / "hard").hardlink_to(self.directory / "sub/deep/stream")
        os.mkfifo(self.directory / "sub/pipe")
        (self.directory / "sub/pipe").chmod(0o777)
        self.pipe = os.open(self.directory / "sub/pipe", os.O_RDWR | os.O_NONBLOCK)
        self.held.callback(os.close, self.pipe)
        if os.geteuid() == 0:  # a directory of root's is refused as a workspace
            for path in (self.directory, *self.directory.rglob("*")):
                os.chown(path, OWNER, OWNER, follow_symlinks=False)

    def reached(self) -> list[str]:
        """Which of them was used since the last call."""
        looks: dict[str, Callable[[], Any]] = {
            "stream": self._accept,
            "datagram": lambda: self.datagram.recv(16),
            "pipe": lambda: os.read(self.pipe, 16),
        }
        found = []
        for name, look in looks.items():
            try:
                look()
            except BlockingIOError:
                continue
            found.append(name)
        return found

    def _accept(self) -> None:
        self.stream.accept()[0].close()

    def _bound(self, name: str, kind: int) -> socket.socket:
        sock = self.held.enter_context(socket.socket(socket.AF_UNIX, kind))
        sock.bind(str(self.directory / name))
        (self.directory / name).chmod(0o777)  # for other users, too
        sock.setblocking(False)
        return sock


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_directory() as top, ExitStack() as held:
        (top / "shown").mkdir(mode=0o755)
        daemon = Daemon(top / "shown", held)
        daemon.listen()
        yield daemon


@dataclass
class Shown:
    """A sandbox that is shown the daemon's directory, at `top`."""

    box: AsyncSandbox
    top: str

    def code(self, attack: str) -> str:
        return f"TOP = {self.top!r}\n{attack}"


def policy(rule: str, directory: Path | None = None, **more: Any) -> Policy:
    changes: dict[str, Any] = {"unix_sockets": rule, "shared": directory is None, **more}
    if directory is not None:
        mount = MountPolicy(source=str(directory), target="/opt/shown")
        changes["filesystem"] = load("default").filesystem.model_copy(update={"mount": (mount,)})
    return load("default").model_copy(update=changes)


WAYS = (
    "workspace",
    "uploads",
    "uploads beside a workspace",
    "mount of the policy",
    "mount",
    "mount below shared",
    "writable mount",
)
CI_WAYS = ("workspace", "uploads beside a workspace", "mount below shared", "writable mount")


async def show(runtime: Runtime, daemon: Daemon, way: str, rule: str) -> Shown:
    directory = daemon.directory
    match way:
        case "workspace":
            box = await runtime.create(policy(rule, Path("/usr/share")), workspace=directory)
            return Shown(box, "/workspace")
        case "uploads":
            box = await runtime.create(policy(rule), uploads=directory)
            return Shown(box, "/workspace/uploads/temparea")
        case "uploads beside a workspace":
            beside = directory.parent / "beside"
            beside.mkdir(exist_ok=True)
            if os.geteuid() == 0:
                os.chown(beside, OWNER, OWNER)
            box = await runtime.create(policy(rule), workspace=beside, uploads=directory)
            return Shown(box, "/uploads")
        case "mount of the policy":
            return Shown(await runtime.create(policy(rule, directory)), "/opt/shown")
        case "mount":
            box = await runtime.create(policy(rule))
            await box.start()
            return Shown(box, await box.mount(directory, "/mnt/shown"))
        case _:
            box = await runtime.create(policy(rule, host_executables="allow"))
            await box.files.make_directory("shared/shown")
            await box.start()
            read_only = way != "writable mount"
            place = "/workspace/shared/shown"
            return Shown(box, await box.mount(directory, place, read_only=read_only))


@pytest_asyncio.fixture(scope="module", params=rows(WAYS, CI_WAYS))
async def shown(
    runtime: Runtime, daemon: Daemon, request: pytest.FixtureRequest
) -> AsyncIterator[Shown]:
    shown = await show(runtime, daemon, request.param, "own")
    yield shown
    await shown.box.close()


@pytest.mark.parametrize("how", ATTACKS)
@pytest.mark.unprivileged
async def test_nothing_of_the_host_is_reached(shown: Shown, daemon: Daemon, how: str) -> None:
    assert await attack(shown.box, shown.code(ATTACKS[how])) in HELD
    assert await attack_by_shell(shown.box, shown.code(ATTACKS[how])) in HELD
    assert daemon.reached() == []


async def test_later_kernel_does_not_reach_them_either(shown: Shown, daemon: Daemon) -> None:
    await shown.box.stop()
    assert await attack(shown.box, shown.code(ATTACKS["stream"])) in HELD
    assert await attack(shown.box, shown.code(ATTACKS["write to a FIFO"])) in HELD
    assert daemon.reached() == []


@pytest.mark.unprivileged
async def test_covered_socket_cannot_be_removed_or_uncovered(shown: Shown) -> None:
    for code in ("os.unlink", "os.truncate", "os.chmod"):
        words = "" if code == "os.unlink" else ", 0"
        done = await attack(shown.box, shown.code(f"{code}(f'{{TOP}}/datagram'{words})"))
        assert done in HELD


@pytest.mark.parametrize("way", rows(WAYS, CI_WAYS))
async def test_policy_can_allow_them(runtime: Runtime, daemon: Daemon, way: str) -> None:
    """The control: the attacks work where nothing is covered."""
    shown = await show(runtime, daemon, way, "any")
    try:
        assert await attack(shown.box, shown.code(ATTACKS["stream"])) == "ok"
        assert await attack_by_shell(shown.box, shown.code(ATTACKS["datagram"])) == "ok"
        assert daemon.reached() == ["stream", "datagram"]
        if shown.top.startswith("/workspace"):
            assert await attack(shown.box, shown.code(ATTACKS["write to a FIFO"])) == "ok"
            assert daemon.reached() == ["pipe"]
    finally:
        await shown.box.close()


# -- a policy without Unix sockets -----------------------------------------------------------------


@pytest_asyncio.fixture(scope="module")
async def socketless(runtime: Runtime, daemon: Daemon) -> AsyncIterator[Shown]:
    shown = await show(runtime, daemon, "workspace", "none")
    yield shown
    await shown.box.close()


@pytest.mark.parametrize("how", ATTACKS)
async def test_policy_without_unix_sockets_reaches_nothing(
    socketless: Shown, daemon: Daemon, how: str
) -> None:
    assert await attack(socketless.box, socketless.code(ATTACKS[how])) in HELD
    assert await attack_by_shell(socketless.box, socketless.code(ATTACKS[how])) in HELD
    assert daemon.reached() == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("socket.socket(socket.AF_UNIX)", "EPERM"),
        ("socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)", "EPERM"),
        ("socket.socketpair(type=socket.SOCK_DGRAM)", "EPERM"),
        ("socket.socketpair(type=socket.SOCK_RAW)", "EPERM"),
        ("socket.socketpair()", "ok"),
        ("socket.socketpair(type=socket.SOCK_SEQPACKET)", "ok"),
        ("socket.create_server(('127.0.0.1', 0)).close()", "ok"),
    ],
)
async def test_only_pairs_are_left_of_unix_sockets(
    socketless: Shown, daemon: Daemon, code: str, expected: str
) -> None:
    assert await attack(socketless.box, socketless.code(code)) == expected
    assert await attack_by_shell(socketless.box, socketless.code(code)) == expected
    assert daemon.reached() == []


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
async def test_pair_that_is_left_connects_nowhere_else(daemon: Daemon, kind: int) -> None:
    """So the filter can leave such pairs: Linux itself refuses, also when the other end is gone."""
    one, other = socket.socketpair(type=kind)
    with one:
        other.close()
        for path in ("sub/deep/stream", "datagram"):
            with pytest.raises(OSError, match=r"connected|wrong type"):
                one.connect(str(daemon.directory / path))
            with pytest.raises(OSError, match=r"connected|Broken pipe"):
                one.sendto(b"x", str(daemon.directory / path))
    assert daemon.reached() == []


async def test_strict_policy_sends_no_datagram_from_a_pair(
    runtime: Runtime, daemon: Daemon
) -> None:
    """The strict filter left datagram pairs, and a socket of one can send to any path."""
    changes = {"unix_sockets": "any", "imports": Imports(), "walls": WallsPolicy()}
    strict = load("strict").model_copy(update=changes)
    async with await runtime.create(strict, workspace=daemon.directory) as box:
        shown = Shown(box, "/workspace")
        assert await attack(box, shown.code(ATTACKS["datagram from a pair"])) == "EPERM"
        assert daemon.reached() == []


# -- what stays possible ---------------------------------------------------------------------------

SERVE = """
listener = socket.socket(socket.AF_UNIX)
listener.bind({path!r})
listener.listen()
"""


@pytest.mark.parametrize("place", ["/workspace", "/workspace/shared", "/tmp", "/dev/shm"])
async def test_sockets_that_code_makes_itself_work(runtime: Runtime, place: str) -> None:
    path = f"{place}/own"
    async with await runtime.create(policy("own")) as box:
        assert await attack(box, SERVE.format(path=path)) == "ok"
        assert await attack(box, STREAM.format(path=repr(path))) == "ok"
        assert await attack_by_shell(box, STREAM.format(path=repr(path))) == "ok"


async def test_directory_of_the_host_is_as_it_was(runtime: Runtime) -> None:
    """The covers are inside only, and a sandbox that ends leaves nothing on the host."""
    with short_directory() as top, ExitStack() as held:
        (top / "shown").mkdir(mode=0o755)
        daemon = Daemon(top / "shown", held)
        daemon.listen()
        before = sorted(str(path) for path in daemon.directory.rglob("*"))
        shown = await show(runtime, daemon, "workspace", "own")
        assert await attack(shown.box, shown.code(ATTACKS["stream"])) in HELD
        assert await attack(shown.box, "open('/workspace/sub/deep/new', 'w').close()") == "ok"
        with socket.socket(socket.AF_UNIX) as host:
            host.connect(str(daemon.directory / "sub/deep/stream"))
        assert daemon.reached() == ["stream"]
        await shown.box.close()
        (daemon.directory / "sub/deep/new").unlink()
        assert sorted(str(path) for path in daemon.directory.rglob("*")) == before


async def test_request_takes_the_host_s_sockets_away(runtime: Runtime, daemon: Daemon) -> None:
    """A policy that allows them and a request that does not share a zygote."""
    for rule, expected in (("any", ("ok",)), ("own", HELD), ("none", HELD)):
        narrower = {"unix_sockets": rule}
        created = runtime.create(policy("any"), narrower=narrower, workspace=daemon.directory)
        async with await created as box:
            shown = Shown(box, "/workspace")
            assert await attack(box, shown.code(ATTACKS["stream"])) in expected
    assert daemon.reached() == ["stream"]


async def test_directory_that_cannot_be_seen_to_is_mounted_only_without_unix_sockets(
    runtime: Runtime,
) -> None:
    """Its depth is beyond the limit: where masks are all there is, nothing is mounted."""
    with short_directory() as top:
        (top / "shown" / "/".join(["d"] * (masking.DEPTH_MAX + 2))).mkdir(parents=True)
        async with await runtime.create(policy("own")) as box:
            await box.start()
            with pytest.raises(Unavailable) as raised:
                await box.mount(top / "shown")
            assert raised.value.code == "sockets_not_masked"
            assert await attack(box, "os.listdir('/mnt/shown')") == "ENOENT"
        async with await runtime.create(policy("none")) as box:
            await box.start()
            await box.mount(top / "shown")
            assert await attack(box, "os.listdir('/mnt/shown')") == "ok"


@pytest.mark.unprivileged
async def test_workspace_that_cannot_be_seen_to_is_told_by_the_receipt(runtime: Runtime) -> None:
    with short_directory() as top:
        (top / "shown" / "/".join(["d"] * (masking.DEPTH_MAX + 2))).mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(top / "shown", OWNER, OWNER)
        async with await runtime.create(policy("own"), workspace=top / "shown") as box:
            (wall,) = (w for w in (await box.start()).walls if w["name"] == "unix_sockets")
            assert wall["weaker"]
            assert "masks: 0 sockets and FIFOs, not all" in wall["means"]


async def test_receipt_counts_the_covers(shown: Shown) -> None:
    receipt = await shown.box.start()
    (wall,) = (wall for wall in receipt.walls if wall["name"] == "unix_sockets")
    mounted = shown.top.startswith(("/mnt", "/workspace/shared"))
    means = "no directory of the host is shown" if mounted else "masks: 4 sockets and FIFOs"
    assert means in wall["means"]
    assert await tell(shown.box, "__import__('os').listdir('/proc/self/fd') != []")
