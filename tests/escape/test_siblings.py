"""What only forking makes possible: a jail learns nothing of those that its zygote forked besides.

`one` and `other` are sandboxes whose kernels came from the same zygote.
"""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacking import Fresh, Without, altered, attack, attack_by_shell, by, tell
from msgspec.structs import replace

from sbx import Runtime
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail, ZygoteHandle
from sbx.isolation.launch_plan import ZygotePlan
from sbx.linux import procfs
from sbx.policy import Policy, load
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = [
    pytest.mark.core,
    pytest.mark.parametrize(
        "started_by", rows(["pool", "fork"], ci_tier=["fork"]), indirect=True, scope="module"
    ),
]
DRAWS = ("numpy.random", "ssl", "uuid", "tempfile", "multiprocessing.process")
# Python runs this in every fork. Process 3 is the zygote: what it drew, every jail has a copy of.
DRAW_FIRST = """
import os, random, runpy, sys
def draw():
    if os.getpid() == 3:
        import secrets, ssl, tempfile, uuid
        ssl.RAND_bytes(8), uuid.uuid1(), uuid.uuid4(), secrets.token_hex(), random.random()
        next(tempfile._get_candidate_names())
os.register_at_fork(after_in_child=draw)
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


def policy_of_draws() -> Policy:
    return load("default").model_copy(update={"preload": DRAWS})


@pytest.fixture(scope="module")
def zygotes_draw() -> Iterator[None]:
    """Zygotes that start within have used each source of randomness themselves."""
    real = BrokerClient.start_zygote

    async def start(broker: BrokerClient, plan: ZygotePlan, *words: Any) -> ZygoteHandle:
        python, isolated, script = plan.command
        return await real(
            broker,
            replace(plan, command=(python, isolated, "-c", DRAW_FIRST, script)),
            *words,
        )

    patch = pytest.MonkeyPatch()
    patch.setattr(BrokerClient, "start_zygote", start)
    yield
    patch.undo()


@pytest_asyncio.fixture(scope="module")
async def one(runtime: Runtime, zygotes_draw: None) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(policy_of_draws()) as box:
        await box.start()
        yield box


@pytest_asyncio.fixture(scope="module")
async def other(runtime: Runtime, one: AsyncSandbox) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(policy_of_draws()) as box:
        await box.start()
        assert jail_of(box).zygote is jail_of(one).zygote
        yield box


def jail_of(box: AsyncSandbox) -> Jail:
    kernel = box._default.contexts.default._kernel
    assert kernel is not None
    return kernel._jail


# -- what one makes, the other does not find -------------------------------------------------------

LISTEN = "held = socket.socket({0}); held.bind({1!r}); held.listen()"
CONNECT = "socket.socket({0}).connect({1!r})"


def listener(family: str, address: object) -> tuple[str, str]:
    return LISTEN.format(family, address), CONNECT.format(family, address)


MADE = {
    "file in /tmp": ("open('/tmp/made', 'w').close()", "open('/tmp/made')"),
    "file in /dev/shm": ("open('/dev/shm/made', 'w').close()", "open('/dev/shm/made')"),
    "file": ("open('/workspace/made', 'w').close()", "open('/workspace/made')"),
    "socket": listener("socket.AF_UNIX", "/tmp/made-socket"),
    "abstract socket": listener("socket.AF_UNIX", "\0made"),
    "port": listener("socket.AF_INET", ("127.0.0.1", 47113)),
    "System V memory": ("call('shmget', 0x5b79, 4096, 0o1666)", "call('shmget', 0x5b79, 0, 0)"),
}


@pytest.mark.parametrize("what", MADE)
async def test_what_one_has_made_the_other_does_not_find(
    one: AsyncSandbox, other: AsyncSandbox, what: str
) -> None:
    make, find = MADE[what]
    missing = "ECONNREFUSED" if what in ("abstract socket", "port") else "ENOENT"
    assert await attack(one, make) == "ok"
    assert await attack(one, find) == "ok"
    assert await attack(other, find) == missing
    assert await attack_by_shell(other, find) == missing


@pytest.mark.unprivileged
async def test_no_mount_that_can_be_written_is_the_same_for_two(
    one: AsyncSandbox, other: AsyncSandbox
) -> None:
    """But device nodes of the host, like /dev/null. The walk sees those, so it sees others."""
    walk = """
found, devices = {}, 0
for line in open('/proc/self/mountinfo'):
    where = line.split()[4]
    seen = os.stat(where)
    if os.statvfs(where).f_flag & os.ST_RDONLY:
        continue
    if stat.S_ISCHR(seen.st_mode):
        devices += 1
    else:
        found[where] = seen.st_dev, seen.st_ino
(found, devices)
"""
    (mine, devices), (theirs, _) = await tell(one, walk), await tell(other, walk)
    assert {"/tmp", "/dev/shm", "/workspace", "/dev/pts"} <= mine.keys() == theirs.keys()
    assert not set(mine.values()) & set(theirs.values())
    assert devices >= 5


@pytest.mark.unprivileged
async def test_no_process_of_another_jail_has_a_number_here(
    one: AsyncSandbox, other: AsyncSandbox
) -> None:
    """Nor has the zygote: whoever is process 1 here has no parent to be seen."""
    await tell(one, "subprocess.Popen(['sleep', '60'], start_new_session=True).pid")
    look = """
numbers = {int(pid) for pid in os.listdir('/proc') if pid.isdigit()}
threads = {int(number) for number in os.listdir('/proc/self/task')}
reached = {pid for pid in range(1, 33000) if names_of(os.kill, pid, 0) != 'ESRCH'}
(numbers, reached - threads, [open(f'/proc/{pid}/comm').read() for pid in numbers],
 [line.split()[1] for line in open('/proc/1/status') if line.startswith('PPid')])
"""
    numbers, reached, names, parent = await tell(other, look)
    assert reached <= numbers
    assert "sleep\n" not in names
    assert parent == ["0"]


@pytest.mark.parametrize("kind", ["user", "pid"])
async def test_the_namespace_above_cannot_be_opened(without: Without, kind: str) -> None:
    """NS_GET_USERNS, NS_GET_PARENT: ioctl_ns(2). Linux refuses it, whatever our filter says."""
    bare = await without("seccomp", "landlock")
    for request in (0xB701, 0xB702):
        climb = f"import fcntl; fcntl.ioctl(os.open('/proc/self/ns/{kind}', 0), {request})"
        assert await attack(bare, climb) == "EPERM" or (kind, request) == ("pid", 0xB701)


async def test_a_key_of_one_is_not_found_by_the_other_where_no_filter_forbids_keys(
    fresh: Fresh,
) -> None:
    """KEYCTL_SEARCH of the session keyring, which a fork would share: keyctl(2)."""
    find = "call('keyctl', 10, -3, b'user', b'made', 0)"
    with altered("seccomp"):
        mine, theirs = await fresh(), await fresh()
        assert await attack(mine, "call('add_key', b'user', b'made', b'x', 1, -3)") == "ok"
        assert await attack(mine, find) == "ok"
        assert await attack(theirs, find) == "ENOKEY"


async def test_a_child_of_the_zygotes_own_cannot_signal_it(
    box: AsyncSandbox, without: Without
) -> None:
    """clone(CLONE_PARENT): whoever ends sends a signal to its parent, and the kernel's is outside.
    Linux takes the signal of the caller then, not the one that is asked for."""
    await without("seccomp")
    zygote = jail_of(await without("seccomp")).zygote
    assert zygote is not None
    for sandbox in (box, await without("seccomp")):
        end = "call('clone', 0x8000 | signal.SIGKILL, 0, 0, 0, 0) or os._exit(0)"
        await attack(sandbox, end)
        await sandbox.stop()
    await box.start()
    assert zygote.alive
    assert jail_of(box).zygote is zygote


async def test_nothing_of_proc_can_be_written_where_landlock_forbids_nothing(
    without: Without,
) -> None:
    """Of what is not a process's own. What opens there asks for a capability when it is written."""
    walk = """
found = {}
for top in ('/proc/sys', '/proc'):
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if top != '/proc' or not name[0].isdigit()
                    and name not in ('self', 'thread-self', 'sys', 'pressure')]
        for path in (f'{directory}/{name}' for name in files):
            try:
                file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                if os.path.samefile(path, '/dev/null'):
                    continue  # it covers the file
                found[path] = names_of(os.write, file, b'1')
            except OSError:
                pass
found
"""
    bare = await without("seccomp", "landlock")
    assert set((await tell(bare, walk)).values()) <= {"EPERM"}


@pytest.mark.needs("root")
async def test_no_two_sandboxes_and_no_zygote_are_the_same_user(
    one: AsyncSandbox, other: AsyncSandbox
) -> None:
    uids = [procfs.credentials(jail_of(box).pid or 0).uid for box in (one, other)]
    zygote = procfs.status(jail_of(one).pid or 0)["PPid"]
    assert len({*uids, procfs.credentials(int(zygote)).uid, 0}) == 4


# -- memory ----------------------------------------------------------------------------------------

# Each byte is masked, so that what is looked for is nowhere but where somebody else left it.
SCAN = """
table = bytes(byte ^ 0x5A for byte in range(256))
def scan(masked):
    found = set()
    with open('/proc/self/mem', 'rb', 0) as memory, open('/proc/self/maps') as maps:
        for line in list(maps):
            span, rights = line.split()[:2]
            low, high = (int(word, 16) for word in span.split('-'))
            if 'r' not in rights or line.rstrip().endswith(('[vvar]', '[vsyscall]', '.so')):
                continue
            while low < high:
                try:
                    part = os.pread(memory.fileno(), min(high - low, 1 << 24), low)
                except OSError:
                    break
                if not part:
                    break
                part = part.translate(table)
                found |= {name for name, needle in masked.items() if needle in part}
                low += max(len(part) - 64, 1) if low + len(part) < high else len(part)
    return sorted(found)
"""


def masked(text: str) -> bytes:
    return bytes(byte ^ 0x5A for byte in text.encode())


async def test_memory_holds_nothing_of_another_sandbox_nor_of_the_runtime(
    started_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of none that was before, and of none that lives: no code, variable, name or path."""
    tokens = {name: secrets.token_hex(12) for name in ("program", "code", "variable", "own")}
    monkeypatch.setenv("SBX_TEST_TOKEN", tokens["program"])
    async with Runtime() as runtime:
        assert runtime._data is not None
        looked_for = {"data": str(runtime._data.directory.path), **tokens}
        for number in (1, 2):
            left = await runtime.create(env={"TOKEN": tokens["variable"]})
            assert await attack(left, f"kept = {tokens['code']!r} * 100") == "ok"
            looked_for[f"id {number}"] = left.id
            looked_for[f"jail {number}"] = jail_of(left).name
            looked_for[f"path {number}"] = (await left._default.opened()).files_path.parent.name
            if number == 1:
                await left.close()
        async with await runtime.create() as box:
            needles = {name: masked(text) for name, text in looked_for.items()}
            own = tokens["own"]
            await attack(box, f"kept = {own[:12]!r} + {own[12:]!r}")
            assert await tell(box, f"{SCAN}\nscan({needles!r})") == ["own"]


# -- randomness ------------------------------------------------------------------------------------

DRAWN = {
    "random": "import random; random.random()",
    "numpy": "import numpy; float(numpy.random.random())",
    "numpy's new": "import numpy; float(numpy.random.default_rng().random())",
    "uuid1": "import uuid; str(uuid.uuid1())[-17:]",
    "uuid4": "import uuid; str(uuid.uuid4())",
    "ssl": "import ssl; ssl.RAND_bytes(16)",
    "secrets": "import secrets; secrets.token_hex()",
    "tempfile": "import tempfile; next(tempfile._get_candidate_names())",
    "authkey": "import multiprocessing; bytes(multiprocessing.current_process().authkey)",
}


@pytest.mark.parametrize("source", DRAWN)
async def test_siblings_draw_different_numbers(
    one: AsyncSandbox, other: AsyncSandbox, source: str
) -> None:
    if source.startswith("numpy"):
        pytest.importorskip("numpy")
    assert await tell(one, DRAWN[source]) != await tell(other, DRAWN[source])


@pytest.mark.full_tier
async def test_the_hash_seed_is_its_zygotes(
    one: AsyncSandbox, other: AsyncSandbox, runtime: Runtime, started_by: str
) -> None:
    """Documented: a fork copies it. Another zygote has another one, and so has a cold start."""
    seeds = [await tell(box, "hash('seed')") for box in (one, other)]
    assert seeds[0] == seeds[1]
    for path in ("fork" if started_by == "pool" else "pool", "cold"):
        async with await runtime.create(policy_of_draws()) as box:
            with by(path):
                assert await tell(box, "hash('seed')") not in seeds


# -- idle ------------------------------------------------------------------------------------------


@pytest.mark.needs("root")
async def test_an_idle_jail_holds_nothing_of_anybody(runtime: Runtime, fresh: Fresh) -> None:
    """Seen from the host: no file, descriptor, variable, group or user of a sandbox's."""
    box = await fresh(env={"TOKEN": "of somebody"})
    receipt = await box.start()
    await runtime.warm()
    assert runtime._resources is not None
    assert runtime._data is not None
    assert runtime._broker is not None
    pools = runtime._resources.starter._pools.values()
    idle = [kernel.jail for pool in pools for kernel in pool._idle]
    pid1 = idle[0].pid
    assert pid1 is not None
    broker = runtime._broker._process
    assert broker is not None
    data = str(runtime._data.directory.path)
    for pid in idle[0].processes():
        process = Path(f"/proc/{pid}")
        assert os.listdir(process / "root/workspace") == []
        assert data not in (process / "mountinfo").read_text()
        assert b"TOKEN" not in (process / "environ").read_bytes()
        assert procfs.credentials(pid).uid not in (0, receipt.host_uid)
        assert (process / "cgroup").read_text() == Path(f"/proc/{broker.pid}/cgroup").read_text()
        held = {os.readlink(fd).split(":")[0] for fd in (process / "fd").iterdir()}
        allowed = {"/dev/null", "socket", "anon_inode", "pipe", f"/proc/{pid}/oom_score_adj"}
        assert {name for name in held if not name.endswith("/oom_score_adj")} <= allowed


# -- mounts that come late -------------------------------------------------------------------------

REPLACED = {
    "link": "os.symlink('/tmp', PLACE)",
    "dangling link": "os.symlink('/nowhere/at/all', PLACE)",
    "file": "open(PLACE, 'w').close()",
    "pipe": "os.mkfifo(PLACE)",
    "socket": "socket.socket(socket.AF_UNIX).bind(PLACE)",
    "shut directory": "os.mkdir(PLACE, 0)",
    "many": "os.mkdir(PLACE); [open(f'{PLACE}/{n}', 'w').close() for n in range(3000)]",
    "deep": "for _ in range(300):\n    os.mkdir(PLACE); PLACE += '/d'",
}
PLACES = ("uploads", "uploads/temparea")


@pytest.mark.parametrize(
    ("how", "place"),
    rows(
        product(REPLACED, PLACES),
        ci_tier=[*product({*REPLACED} - {"many"}, PLACES), ("many", "uploads")],
    ),
)
async def test_what_lies_where_uploads_belong_does_not_redirect_them(
    fresh: Fresh, how: str, place: str
) -> None:
    """Left there by a kernel that was, for once, not kept from it."""
    box = await fresh()
    await box.uploads.put_bytes("data", b"theirs")
    with altered("pins"):
        await box.start()
    replace_it = f"PLACE = '/workspace/{place}'; os.rename(PLACE, '/workspace/old')\n"
    assert await attack(box, replace_it + REPLACED[how]) == "ok"
    await box.stop()
    assert await tell(box, "open('/workspace/uploads/temparea/data').read()") == "theirs"
    flags = "os.statvfs('/workspace/uploads/temparea').f_flag & os.ST_RDONLY"
    assert await tell(box, flags) == os.ST_RDONLY
    assert await attack(box, "os.rename('/workspace/uploads', '/workspace/x')") == "EBUSY"
    assert await tell(box, "os.path.exists('/tmp/data'), os.path.exists('/tmp/temparea')") == (
        False,
        False,
    )


@pytest.mark.unprivileged
async def test_landlock_covers_a_mount_that_came_late(
    fresh: Fresh, own_temporary_directory: Path
) -> None:
    """The uploads of a host directory, by mistake mounted writable, still cannot be written."""
    project = own_temporary_directory / secrets.token_hex(4)
    project.mkdir()
    if os.geteuid() == 0:
        os.chown(project, 1000, 1000)
    box = await fresh(workspace=project)
    await box.uploads.put_bytes("data", b"x")
    (await box._default.opened()).uploads_path.chmod(0o777)
    outcomes = []
    writable = lambda plan: replace(  # noqa: E731
        plan, own_mounts=tuple(replace(bind, writable=True) for bind in plan.own_mounts)
    )
    for walls, change in (((), None), ((), writable), (("landlock",), writable)):
        with altered(*walls, change=change):
            outcomes.append(await attack(box, "open('/uploads/new', 'w').close()"))
        await box.stop()
    assert outcomes == ["EROFS", "EACCES", "ok"]
