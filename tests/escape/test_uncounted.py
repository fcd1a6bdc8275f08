"""Memory and disk space that no process shows is counted, and ends its own sandbox only.

One row for each way to hold a resource in Linux itself: in flight through a socket, mapped and
closed, by a process that hides its files, in the queues of sockets, in System V segments, as names
of a tmpfs. unit/test_kernel_objects.py names the limit of each kind of object.
"""

import shlex
from typing import Any

import pytest
from attacking import Fresh, attack, by, one_path, outcome, prelude, run, tell

from sbx import Runtime
from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = [pytest.mark.core, one_path()]  # the watchers ask Linux, whoever forked the jail
MIB = 1 << 20

# Each holds so many MiB more with each step, up to 400.
MEMORY = {
    "memfd in flight": """
ours, theirs = socket.socketpair()
def step():
    fd = os.memfd_create('hoard')
    os.write(fd, bytes(8 << 20))
    socket.send_fds(ours, [b'x'], [fd])
    os.close(fd)
""",
    "memfd mapped and closed": """
def step():
    fd = os.memfd_create('hoard')
    os.write(fd, bytes(8 << 20))
    assert _libc.mmap(None, 4096, 1, 1, fd, 0)
    os.close(fd)
""",
    "shared memory without a file": """
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def step():
    where = _libc.mmap(None, 8 << 20, 3, 0x21, -1, 0)
    ctypes.memset(where, 1, 8 << 20)
    assert not _libc.madvise(where, 8 << 20, 4)  # MADV_DONTNEED
""",
    "page tables": """
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def step():
    where = _libc.mmap(None, 4 << 30, 1, 0x4022, -1, 0)  # MAP_NORESERVE
    assert not _libc.madvise(where, 4 << 30, 15)  # MADV_NOHUGEPAGE
    for page in range(0, 4 << 30, 2 << 20):  # a table each
        ctypes.string_at(where + page, 1)
""",
    "memfd of a process that hides": """
_libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
def step():
    held.append(os.memfd_create('hoard'))
    os.write(held[-1], bytes(8 << 20))
""",
    "System V segments": """
def step():
    segment = call('shmget', 0, 8 << 20, 0o1600)
    where = call('shmat', segment, 0, 0)
    ctypes.memset(where, 1, 8 << 20)
    call('shmdt', where)
""",
    "unread Unix sockets": """
def step():
    for ours in [end for _ in range(8) for end in socket.socketpair()]:
        held.append(ours)
        ours.setblocking(False)
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(64 << 10))
""",
    "unread datagrams": """
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def step():
    for _ in range(16):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(('127.0.0.1', 0))
        with suppress(OSError):
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        held.append(receiver)
        for _ in range(40):
            sender.sendto(bytes(60_000), receiver.getsockname())
""",
    "unread connections": """
server = socket.create_server(('127.0.0.1', 0), backlog=400)
def step():
    for _ in range(8):
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        held.extend([ours, theirs])
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        ours.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(60):
                ours.send(bytes(64 << 10))
""",
}
DISK = {
    "in flight": """
ours, theirs = socket.socketpair()
def step():
    file = nameless()
    socket.send_fds(ours, [b'x'], [file])
    os.close(file)
""",
    "in flight within a socket in flight": """
ours, theirs = socket.socketpair()
def step():
    file = nameless()
    inner, end = socket.socketpair()
    with inner, end:
        socket.send_fds(inner, [b'x'], [file])
        socket.send_fds(ours, [b'x'], [inner.fileno(), end.fileno()])
    os.close(file)
""",
    "mapped and closed": """
def step():
    file = nameless()
    assert _libc.mmap(None, 4096, 1, 1, file, 0)
    os.close(file)
""",
    "the program of a process": """
def step():
    program = open('/bin/sleep', 'rb').read() + bytes(8 << 20)
    with open('program', 'wb') as file:
        file.write(program)
    os.chmod('program', 0o700)
    held.append(subprocess.Popen(['./program', '600']))
    while os.readlink(f'/proc/{held[-1].pid}/exe') != '/workspace/program':
        time.sleep(0.001)
    os.unlink('program')
""",
    "of a process that hides": """
_libc.prctl(4, 0, 0, 0, 0)
def step():
    held.append(nameless())
""",
    "of a program that cannot be read": """
os.makedirs('bin')
open('bin/bash', 'wb').write(open('/bin/bash', 'rb').read())
os.chmod('bin/bash', 0o111)
hide = 'while read _; do exec {fd}>file; rm file; head -c 8M /dev/zero >&$fd; echo; done'
child = subprocess.Popen(['bin/bash', '-c', hide], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def step():
    child.stdin.write(b'x\\n')
    child.stdin.flush()
    child.stdout.readline()
""",
}
_SETUP = """
from contextlib import suppress
held = []
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def nameless():
    file = os.open('file', os.O_RDWR | os.O_CREAT)
    os.unlink('file')
    os.write(file, bytes(8 << 20))
    return file
"""
_HOARD = """
for _ in range({steps}):
    step()
    time.sleep(0.03)
time.sleep({hold})
"""


def hoard(way: str, steps: int, hold: float) -> str:
    return _SETUP + way + _HOARD.format(steps=steps, hold=hold)


async def with_limits(fresh: Fresh, on: Runtime | None = None, **limits: Any) -> AsyncSandbox:
    policy = load("default")
    wider = policy.limits.model_validate({**policy.limits.model_dump(mode="json"), **limits})
    return await fresh(policy.model_copy(update={"limits": wider}), on=on)


@pytest.mark.unprivileged
@pytest.mark.parametrize("way", rows(list(MEMORY), ci_tier=["memfd in flight", "unread datagrams"]))
async def test_memory_that_no_process_shows_is_counted_without_cgroups(
    fresh: Fresh, bare_runtime: Runtime, way: str
) -> None:
    """Each way held 3 GiB under a limit of 1 GiB: the watcher summed the memory of processes."""
    hungry = await with_limits(fresh, bare_runtime, memory_max="100MiB")
    assert await attack(hungry, hoard(MEMORY[way], 30, 600)) == "killed:memory"
    assert await tell(hungry, "6 * 7") == 42


@pytest.mark.full_tier
@pytest.mark.unprivileged
@pytest.mark.parametrize("way", MEMORY)
async def test_as_much_memory_is_allowed_under_a_wider_limit(
    fresh: Fresh, bare_runtime: Runtime, way: str
) -> None:
    """The control of the test before."""
    content = await with_limits(fresh, bare_runtime, memory_max="900MiB")
    assert await attack(content, hoard(MEMORY[way], 6, 2)) == "ok"


@pytest.mark.needs("memory")
@pytest.mark.parametrize(
    "way", rows(["unread datagrams", "unread connections"], ci_tier=["unread datagrams"])
)
async def test_queues_of_sockets_have_a_limit_under_cgroups(fresh: Fresh, way: str) -> None:
    """cgroup v1 counts them only in a group with memory.kmem.tcp: 2.2 GiB passed 200 MiB."""
    hungry = await with_limits(fresh, memory_max="160MiB")
    count = """
total = 0
for receiver in held:
    receiver.setblocking(False)
    with suppress(BlockingIOError):
        while piece := receiver.recv(1 << 16):
            total += len(piece)
total
"""
    done = await run(hungry, hoard(MEMORY[way], 10, 0) + count)
    if done.ok:  # Linux dropped the rest
        assert done.result is not None
        assert int(done.result) < 80 * MIB
    else:
        assert outcome(done) == "killed:memory"


@pytest.mark.unprivileged
@pytest.mark.parametrize("path", ["fork", "cold"])
async def test_each_tmpfs_has_a_limit_of_names(fresh: Fresh, path: str) -> None:
    """3.1 million empty files of 1 KiB each fitted into either one."""
    with by(path):
        box = await fresh()
        look = "[os.statvfs(place).f_files for place in ('/tmp', '/dev/shm')]"
        assert await tell(box, look) == [128 << 10] * 2


@pytest.mark.full_tier
async def test_names_of_a_tmpfs_count_as_memory(fresh: Fresh, bare_runtime: Runtime) -> None:
    hungry = await with_limits(fresh, bare_runtime, memory_max="100MiB")
    fill = "for n in range(130_000):\n    os.close(os.open(f'/tmp/{n}', os.O_CREAT))\n"
    assert await attack(hungry, fill + "time.sleep(600)") == "killed:memory"


@pytest.mark.unprivileged
@pytest.mark.parametrize("path", ["fork", "cold"])
async def test_no_rule_of_landlock_keeps_a_removed_file(fresh: Fresh, path: str) -> None:
    """A rule holds the inode of its file: 480 MiB stayed under a limit of 64 MiB, without a
    descriptor. 125 rulesets with a rule for each port were 500 MiB of Linux's memory."""
    # landlock_create_ruleset, _add_rule, _restrict_self
    refused = "[names_of(call, number, 0, 0, 1, 0) for number in (444, 445, 446)]"
    with by(path):
        box = await fresh()
        assert await tell(box, refused) == ["ENOTSUP"] * 3
        done = await box.shell(f"python3 -c {shlex.quote(prelude() + f'print({refused})')}")
        assert str(["ENOTSUP"] * 3) in done.stdout


@pytest.mark.unprivileged
@pytest.mark.parametrize("way", rows(list(DISK), ci_tier=["in flight", "mapped and closed"]))
async def test_files_that_no_process_shows_count_for_the_workspace(fresh: Fresh, way: str) -> None:
    """The watcher looked at descriptors only: each way held 240 to 480 MiB of 64 MiB."""
    full = await with_limits(fresh, workspace_max="64MiB")
    assert await attack(full, hoard(DISK[way], 50, 600)) == "killed:disk"
    assert await tell(full, "6 * 7") == 42


@pytest.mark.full_tier
@pytest.mark.unprivileged
@pytest.mark.parametrize("way", DISK)
async def test_as_many_files_are_allowed_under_a_wider_limit(fresh: Fresh, way: str) -> None:
    """The control of the test before."""
    roomy = await with_limits(fresh, workspace_max="600MiB")
    assert await attack(roomy, hoard(DISK[way], 12, 2)) == "ok"


@pytest.mark.full_tier
async def test_descriptors_in_flight_alone_end_nothing(fresh: Fresh) -> None:
    """multiprocessing and ray pass pipes and sockets all the time."""
    honest = await with_limits(fresh, workspace_max="256MiB", memory_max="600MiB")
    pipes = """
ours, theirs = socket.socketpair()
def step():
    reading, writing = os.pipe()
    socket.send_fds(ours, [b'x'], [reading])
    os.close(reading)
    os.close(writing)
open('data', 'wb').write(bytes(64 << 20))
"""
    assert await attack(honest, hoard(pipes, 60, 2)) == "ok"
