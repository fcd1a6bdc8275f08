"""Whatever is used up is used up inside: the neighbour and the runtime do not notice.

The controls are limits themselves: the same code under a wider one goes on.
"""

import asyncio
import os
from typing import Any

import psutil
import pytest
from attacking import Fresh, attack, attack_by_shell, one_path, outcome, run, tell
from chain import until_stopped

from sbx import Runtime
from sbx.policy import load
from sbx.protocol.runs import Cause, Status
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
MIB = 1 << 20

HOARDS = {
    "anonymous": "hoard = bytearray(400 << 20)",
    "children": """
for _ in range(4):
    if os.fork() == 0:
        hoard = bytearray(100 << 20)
        time.sleep(600)
        os._exit(0)
os.wait()
raise ChildProcessError('a child was killed')
""",
    "tmpfs": """
for number in range(50):
    with open(f'/tmp/{number}', 'wb') as file:
        file.write(bytes(8 << 20))
""",
    "shm": """
with open('/dev/shm/hoard', 'wb') as file:
    for _ in range(50):
        file.write(bytes(8 << 20))
""",
    "memfd": """
held = os.memfd_create('hoard')
for _ in range(50):
    os.write(held, bytes(8 << 20))
""",
    "System V": """
for number in range(50):
    segment = call('shmget', 0, 8 << 20, 0o1600)
    where = call('shmat', segment, 0, 0)
    ctypes.memset(where, 1, 8 << 20)
    call('shmdt', where)
""",
}
ROOMY: dict[str, Any] = {"tmp_size": "1GiB", "shm_size": "1GiB"}


async def with_limits(fresh: Fresh, on: Runtime | None = None, **limits: Any) -> AsyncSandbox:
    policy = load("default")
    wider = policy.limits.model_validate({**policy.limits.model_dump(mode="json"), **limits})
    return await fresh(policy.model_copy(update={"limits": wider}), on=on)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.needs("memory")
@pytest.mark.parametrize("how", HOARDS)
async def test_memory_in_any_form_counts_and_ends_its_own_sandbox_only(
    fresh: Fresh, box: AsyncSandbox, how: str
) -> None:
    await attack(box, "x = 41")
    hungry = await with_limits(fresh, memory_max="160MiB", **ROOMY)
    done = await run(hungry, HOARDS[how])
    assert (outcome(done), done.state_lost) == ("killed:memory", True)
    assert await tell(box, "x + 1") == 42
    assert await tell(hungry, "6 * 7") == 42


@one_path()  # a control
@pytest.mark.needs("memory")
async def test_the_same_memory_under_a_wider_limit_kills_nobody(fresh: Fresh) -> None:
    """The control of the test before."""
    content = await with_limits(fresh, memory_max="900MiB", **ROOMY)
    for how in ("anonymous", "tmpfs"):
        assert await attack(content, HOARDS[how]) == "ok"
        await content.stop()


@pytest.mark.needs("memory")
async def test_a_command_that_takes_too_much_takes_its_whole_jail_along(fresh: Fresh) -> None:
    """What is left when linux has chosen one process is not what the code would expect: a pool of
    workers hangs, a pipe ends early. By oom.group on v2, and on v1 by its notice."""
    hungry = await with_limits(fresh, memory_max="160MiB")
    await attack(hungry, "x = 41")
    kernel = await tell(hungry, "os.readlink('/proc/self/ns/pid')")
    assert await attack_by_shell(hungry, HOARDS["anonymous"]) == "killed:memory"
    await gone(hungry)
    assert await tell(hungry, "os.readlink('/proc/self/ns/pid')") != kernel


@pytest.mark.needs("memory")
async def test_a_death_for_memory_is_told_from_one_by_its_own_hand(fresh: Fresh) -> None:
    """Under the same limit, after a jail of the same sandbox died of it."""
    hungry = await with_limits(fresh, memory_max="160MiB")
    assert await attack(hungry, HOARDS["anonymous"]) == "killed:memory"
    assert await attack(hungry, "os.kill(os.getpid(), signal.SIGKILL)") == "killed:crashed"
    own = "if not os.fork():\n    os.kill(os.getpid(), signal.SIGKILL)\nos.wait()[1]"
    assert await tell(hungry, own) == 9


@pytest.mark.needs("memory")
async def test_a_child_that_hoards_does_not_leave_its_parent_waiting(fresh: Fresh) -> None:
    hungry = await with_limits(fresh, memory_max="160MiB")
    hoard = """
if not os.fork():
    hoard = bytearray(400 << 20)
    os._exit(0)
time.sleep(600)
"""
    assert await attack(hungry, hoard) == "killed:memory"  # and not: timeout


@pytest.mark.needs("memory")
async def test_page_cache_counts_and_is_given_back_before_anybody_is_killed(fresh: Fresh) -> None:
    """The control is the memory of the others above: as many bytes, which cannot be given back."""
    content = await with_limits(fresh, memory_max="160MiB")
    write = """
with open('/workspace/large', 'w+b', 0) as file:
    for _ in range(400):
        file.write(bytes(1 << 20))
    file.seek(0)
    total = 0
    while chunk := file.read(1 << 20):
        total += len(chunk)
os.unlink('/workspace/large')
total >> 20
"""
    assert await tell(content, write) == 400
    used = await content.usage()
    assert used.memory_peak is not None
    assert used.memory_peak <= 161 * MIB


@one_path()  # the watcher asks for the processes of a jail, whoever forked them
@pytest.mark.parametrize("how", ["anonymous", "children", "tmpfs", "shm", "memfd"])
@pytest.mark.unprivileged
async def test_without_cgroups_a_watcher_ends_who_takes_too_much(
    fresh: Fresh, bare_runtime: Runtime, how: str
) -> None:
    hungry = await with_limits(fresh, bare_runtime, memory_max="160MiB", **ROOMY)
    found = await attack(hungry, HOARDS[how] + "\ntime.sleep(600)")
    assert found == "killed:memory" or (how == "anonymous" and found == "MemoryError")
    assert await tell(hungry, "6 * 7") == 42


@pytest.mark.parametrize(("where", "limit"), [("/tmp", "tmp_size"), ("/dev/shm", "shm_size")])
async def test_what_lies_in_memory_has_a_size_of_its_own(
    fresh: Fresh, where: str, limit: str
) -> None:
    fill = f"open('{where}/f', 'wb').write(bytes(20 << 20))"
    assert await attack(await with_limits(fresh, None, **{limit: "8MiB"}), fill) == "ENOSPC"
    assert await attack(await with_limits(fresh, None, **{limit: "40MiB"}), fill) == "ok"


# -- tasks -----------------------------------------------------------------------------------------

BREED = """
children = []
try:
    while len(children) < 300:
        pid = os.fork()
        if not pid:
            time.sleep(600)
            os._exit(0)
        children.append(pid)
    met = 'nothing'
except OSError as error:
    met = errno.errorcode[error.errno]
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
(met, len(children))
"""
BOMB = "bomb() { bomb | bomb & }; bomb; sleep 2; echo over"
FORKS = "pid = os.fork()\nif not pid:\n    os._exit(0)\nos.waitpid(pid, 0)[1]"


@pytest.mark.parametrize("cgroups", [True, False], ids=["cgroups", "rlimits"])
@pytest.mark.unprivileged
async def test_forks_end_at_tasks_max(
    fresh: Fresh, runtime: Runtime, bare_runtime: Runtime, cgroups: bool
) -> None:
    on = runtime if cgroups else bare_runtime
    for limit in (40, 120):
        met, count = await tell(await with_limits(fresh, on, tasks_max=limit), BREED)
        assert met == "EAGAIN"
        assert limit - 12 < count < limit


@one_path()  # the limit is the one that forks met above
@pytest.mark.parametrize("cgroups", [True, False], ids=["cgroups", "rlimits"])
async def test_a_fork_bomb_leaves_another_sandbox_able_to_fork(
    fresh: Fresh, runtime: Runtime, bare_runtime: Runtime, cgroups: bool
) -> None:
    on = runtime if cgroups else bare_runtime
    bomber = await with_limits(fresh, on, tasks_max=60)
    neighbour = await fresh(on=on)
    await neighbour.start()
    bombing = bomber.stream_shell(BOMB, timeout=10)
    assert (await anext(bombing)).type == "run_start"
    assert await tell(neighbour, FORKS) == 0
    assert (await neighbour.shell("ls / | wc -l")).exit_code == 0
    async for event in bombing:
        last = event
    assert last.type == "run_end"
    assert await tell(neighbour, FORKS) == 0
    await bomber.stop()
    assert await tell(bomber, FORKS) == 0


@one_path()  # the limit is the one that forks met above
async def test_threads_count_as_tasks(fresh: Fresh) -> None:
    start = """
def wait():
    time.sleep(600)
count = 0
try:
    for count in range(150):
        threading.Thread(target=wait, daemon=True).start()
except RuntimeError:
    pass
count
"""
    assert 20 < await tell(await with_limits(fresh, tasks_max=40), start) < 40
    assert await tell(await with_limits(fresh, tasks_max=400), start) == 149


@one_path()  # the limit is the one that forks met above
async def test_zombies_count_as_tasks_and_end_with_the_kernel(fresh: Fresh) -> None:
    leave = """
count = 0
try:
    for count in range(300):
        if not os.fork():
            os._exit(0)
except OSError as error:
    assert error.errno == errno.EAGAIN
count
"""
    box = await with_limits(fresh, tasks_max=60)
    assert 40 < await tell(box, leave) < 60
    await box.stop()
    assert await tell(box, FORKS) == 0


# -- time ------------------------------------------------------------------------------------------

DEAF = "for number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)\n"


@one_path()  # the runtime kills any jail by its PID 1
@pytest.mark.parametrize(
    "code",
    [
        DEAF + "while True: pass",
        "sum(range(1 << 60))",
        DEAF + "while True:\n    ctypes.PyDLL(None).sleep(600)",
        DEAF + "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(600)",
        "while True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["deaf loop", "GIL held in C", "asleep in C", "blocked signals", "swallows", "stopped"],
)
async def test_code_that_ignores_the_interrupt_is_killed(fresh: Fresh, code: str) -> None:
    box = await fresh()
    await box.start()
    async with asyncio.timeout(60):  # all of them would take ten minutes, or never end
        done = await run(box, code, timeout=0.5)
    assert (done.status, done.state_lost) == (Status.TIMEOUT, True)
    assert await tell(box, "6 * 7") == 42


async def test_code_that_hears_the_interrupt_keeps_its_state(fresh: Fresh) -> None:
    """The other end of the ladder: one rung is enough. The next rung comes when this test hangs."""
    box = await fresh()
    box.conversation("default").contexts.default.grace_s = 60.0
    await attack(box, "x = 41")
    done = await run(box, "while True: pass", timeout=0.5)
    assert (done.status, done.state_lost) == (Status.TIMEOUT, False)
    assert await tell(box, "x + 1") == 42


@one_path()  # the runtime kills any jail by its PID 1
async def test_a_command_that_ignores_everything_is_killed(fresh: Fresh) -> None:
    box = await fresh()
    await attack(box, "x = 41")
    done = await box.shell("trap '' INT TERM HUP QUIT; while :; do :; done", timeout=0.5)
    assert done.status is Status.TIMEOUT
    assert await tell(box, "x + 1") == 42


@one_path()  # the runtime kills any jail by its PID 1
async def test_a_kernel_that_reads_nothing_any_more_ends_with_the_deadline(fresh: Fresh) -> None:
    """It replies to its cell by itself and then stops: the next cell, too long for what the socket
    holds, must meet its time-out and not wait for somebody to read it."""
    box = await fresh()
    await attack(box, "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()")
    await until_stopped(box)
    done = await box.run("#" * (4 * MIB), timeout=1)
    assert done.status is Status.TIMEOUT
    assert await tell(box, "6 * 7") == 42


@pytest.mark.needs("cpu")
async def test_a_sandbox_that_burns_gets_its_share_only(fresh: Fresh) -> None:
    burn = """
def burned():
    end, start = time.monotonic() + 1, time.process_time()
    while time.monotonic() < end:
        pass
    return time.process_time() - start
burned()
"""
    bounded = await with_limits(fresh, cpu_quota="5%")
    assert await tell(bounded, burn) < 0.12
    # The control. Other programs of a busy machine take their share of the second.
    free = await with_limits(fresh, cpu_quota="200%")
    shares = [await tell(free, burn)]
    while max(shares) < 0.15 and len(shares) < 90:
        shares.append(await tell(free, burn))
    assert max(shares) >= 0.15


# -- output, disk, descriptors ---------------------------------------------------------------------


@one_path()  # what is sent meets the runtime's bounds
@pytest.mark.parametrize(
    "flood",
    [
        "while True: print('x' * 1000)",
        "while True: os.write(1, bytes(65536))",
        "from IPython.display import display, HTML\nwhile True: display(HTML('x' * 10000))",
        "while True: print()",
        "subprocess.run(['yes'])",
    ],
    ids=["print", "descriptor", "display", "newlines", "child"],
)
async def test_a_flood_of_output_ends_its_run_and_takes_bounded_memory(
    fresh: Fresh, flood: str
) -> None:
    box = await with_limits(fresh, output_max="1MiB")
    done = await run(box, flood)
    assert (done.status, done.cause, done.truncated) == (Status.KILLED, Cause.OUTPUT, True)
    assert len(done.stdout) <= MIB
    assert sum(len(str(part)) for part in done.outputs) <= 2 * MIB
    assert await tell(box, "6 * 7") == 42


@one_path()  # what is sent meets the runtime's bounds
async def test_a_command_that_floods_is_stopped(fresh: Fresh) -> None:
    box = await with_limits(fresh, output_max="1MiB")
    done = await box.shell("yes")
    assert (done.status, done.cause) == (Status.KILLED, Cause.OUTPUT)
    assert len(done.stdout) <= MIB


@pytest.mark.unprivileged
async def test_a_file_ends_at_its_largest_size(fresh: Fresh) -> None:
    write = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open('/workspace/large', 'wb') as file:
    for _ in range(20):
        file.write(bytes(1 << 20))
"""
    sparse = "open('/workspace/sparse', 'wb').truncate(1 << 50)"
    small = await with_limits(fresh, file_size_max="8MiB")
    assert await attack(small, write) == "EFBIG"
    assert await attack(small, sparse) == "EFBIG"
    assert await attack(await with_limits(fresh, file_size_max="40MiB"), write) == "ok"


@one_path()  # the disk is measured on the host
@pytest.mark.parametrize(
    ("code", "limits"),
    [
        (
            "for n in range(30):\n    open(f'f{n}', 'wb').write(bytes(4 << 20))\ntime.sleep(600)",
            {"workspace_max": "16MiB"},
        ),
        (
            "for n in range(2000):\n    open(f'f{n}', 'wb').close()\ntime.sleep(600)",
            {"workspace_files": 500},
        ),
    ],
    ids=["bytes", "names"],
)
async def test_a_workspace_that_grows_too_large_ends_its_kernel(
    fresh: Fresh, code: str, limits: dict[str, Any]
) -> None:
    full = await with_limits(fresh, **limits)
    done = await run(full, code)
    assert (done.status, done.cause) == (Status.KILLED, Cause.DISK)
    assert await tell(full, "6 * 7") == 42


@one_path()  # the disk is measured on the host
async def test_what_goes_on_after_a_run_cannot_fill_the_disk_either(fresh: Fresh) -> None:
    """A thread that is left behind writes while no run goes on and nobody waits."""
    full = await with_limits(fresh, workspace_max="16MiB")
    behind = """
def fill():
    while not os.path.exists('now'):
        time.sleep(0.01)
    for n in range(1000):
        open(f'f{n}', 'wb').write(bytes(1 << 20))
        time.sleep(0.05)
threading.Thread(target=fill).start()
"""
    assert await attack(full, behind) == "ok"
    await full.files.write("now", "")
    await gone(full)


async def gone(box: AsyncSandbox) -> None:
    """Wait until the kernel ends by itself, with no call of ours."""
    async with asyncio.timeout(60):
        while box.receipt is not None:  # noqa: ASYNC110  # the broker's news, which come by a socket
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "limits", "expected"),
    [
        ("CORE", {}, 1),
        ("NOFILE", {"open_files": 200}, 200),
        ("FSIZE", {"file_size_max": "8MiB"}, 8 * MIB),
        ("MEMLOCK", {}, 8 * MIB),
        ("SIGPENDING", {}, 1024),
        ("MSGQUEUE", {}, 800 << 10),
    ],
)
@pytest.mark.unprivileged
async def test_resource_limits_are_set_and_cannot_be_raised(
    fresh: Fresh, name: str, limits: dict[str, Any], expected: int
) -> None:
    box = await with_limits(fresh, **limits)
    look = f"import resource; resource.getrlimit(resource.RLIMIT_{name})"
    soft, hard = await tell(box, look)
    assert soft == hard <= expected
    up = f"import resource; resource.setrlimit(resource.RLIMIT_{name}, ({hard + 1}, {hard + 1}))"
    assert await attack(box, up) in ("ValueError", "EPERM")
    assert await attack_by_shell(box, up) in ("ValueError", "EPERM")


async def test_descriptors_end_at_open_files(fresh: Fresh) -> None:
    take = "held = [os.open('/', os.O_PATH) for _ in range(300)]"
    assert await attack(await with_limits(fresh, open_files=200), take) == "EMFILE"
    assert await attack(await with_limits(fresh, open_files=400), take) == "ok"


@one_path()  # what is sent meets the runtime's bounds
async def test_the_runtime_itself_stays_small_whatever_is_sent_to_it(fresh: Fresh) -> None:
    before = psutil.Process(os.getpid()).memory_info().rss
    box = await with_limits(fresh, output_max="4MiB")
    for _ in range(3):
        found = await run(box, "while True: print('é' * 50000)")
        assert outcome(found) == "killed:output"
    del found
    assert psutil.Process(os.getpid()).memory_info().rss - before < 64 * MIB
