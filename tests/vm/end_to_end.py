"""Proves sbx end to end on a host with cgroup v2 and systemd: limits, kills, and what is left.

    python tests/vm/end_to_end.py [NAME ...]        only the checks with one of these in their name

To be run from the project's root, by a Python that has the project's dependencies and no more, in
a guest that has bubblewrap, systemd and cgroup v2, in each of the three places where a program that
embeds sbx may stand:

    a user in a login session               nothing is delegated: the broker gets a scope of systemd
    a user in a delegated scope of its own  systemd-run --user --scope -p Delegate=yes python …
    root                                    the same, and a uid of its own for each sandbox

A machine without Landlock will do, and is told so; one with an old ABI shows what it lacks.
`SBX_START_TIMEOUT` (seconds) is for slow machines: an emulated one takes ten times as long for all.
Prints a line for each check with the figures it saw; the exit status is 1 if one failed.
"""

import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from sbx import AsyncSandbox, Run, Runtime, Settings, errors  # noqa: E402
from sbx.linux import landlock, procfs  # noqa: E402

CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
GONE_S = 60.0
BOMB_S = float(os.environ.get("BOMB_S", "8"))  # more for a slow guest
SETTINGS = Settings(start_timeout=float(os.environ.get("SBX_START_TIMEOUT", "120")))

SBX = "import sys; from sbx.cli import main; sys.exit(main())"
HOG = f"""
hoard = []
while True:
    hoard.append(b"x" * {8 * MIB})
"""
HOG_ON_TMPFS = f"""
with open("/tmp/hoard", "wb", 0) as file:
    for _ in range(240): file.write(b"x" * {MIB})
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
BURN = """
import time
cpu, begun = time.process_time(), time.monotonic()
while time.monotonic() - begun < 4:
    pass
round((time.process_time() - cpu) / (time.monotonic() - begun), 3)
"""
FIND_AND_SIGNAL = """
import os
def name(pid): return open(f"/proc/{pid}/comm").read().strip()
(found,) = [pid for pid in os.listdir("/proc") if pid.isdecimal() and name(pid) == "sleep"]
os.kill(int(found), 0)
"""


# -- where we stand, and what lives where ----------------------------------------------------------


def own_group(pid: int | str = "self") -> str:
    return Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::")


def brokers() -> list[int]:
    """Those of this process; it starts nothing else that lasts."""
    return [pid for pid in procfs.children(os.getpid()) if "/sbx-" in own_group(pid)]


def scope_of(broker: int) -> Path:
    """The group that systemd made for a broker: all of a runtime's groups lie in it."""
    return CGROUPS / own_group(broker).partition("/sbx-")[0].lstrip("/")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def runtime_groups() -> list[str]:
    return [str(path) for path in CGROUPS.rglob("sbx-*")]


def only(paths: list[Path]) -> Path:
    (path,) = paths
    return path


async def until(condition: Callable[[], bool], what: str) -> float:
    """Waits for what nothing can be waited on; seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < GONE_S, f"not within {GONE_S:g} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


# -- sandboxes -------------------------------------------------------------------------------------


def policy(extends: str = "default") -> Path:
    """A shipped policy with time enough for a slow machine, and without Landlock where there is
    none to be had."""
    text = f'schema = 1\nextends = "{extends}"\n[limits]\nwall_time = "600s"\n'
    if not landlock.supported():
        text += '[walls]\nlandlock = "best-effort"\n'
    path = Path(tempfile.gettempdir()) / f"end-to-end-{os.getpid()}-{extends}.toml"
    path.write_text(text)
    return path


@asynccontextmanager
async def sandbox(runtime: Runtime, **limits: Any) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(policy(), narrower={"limits": limits}) as box:
        yield box


def assert_killed_for_memory(run: Run) -> None:
    assert (run.status, run.cause, run.state_lost) == ("killed", "memory", True), run


async def assert_answers_anew(box: AsyncSandbox) -> None:
    """The next run works, is told that the state was lost, and the one after it is not."""
    first, second = await box.run("6 * 7"), await box.run("6 * 7")
    assert (first.result, first.state_lost) == ("42", True), first
    assert (second.result, second.state_lost) == ("42", False), second


# -- checks: each takes the one runtime, and returns the figures worth a line ----------------------


async def broker_has_a_scope_of_its_own(runtime: Runtime) -> str:
    (broker,) = brokers()
    scope = scope_of(broker)
    assert scope.suffix == ".scope", scope
    assert not own_group().startswith(own_group(broker).partition("/sbx-")[0])
    return str(scope.relative_to(CGROUPS))


async def host_is_found_to_be_cgroup_v2(runtime: Runtime) -> str:
    layers = [runtime.capabilities.layer(name) for name in ("memory", "tasks", "cpu")]
    assert all(layer.available and layer.detail == "cgroup v2" for layer in layers), layers
    return ", ".join(layer.name for layer in layers)


async def doctor_agrees(runtime: Runtime) -> str:
    command = [sys.executable, "-c", SBX, "doctor", "--json"]
    environment = {**os.environ, "SBX_START_TIMEOUT": str(SETTINGS.start_timeout)}
    ends_with = 0 if landlock.supported() else 3  # the policy default demands it
    said = await in_child(command, SETTINGS.start_timeout * 2, environment, ends_with)
    found = {layer["name"]: layer for layer in json.loads(said)["layers"]}
    assert found["memory"]["detail"] == "cgroup v2", found["memory"]
    return str({name: layer["found"] for name, layer in found.items()})


async def limits_are_read_back_in_the_receipt(runtime: Runtime) -> str:
    limits = {"memory_max": "200MiB", "tasks_max": 40, "cpu_quota": "50%"}
    async with sandbox(runtime, **limits) as box:
        receipt = await box.start()
        said = {name: receipt.limits[name] for name in limits}
        assert said == {"memory_max": 200 * MIB, "tasks_max": 40, "cpu_quota": 0.5}, said
        means = {wall["name"]: wall["means"] for wall in receipt.walls}
        assert all(means[name] == "cgroup v2" for name in ("memory", "tasks", "cpu")), means
        (broker,) = brokers()
        group = only(list(scope_of(broker).glob(f"sbx-*/box-{box.id}")))
        files = [(group / name).read_text().strip() for name in ("memory.max", "pids.max")]
        assert files == [str(200 * MIB), "40"], files
        jail = only([path for path in group.glob("jail-*") if path.is_dir()])
        inside = (jail / "cgroup.procs").read_text().split()
        assert len(inside) >= 2, inside  # PID 1 and the kernel; where it started cold, bwrap too
        assert (receipt.host_uid == os.getuid()) == (os.getuid() != 0)
        seen = await box.run("print(open('/proc/self/cgroup').read())")
        assert seen.stdout.strip() == "0::/", seen
    return f"{said}, host uid {receipt.host_uid}, {len(inside)} processes in the jail's group"


async def memory_hog_is_killed_and_the_next_run_works(runtime: Runtime) -> str:
    async with sandbox(runtime, memory_max="200MiB") as box, sandbox(runtime) as neighbour:
        await neighbour.run("kept = 1")
        await box.run("lost = 1")
        run = await box.run(HOG)
        assert_killed_for_memory(run)
        await assert_answers_anew(box)
        assert (await neighbour.run("kept")).result == "1"
    return f"{run.duration_s:.1f} s, {run.error.value if run.error else ''}"


async def command_that_hogs_takes_its_jail_along(runtime: Runtime) -> str:
    async with sandbox(runtime, memory_max="200MiB") as box:
        await box.start()
        run = await box.shell("python3 -", stdin=HOG)
        assert_killed_for_memory(run)
        await assert_answers_anew(box)
    return f"{run.duration_s:.1f} s"


async def files_on_tmpfs_count_as_memory(runtime: Runtime) -> str:
    async with sandbox(runtime, memory_max="150MiB") as box:
        run = await box.run(HOG_ON_TMPFS)
        assert_killed_for_memory(run)
        await assert_answers_anew(box)
    return f"{run.duration_s:.1f} s"


async def fork_bomb_leaves_a_neighbour_able_to_fork(runtime: Runtime) -> str:
    limits = {"tasks_max": 40, "cpu_quota": "50%"}
    async with sandbox(runtime, **limits) as box, sandbox(runtime) as neighbour:
        await box.start()
        await neighbour.start()
        (broker,) = brokers()
        jail = only(list(scope_of(broker).glob(f"sbx-*/box-{box.id}/jail-*")))
        bomb = asyncio.create_task(box.run(BOMB, timeout=BOMB_S))
        await until(
            lambda: "max 0\n" not in (jail / "pids.events").read_text(), "no fork was refused"
        )
        most = int((jail / "pids.current").read_text())
        forked = await neighbour.shell("echo $(echo forked)")
        assert not bomb.done()
        assert (forked.status, forked.stdout) == ("ok", "forked\n"), forked
        run = await bomb
        assert run.status in ("timeout", "killed"), run
        after = await box.run("6 * 7")
        assert after.result == "42", after
    assert most <= 40
    return (
        f"{most} tasks of 40; the neighbour's command took {forked.duration_s:.2f} s;"
        f" the bomb ended as {run.status} after {run.duration_s:.1f} s"
    )


async def fork_bomb_under_a_small_quota_dies_in_time(runtime: Runtime) -> str:
    """What was killed has to run once more to end: the quota must not stand in its way."""
    async with sandbox(runtime, tasks_max=64, cpu_quota="20%") as box:
        receipt = await box.start()
        run = await box.run(BOMB, timeout=BOMB_S)
        assert (run.status, run.state_lost) == ("timeout", True), run
        again = await box.start()
        assert again.limits == receipt.limits, again.limits
    return f"over {run.duration_s - BOMB_S:.1f} s after its time-out, one of them the interrupt's"


async def cpu_quota_slows_a_busy_loop(runtime: Runtime) -> str:
    async with sandbox(runtime, cpu_quota="20%") as box:
        await box.start()
        run = await box.run(BURN)
        assert run.ok, run
        assert run.result is not None
        assert 0.1 < float(run.result) < 0.3, run.result
    return f"{run.result} CPU seconds a second under a quota of 0.2"


async def groups_of_jails_go_with_them(runtime: Runtime) -> str:
    (broker,) = brokers()
    scope = scope_of(broker)
    async with sandbox(runtime) as box:
        await box.start()
        assert len(list(scope.glob("sbx-*/box-*/jail-*"))) == 1
        await box.stop()  # which is told before what is left of the jail is cleared away
        await until(lambda: not list(scope.glob("sbx-*/box-*/jail-*")), "a jail's group is left")
        await box.start()
    await until(lambda: not list(scope.glob("sbx-*/box-*")), "a sandbox' group is left")
    return "after stop no jail, after close no sandbox"


async def strict_policy_has_every_wall(runtime: Runtime) -> str:
    if not landlock.supported():
        return "left out: this linux has no Landlock, which the policy demands"
    async with await runtime.create(policy("strict")) as box:
        receipt = await box.start()
        hard = [wall for wall in receipt.walls if wall["demanded"] == "hard"]
        assert len(hard) > 5, receipt.walls
        assert not any(wall["weaker"] for wall in hard), receipt.walls
        assert (await box.run("1 + 1")).result == "2"
        assert not (await box.run("import os; os.fork()")).ok
    return ", ".join(f"{wall['name']}: {wall['demanded']}" for wall in receipt.walls)


async def receipt_tells_what_landlock_lacks(runtime: Runtime) -> str:
    """Scopes keep a cell from signalling a command. Where this linux has none the receipt says so,
    and they do reach each other."""
    abi = landlock.abi()
    async with sandbox(runtime) as box:
        receipt = await box.start()
        assert receipt.landlock_abi == abi
        (wall,) = (wall for wall in receipt.walls if wall["name"] == "landlock")
        command = asyncio.create_task(box.shell("exec sleep 60"))
        signalled = await box.run(f"import time; time.sleep(2)\n{FIND_AND_SIGNAL}")
        command.cancel()
        forbidden = signalled.error is not None and signalled.error.name == "PermissionError"
        assert forbidden or signalled.ok, signalled
        assert forbidden == (abi >= 6), signalled
        assert ("signals" in wall["means"]) == (0 < abi < 6), wall
    return f"{wall['means']!r}; a cell may signal a command: {not forbidden}"


async def two_runtimes_have_a_scope_each(runtime: Runtime) -> str:
    (first,) = brokers()
    async with Runtime(SETTINGS) as other, sandbox(other) as box:
        (second,) = set(brokers()) - {first}
        scope = scope_of(second)
        assert scope != scope_of(first)
        assert (await box.run("1 + 1")).result == "2"
    took = await until(lambda: not scope.exists(), f"{scope} is left")
    return f"the scope of a closed runtime is gone after {took:.2f} s"


async def killed_program_leaves_nothing(runtime: Runtime) -> str:
    return await _killed(broker_too=False)


async def killed_program_and_broker_leave_nothing(runtime: Runtime) -> str:
    return await _killed(broker_too=True)


async def _killed(*, broker_too: bool) -> str:
    """kill -9 for a program whose sandbox is busy: its processes and groups go by themselves."""
    victim = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--victim", stdout=asyncio.subprocess.PIPE
    )
    assert victim.stdout is not None
    line = await asyncio.wait_for(victim.stdout.readline(), SETTINGS.start_timeout * 2)
    broker = json.loads(line)["broker"]
    scope = scope_of(broker)
    inside = [int(pid) for path in scope.rglob("cgroup.procs") for pid in path.read_text().split()]
    assert len(inside) >= 4, inside  # the broker, bwrap, PID 1, the kernel
    if broker_too:
        os.kill(broker, signal.SIGKILL)
    victim.kill()
    await victim.wait()
    took = await until(lambda: not scope.exists(), f"{scope} is left")
    await until(lambda: not alive(inside), "a process is left")  # systemd has to reap them
    return f"{len(inside)} processes and {scope.name} are gone after {took:.2f} s"


async def without_systemd_it_goes_on_without_cgroups(runtime: Runtime) -> str:
    with tempfile.TemporaryDirectory() as nowhere:
        os.mknod(f"{nowhere}/bus")  # looks like a bus, and nobody answers
        command = [sys.executable, __file__, "--without-systemd"]
        if os.geteuid() == 0:
            masked = ("/run/systemd/private", "/run/dbus/system_bus_socket")
            mounts = "".join(f"mount --bind /dev/null {path}; " for path in masked)
            command = ["unshare", "-m", "sh", "-c", f'{mounts} exec "$@"', "sh", *command]
        bus = {"XDG_RUNTIME_DIR": nowhere, "DBUS_SESSION_BUS_ADDRESS": f"unix:path={nowhere}/bus"}
        return await in_child(command, SETTINGS.start_timeout * 4, {**os.environ, **bus})


async def in_child(
    command: list[str], timeout_s: float, environment: Mapping[str, str], ends_with: int = 0
) -> str:
    """What the command printed."""
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment, cwd=PROJECT
    )
    said, _ = await asyncio.wait_for(child.communicate(), timeout_s)
    assert child.returncode == ends_with, (command, child.returncode, said.decode())
    return said.decode().strip()


CHECKS: list[Callable[[Runtime], Awaitable[str]]] = [
    broker_has_a_scope_of_its_own,
    host_is_found_to_be_cgroup_v2,
    doctor_agrees,
    limits_are_read_back_in_the_receipt,
    memory_hog_is_killed_and_the_next_run_works,
    command_that_hogs_takes_its_jail_along,
    files_on_tmpfs_count_as_memory,
    fork_bomb_leaves_a_neighbour_able_to_fork,
    fork_bomb_under_a_small_quota_dies_in_time,
    cpu_quota_slows_a_busy_loop,
    groups_of_jails_go_with_them,
    strict_policy_has_every_wall,
    receipt_tells_what_landlock_lacks,
    two_runtimes_have_a_scope_each,
    killed_program_leaves_nothing,
    killed_program_and_broker_leave_nothing,
    without_systemd_it_goes_on_without_cgroups,
]


# -- programs that a check starts ------------------------------------------------------------------


async def victim() -> None:
    """Has a busy sandbox until it is killed."""
    async with Runtime(SETTINGS) as runtime, sandbox(runtime) as box:
        await box.start()
        box_run = asyncio.create_task(box.run("while True: pass"))
        print(json.dumps({"broker": brokers()[0]}), flush=True)
        await box_run


async def without_systemd() -> None:
    """systemd-run fails: the cause and the remedy are named, the weaker means hold."""
    before = own_group()
    async with Runtime(SETTINGS) as runtime:
        assert not brokers()
        layer = runtime.capabilities.layer("memory")
        assert not layer.available
        assert layer.cause, layer
        assert "systemd-run" in (layer.remedy or ""), layer
        async with sandbox(runtime, memory_max="200MiB") as box:
            receipt = await box.start()
            weaker = [wall["name"] for wall in receipt.walls if wall["weaker"]]
            assert {"memory", "tasks", "cpu"} <= set(weaker), receipt.walls
            assert receipt.limits["memory_max"] is None, receipt.limits
            run = await box.run(HOG)
            assert run.status in ("killed", "error"), run  # the watcher, or RLIMIT_DATA
            assert (await box.run("6 * 7")).result == "42"
        refusal = await refused(runtime.create(policy("strict")))
        assert (refusal.details["layer"], refusal.hint) == ("memory", layer.remedy), refusal
    assert own_group() == before
    print(f"{layer.cause}; {layer.remedy}; weaker: {weaker}; a hog: {run.status} {run.cause}")


async def refused(creating: Awaitable[AsyncSandbox]) -> errors.CannotEnforce:
    try:
        await creating
    except errors.CannotEnforce as refusal:
        return refusal
    raise AssertionError("a policy with hard limits was not refused")


# -- all of it -------------------------------------------------------------------------------------


async def check_all(names: list[str]) -> int:
    before = own_group()
    print(f"uid {os.getuid()} in {before}")
    print(f"linux {platform.release()}, Landlock ABI {landlock.abi()}, {os.cpu_count()} CPUs")
    assert (CGROUPS / "cgroup.controllers").exists(), "this host has no cgroup v2"
    left_before = runtime_groups()
    failed = []
    async with Runtime(SETTINGS) as runtime:
        for check in CHECKS:
            name = check.__name__
            if names and not any(part in name for part in names):
                continue
            begun = time.monotonic()
            try:
                figures, verdict = await check(runtime), "ok    "
            except Exception:  # noqa: BLE001  # the next check is to be run whatever this one found
                figures, verdict = traceback.format_exc(), "FAILED"
                failed.append(name)
            took = time.monotonic() - begun
            print(f"{verdict} {name.replace('_', ' ')} ({took:.1f} s): {figures}", flush=True)
        assert own_group() == before, "the program itself was moved"
        scope = scope_of(brokers()[0]) if brokers() else None
    if scope is not None:
        await until(lambda: not scope.exists(), f"{scope} is left")
    left = sorted(set(runtime_groups()) - set(left_before))
    print(f"the program is still in {own_group()}; groups that are left: {left}")
    print(f"{len(failed)} failed: {failed}" if failed else "all is well")
    return 1 if failed or left or own_group() != before else 0


def main() -> int:
    match sys.argv[1:]:
        case ["--victim"]:
            asyncio.run(victim())
            return 0
        case ["--without-systemd"]:
            asyncio.run(without_systemd())
            return 0
        case names:
            return asyncio.run(check_all(names))


if __name__ == "__main__":
    sys.exit(main())
