"""Kernel, PID 1 and commands are out of each other's reach; nothing outside is in anybody's."""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import asyncio
import os

import pytest
from attacking import Fresh, Without, attack, attack_by_shell, one_path, tell

from sbx import Runtime
from sbx.protocol.runs import Cause, Status
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
FIND_KERNEL = "kernel = 2\n"
SLEEPER = "sleep 30 & echo $!; wait"


async def live_command(box: AsyncSandbox) -> "tuple[int, asyncio.Task[object]]":
    """A command that sleeps, and its pid as the inside numbers it."""
    events = box.stream_shell("echo $$; exec sleep 30")
    async for event in events:
        if event.type == "stdout":
            break

    async def drain() -> None:
        async for _ in events:
            pass

    return int(event.text), asyncio.create_task(drain())  # type: ignore[union-attr]


TRACE = "call('ptrace', 16, {pid}, 0, 0)"  # PTRACE_ATTACH
READ = """
buffer = ctypes.create_string_buffer(8)
address = int(open('/proc/{pid}/stat').read().rpartition(')')[2].split()[25])  # start of its stack
here = struct.pack('QQ', ctypes.addressof(buffer), 8)
there = struct.pack('QQ', address or 1, 8)
call('process_vm_readv', {pid}, here, 1, there, 1, 0)
"""


@pytest.mark.parametrize("how", [TRACE, READ], ids=["ptrace", "process_vm_readv"])
@pytest.mark.unprivileged
async def test_pid_1_cannot_be_traced(box: AsyncSandbox, without: Without, how: str) -> None:
    """By the filter, and behind it by Landlock; ptrace would stop PID 1, so the control reads."""
    assert await attack(box, how.format(pid=1)) == "EPERM"
    assert await attack_by_shell(box, how.format(pid=1)) == "EPERM"
    assert await attack(await without("seccomp"), how.format(pid=1)) == "EPERM"
    bare = await without("seccomp", "landlock")
    assert await attack(bare, READ.format(pid=1)) in ("ok", "EFAULT", "EIO")


async def test_the_kernel_is_the_second_process_of_its_jail(box: AsyncSandbox) -> None:
    """What follows looks for it there; and whoever tells forks apart by their numbers, as OpenSSL's
    random generator does, must not meet the zygote's (3) again."""
    assert await tell(box, "os.getpid()") == 2


@pytest.mark.unprivileged
async def test_a_command_cannot_trace_the_kernel(box: AsyncSandbox, without: Without) -> None:
    look = FIND_KERNEL + "open(f'/proc/{kernel}/mem', 'r+b', 0).close()"
    trace = FIND_KERNEL + "call('ptrace', 16, kernel, 0, 0)"
    await box.start()
    assert await attack_by_shell(box, look) == "EACCES"
    assert await attack_by_shell(box, trace) == "EPERM"
    assert await attack_by_shell(await without("seccomp"), trace) == "EPERM"
    bare = await without("seccomp", "landlock")
    assert await attack_by_shell(bare, look) == "ok"


async def test_the_kernel_cannot_trace_a_command(box: AsyncSandbox, without: Without) -> None:
    for sandbox, expected in ((box, "EACCES"), (await without("landlock"), "ok")):
        pid, command = await live_command(sandbox)
        assert await attack(sandbox, f"open('/proc/{pid}/mem', 'r+b', 0).close()") == expected
        await sandbox.stop()
        await command


@pytest.mark.parametrize("name", ["environ", "fd/0", "root", "maps"])
async def test_a_command_cannot_look_into_the_kernel(
    box: AsyncSandbox, without: Without, name: str
) -> None:
    await box.start()
    look = FIND_KERNEL + f"os.open(f'/proc/{{kernel}}/{name}', os.O_RDONLY)"
    assert await attack_by_shell(box, look) == "EACCES"
    bare = await without("landlock")
    await bare.start()
    assert await attack_by_shell(bare, look) == "ok"


@pytest.mark.unprivileged
async def test_no_descriptor_of_pid_1_can_be_taken(box: AsyncSandbox, without: Without) -> None:
    take = "call('pidfd_getfd', os.pidfd_open(1), 3, 0)"
    assert await attack(box, take) == "EPERM"
    assert await attack(await without("seccomp"), take) == "EPERM"
    assert await attack(await without("seccomp", "landlock"), take) == "ok"


@pytest.mark.needs("landlock-scopes")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGSTOP", "SIGKILL", "SIGCHLD"])
async def test_pid_1_cannot_be_signalled(box: AsyncSandbox, number: str) -> None:
    """Without Landlock linux drops what PID 1 has no handler for; see the control below."""
    kill = f"os.kill(1, signal.{number})"
    assert await attack(box, kill) == "EPERM"
    assert await attack_by_shell(box, kill) == "EPERM"


@pytest.mark.unprivileged
async def test_signals_to_pid_1_end_nothing_where_landlock_cannot_stop_them(
    without: Without,
) -> None:
    """A linux before 6.12 has no Landlock scopes: there PID 1 must survive on its own."""
    bare = await without("landlock")
    await attack(bare, "x = 41")
    for number in ("SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP", "SIGKILL", "SIGCHLD", "SIGUSR1"):
        assert await attack(bare, f"for _ in range(50): os.kill(1, signal.{number})") == "ok"
    assert await tell(bare, "x + 1") == 42
    assert (await bare.shell("echo here")).stdout == "here\n"


async def test_killing_everything_in_sight_kills_the_own_children_only(fresh: Fresh) -> None:
    """kill(-1): a kernel is a bystander for a command, and a command for a kernel."""
    box = await fresh()
    await attack(box, "x = 41")
    await box.shell("kill -9 -1")
    assert await tell(box, "x + 1") == 42
    _, command = await live_command(box)
    await attack(box, "names_of(os.kill, -1, signal.SIGKILL)")
    assert not command.done()
    await box.stop()
    await command


@pytest.mark.needs("landlock-scopes")
async def test_kernel_and_commands_cannot_signal_each_other(
    box: AsyncSandbox, without: Without
) -> None:
    for sandbox, expected in ((box, "EPERM"), (await without("landlock"), "ok")):
        await sandbox.start()
        assert await attack_by_shell(sandbox, FIND_KERNEL + "os.kill(kernel, 0)") == expected
        pid, command = await live_command(sandbox)
        assert await attack(sandbox, f"os.kill({pid}, 0)") == expected
        await sandbox.stop()
        await command


async def test_commands_of_one_conversation_cannot_trace_each_other(
    box: AsyncSandbox, without: Without
) -> None:
    for sandbox, expected in ((box, "EACCES"), (await without("landlock"), "ok")):
        pid, command = await live_command(sandbox)
        look = f"open('/proc/{pid}/mem', 'r+b', 0).close()"
        assert await attack_by_shell(sandbox, look) == expected
        await sandbox.stop()
        await command


async def test_the_pid_of_a_process_outside_means_nothing_inside(box: AsyncSandbox) -> None:
    """Without a PID namespace bwrap starts nothing with --as-pid-1: no control."""
    outside = os.getpid()
    answer = await tell(box, f"names_of(os.kill, {outside}, 0)")
    assert answer == "ESRCH" or outside < 200


@one_path()  # the same loop in PID 1
async def test_a_storm_of_dying_orphans_leaves_pid_1_able_to_work(fresh: Fresh) -> None:
    """Each becomes PID 1's to bury: it reaps, and still starts commands and passes interrupts."""
    box = await fresh()
    storm = """
def breed():
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
for _ in range(4):
    if os.fork() == 0:
        breed()
        os._exit(0)
"""
    assert await attack(box, storm) == "ok"
    done = await box.shell("echo here")
    assert done.stdout == "here\n"
    assert await attack(box, "time.sleep(30)", timeout=1) == "timeout"


@one_path()  # the same loop in PID 1
async def test_a_command_that_cannot_be_started_leaves_pid_1_alive(fresh: Fresh) -> None:
    """Out of descriptors it must say so: an error in PID 1 would end the kernel and its state."""
    box = await fresh(narrower={"limits": {"open_files": 64}})
    await attack(box, "x = 41")
    for _ in range(40):
        last = await box.shell("sleep 60 &")
    assert last.status is Status.KILLED or last.status is Status.OK
    assert await tell(box, "x + 1") == 42


async def test_a_kernel_that_kills_itself_is_told_as_crashed(fresh: Fresh) -> None:
    box = await fresh()
    done = await box.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (done.status, done.cause, done.state_lost) == (Status.KILLED, Cause.CRASHED, True)
    assert await tell(box, "6 * 7") == 42


@pytest.mark.unprivileged
async def test_nothing_lives_on_after_its_kernel(fresh: Fresh, runtime: Runtime) -> None:
    """Daemons in sessions of their own, with every signal ignored, end with the PID namespace."""
    box = await fresh()
    daemon = """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
"""
    await attack(box, daemon)
    pid1 = box._default.contexts.default._kernel.jail.pid  # type: ignore[union-attr]
    assert pid1 is not None
    watched = os.pidfd_open(pid1)
    await box.stop()
    os.close(watched)
    assert not os.path.exists(f"/proc/{pid1}")
