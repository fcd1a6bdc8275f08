"""However a workspace is made to grow, it is seen, and its kernel ended within a second.

By looking, which is what a host without quotas has; see integration/test_disk_quota.py for one that
has them. The controls are the same attacks under a wider limit.
"""

from typing import Any

import pytest
from attacking import Fresh, attack, one_path, tell

from sbx import Runtime
from sbx.policy import load
from sbx.runtime.files import disk_limit
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = [
    pytest.mark.core,
    one_path(),  # the disk is measured on the host
]
MIB = 1 << 20

# Each takes a MiB, or a name, with each call, in a way of its own.
WAYS = {
    "named": """
def more(n):
    open(f'f{n}', 'wb').write(bytes(1 << 20))
""",
    "one file": """
file = open('f', 'ab', 0)
def more(n):
    file.write(bytes(1 << 20))
""",
    "reserved": """
def more(n):
    with open(f'f{n}', 'wb') as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
""",
    "no name": """
held = []
def more(n):
    held.append(open('f', 'wb', 0))
    os.unlink('f')
    held[-1].write(bytes(1 << 20))
""",
    "mapped, without a name": """
_libc.mmap.restype = ctypes.c_void_p
def more(n):
    with open('f', 'w+b', 0) as file:
        os.unlink('f')
        file.write(bytes(1 << 20))
        assert _libc.mmap(None, 4096, 1, 1, file.fileno(), 0) not in (None, (1 << 64) - 1)
""",
    "no name, held by a child": """
if (child := os.fork()) == 0:
    file = open('f', 'ab', 0)
    os.unlink('f')
    def more(n):
        file.write(bytes(1 << 20))
else:
    def more(n):
        n or os.waitpid(child, 0)
""",
    "unreadable": """
os.mkdir('d')
at = os.open('d', os.O_RDONLY)
os.chmod('d', 0)
def more(n):
    os.chmod('d', 0o300)
    os.close(os.open(f'f{n}', os.O_WRONLY | os.O_CREAT, dir_fd=at))
    file = os.open(f'f{n}', os.O_WRONLY, dir_fd=at)
    os.chmod('d', 0)
    os.write(file, bytes(1 << 20))
    os.close(file)
""",
    "not to be passed": """
os.mkdir('d', 0o700)
at = os.open('d', os.O_RDONLY)
def more(n):
    os.chmod('d', 0o700)
    file = os.open(f'f{n}', os.O_WRONLY | os.O_CREAT, dir_fd=at)
    os.chmod('d', 0o600)
    os.write(file, bytes(1 << 20))
    os.close(file)
""",
    "moved about": """
for name in ('a', 'b', 'a/d', 'a/d/e'):
    os.mkdir(name)
at = os.open('a/d/e', os.O_RDONLY)
def storm():
    while True:
        os.rename('a/d', 'b/d')
        os.rename('b/d', 'a/d')
threading.Thread(target=storm, daemon=True).start()
def more(n):
    file = os.open(f'f{n}', os.O_WRONLY | os.O_CREAT, dir_fd=at)
    os.write(file, bytes(1 << 20))
    os.close(file)
""",
    "deep": """
at = os.open('.', os.O_RDONLY)
for _ in range(300):
    os.mkdir('d', dir_fd=at)
    at, above = os.open('d', os.O_RDONLY, dir_fd=at), at
    os.close(above)
def more(n):
    file = os.open(f'f{n}', os.O_WRONLY | os.O_CREAT, dir_fd=at)
    os.write(file, bytes(1 << 20))
    os.close(file)
""",
}
GROW = """
for n in range({count}):
    more(n)
    time.sleep(0.002)
"""


async def with_limits(fresh: Fresh, on: Runtime | None = None, **limits: Any) -> AsyncSandbox:
    policy = load("default")
    wider = policy.limits.model_validate({**policy.limits.model_dump(mode="json"), **limits})
    return await fresh(policy.model_copy(update={"limits": wider}), on=on)


async def ended(fresh: Fresh, code: str, **limits: Any) -> AsyncSandbox:
    """A sandbox whose run was ended for its disk."""
    full = await with_limits(fresh, **limits)
    assert await attack(full, code) == "killed:disk"
    return full


@pytest.mark.parametrize("way", WAYS)
async def test_whatever_grows_is_ended(fresh: Fresh, way: str) -> None:
    grow = WAYS[way] + GROW.format(count=100_000)
    full = await ended(fresh, grow, workspace_max="32MiB")
    assert await tell(full, "6 * 7") == 42


@pytest.mark.full_tier
@pytest.mark.parametrize("way", WAYS)
async def test_the_same_goes_on_where_there_is_room(fresh: Fresh, way: str) -> None:
    """The control of the test before."""
    roomy = await with_limits(fresh, workspace_max="200MiB")
    grow = WAYS[way] + GROW.format(count=50)
    if "child" in way:
        grow += "\nif child == 0:\n    os._exit(0)"
    assert await attack(roomy, grow + "\ntime.sleep(0.7)", timeout=60) == "ok"


@pytest.mark.parametrize(
    "make",
    rows(
        ["os.mkdir(f'd{n}')", "os.symlink('nowhere', f'l{n}')", "os.mkfifo(f'p{n}')"],
        ci_tier=["os.mkdir(f'd{n}')"],
    ),
)
async def test_whatever_has_a_name_counts(fresh: Fresh, make: str) -> None:
    grow = f"def more(n):\n    {make}\n" + GROW.format(count=100_000)
    await ended(fresh, grow, workspace_files=500)
    roomy = await with_limits(fresh, workspace_files=5000)
    few = f"def more(n):\n    {make}\n" + GROW.format(count=600)
    assert await attack(roomy, few + "\ntime.sleep(0.7)", timeout=60) == "ok"


async def test_what_conversations_share_is_not_a_way_around(fresh: Fresh) -> None:
    policy = load("default")
    limits = policy.limits.model_copy(update={"workspace_max": 16 * MIB})
    full = await fresh(policy.model_copy(update={"limits": limits, "shared": True}))
    fill = "open('/workspace/shared/f', 'wb').write(bytes({} << 20))\ntime.sleep({})"
    assert await attack(full, fill.format(40, 50), timeout=60) == "killed:disk"
    assert await attack(full, "os.unlink('/workspace/shared/f')") == "ok"
    assert await attack(full, fill.format(8, 1), timeout=60) == "ok"


async def test_a_burst_is_found_by_what_the_disk_lost_and_not_only_by_the_clock(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_limit, "_PERIOD_S", 600.0)
    grow = WAYS["one file"] + GROW.format(count=100_000)
    await ended(fresh, grow, workspace_max="32MiB")


async def test_the_receipt_says_that_it_is_watched_and_how_far_that_goes(box: AsyncSandbox) -> None:
    await box.start()
    assert box.receipt is not None
    means = next(str(one["means"]) for one in box.receipt.walls if one["name"] == "disk")
    assert means.startswith("watched: looked at every 0.5 s")


RESERVE = """
file = os.open('reserved', os.O_RDWR | os.O_CREAT)
number = 285 if os.uname().machine == 'x86_64' else 47
answers = [names_of(call, number, file, mode, 0, 1 << 30) for mode in (0, 1, 0x10)]
answers.append(os.fstat(file).st_blocks)
os.posix_fallocate(file, 0, 1 << 20)
answers.append(os.fstat(file).st_size == 1 << 20)
answers.append(names_of(call, number, file, 3, 0, 1 << 19))  # frees a half
answers
"""


@pytest.mark.unprivileged
async def test_no_block_is_reserved_without_being_written(fresh: Fresh) -> None:
    """One cell reserved 49.5 GB before the watcher looked. libc writes instead."""
    box = await fresh()
    answers = ["ENOTSUP", "ENOTSUP", "ENOTSUP", 0, True, "ok"]
    assert await tell(box, RESERVE) == answers
