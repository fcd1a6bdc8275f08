"""Linux counts some things per user, or for the whole machine: one cell must not take them from the
host user, nor from another sandbox.

As an unprivileged user, jails and the host user are one user to Linux. As root, a sandbox has a uid
of its own, and some of these counters are no longer shared; the tests of those are skipped.
"""

import asyncio
import ctypes
import errno
import os
import resource
import socket
from array import array
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

import pytest
from attacking import Fresh, attack, attack_by_shell, by, one_path, prelude, tell

from sbx.errors import Unavailable
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
_SHARED_UID = pytest.mark.skipif(
    os.geteuid() == 0, reason="as root, a sandbox has a uid that no host program has"
)
_MESSAGE = 253  # SCM_MAX_FD
_HALF = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text()) // 2

TAKE = """
def take(act, most):
    'How many there were, and the error that ended it. They stay open in `taken`.'
    taken.clear()
    try:
        while len(taken) < most:
            taken.append(act())
        return len(taken), 'nothing'
    except OSError as error:
        return len(taken), errno.errorcode[error.errno]

def inotify_init():
    fd = _libc.inotify_init1(0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), 'inotify_init1')
    return fd

def open_pty():
    return os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)

taken = []
"""


# -- inotify ---------------------------------------------------------------------------------------


async def test_inotify_instances_of_a_jail_are_limited(fresh: Fresh, box: AsyncSandbox) -> None:
    """127 of 128 went to one cell: no editor of the user and no other sandbox got one."""
    greedy = await fresh()
    assert await tell(greedy, TAKE + "take(inotify_init, 400)") == (16, "EMFILE")
    assert (await tell(box, TAKE + "take(inotify_init, 8)"))[0] == 8
    await tell(box, "for fd in taken: os.close(fd)\n1")
    os.close(host_inotify())


async def test_all_jails_of_a_sandbox_leave_half_of_inotify(
    fresh: Fresh, box: AsyncSandbox, started_by: str
) -> None:
    """Eight conversations of one sandbox took what one cell no longer could."""
    if _HALF > 64:
        pytest.skip("this host allows more instances than a few jails may take")
    if started_by == "cold" and os.geteuid() == 0:
        pytest.skip("each sandbox has instances of its own by the cold path")
    greedy = await fresh()
    taken = 0
    for name in ("a", "b", "c", "d", "e"):
        run = await greedy.conversation(name).run(prelude() + TAKE + "take(inotify_init, 400)[0]")
        taken += int(run.result or 0)
    assert 16 < taken <= _HALF
    if os.geteuid() == 0:
        assert await tell(box, TAKE + "take(inotify_init, 16)[0]") == 16
        await tell(box, "for fd in taken: os.close(fd)\n1")
    os.close(host_inotify())


async def test_inotify_watches_of_a_jail_are_limited(fresh: Fresh) -> None:
    greedy = await fresh()
    watch = """
instance = _libc.inotify_init1(0)
os.mkdir('/tmp/many')
count = 0
try:
    for count in range(9000):
        path = f'/tmp/many/{count}'
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        if _libc.inotify_add_watch(instance, path.encode(), 2) < 0:
            raise OSError(ctypes.get_errno(), 'inotify_add_watch')
    met = 'nothing'
except OSError as error:
    met = errno.errorcode[error.errno]
(count, met)
"""
    assert await tell(greedy, watch) == (8192, "ENOSPC")


async def test_watches_of_files_work_beside_a_greedy_jail(fresh: Fresh) -> None:
    """The runtime watches files for its callers by inotify instances of the host user."""
    greedy, other = await fresh(), await fresh()
    await tell(greedy, TAKE + "take(inotify_init, 400)")
    async with asyncio.timeout(60), aclosing(other.files.watch()) as changes:
        assert (await anext(changes)).kind == "started"


# -- pseudo-terminals ------------------------------------------------------------------------------


async def test_pseudo_terminals_of_a_jail_are_limited(fresh: Fresh, box: AsyncSandbox) -> None:
    """Five processes took all 3,072 of the machine: no other sandbox could open a terminal."""
    greedy = await fresh()
    assert await tell(greedy, TAKE + "take(open_pty, 400)") == (64, "ENOSPC")
    assert await attack_by_shell(greedy, "os.openpty()") == "ENOSPC"
    terminal = await box.terminals.open(command="cat")
    await terminal.close()
    spawn = "for fd in taken: os.close(fd)\nimport pty; pty.spawn(['tty'])"
    assert await tell(greedy, spawn) == 0
    terminal = await greedy.terminals.open(command="cat")
    await terminal.close()


# -- pipes and epoll -------------------------------------------------------------------------------


async def test_a_pipe_cannot_be_made_larger(box: AsyncSandbox) -> None:
    """62 pipes of 1 MiB took all pages that the user has for pipes."""
    larger = "import fcntl; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)"
    assert await attack(box, larger) == "EPERM"
    assert await attack_by_shell(box, larger) == "EPERM"
    assert await attack(box, larger.replace("1 << 20", "1 << 16")) == "ok"


HOARD = """
def hoard(act, processes, each):
    for _ in range(processes):
        if not os.fork():
            kept = [act() for _ in range(each)]
            time.sleep(60)
            os._exit(0)
    time.sleep(60)

def half_a_pipe():
    reading, writing = os.pipe()
    os.close(writing)
    return reading
"""
HIDE = "call({'x86_64': 157, 'aarch64': 167}[os.uname().machine], 4, 0, 0, 0, 0)\n"


@_SHARED_UID
@pytest.mark.parametrize(
    "how",
    [
        "hoard(half_a_pipe, 4, 400)",
        HIDE + "hoard(half_a_pipe, 4, 400)",
        "import select; hoard(select.epoll, 4, 400)",
    ],
    ids=["pipes", "hidden pipes", "epoll instances"],
)
async def test_a_jail_with_too_many_pipes_or_epoll_instances_is_killed(
    fresh: Fresh, how: str
) -> None:
    """1,024 pipes left 8 KiB to each new pipe of the user; 5.5 million watches, none at all."""
    greedy = await fresh()
    assert await attack(greedy, HOARD + how, timeout=60) == "killed:descriptors"
    assert await tell(greedy, "6 * 7") == 42


# -- descriptors in flight -------------------------------------------------------------------------

SEND = """
pairs, sent = [], 0
try:
    while sent < 5000:
        pairs.append(socket.socketpair())
        socket.send_fds(pairs[-1][0], [b'x'], [0] * 253)
        sent += 253
    met = 'nothing'
except OSError as error:
    met = errno.errorcode[error.errno]
(sent, met)
"""


def host_inotify() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    instance: int = libc.inotify_init1(os.O_CLOEXEC)
    assert instance >= 0, errno.errorcode[ctypes.get_errno()]
    return instance


@contextmanager
def usual_open_files() -> Iterator[None]:
    """With the soft limit that most programs have, which CI machines may have raised."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@_SHARED_UID
async def test_descriptors_in_flight_leave_room_to_the_host(fresh: Fresh) -> None:
    """After 1,250 the host user could pass no descriptor, and sbx could start no sandbox."""
    greedy = await fresh()
    sent, met = await tell(greedy, SEND)
    assert met == "ETOOMANYREFS"
    assert sent < 1024
    with usual_open_files():
        ours, its = socket.socketpair()
        with ours, its:
            socket.send_fds(ours, [b"x"], [0])
        other = await fresh()
        assert await tell(other, "6 * 7") == 42


@one_path()  # the broker gets the sockets of a jail of any path
@_SHARED_UID
async def test_too_many_descriptors_in_flight_are_a_clear_error(fresh: Fresh) -> None:
    """A program of the host can take them all the same: sbx waits a moment, and names the cause."""
    box = await fresh()
    with usual_open_files(), socket_pair() as (ours, its), by("cold"):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0] * _MESSAGE))]
        with suppress(OSError):
            while ours.sendmsg([b"x"], rights):
                pass
        with pytest.raises(Unavailable) as raised:
            await box.start()
        assert raised.value.code == "too_many_in_flight"
        assert raised.value.hint
        its.close()
        assert await tell(box, "6 * 7") == 42


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its
