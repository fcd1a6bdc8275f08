"""What one sandbox may do to use up its host: one resource each, and how a service has to end it.

Each is safe to run on a machine that people use: it goes on until a limit of its own sandbox ends
it, or the time-out of its run. `tests/crash/test_neighbours.py` and the row `neighbour` run them
against a real service beside an innocent sandbox; `tests/vm/end_to_end.py` under systemd.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from sbx import errors
from sbx.protocol.runs import Run

_SHORT_S = 1.5


class Attacker(Protocol):
    """The sandbox that attacks: embedded, or behind a service."""

    @property
    def files(self) -> Any: ...

    async def run(self, code: str, *, timeout: float | None = None) -> Run: ...


@dataclass(frozen=True)
class Attack:
    """`code` is a cell. It has to end in one of `ends` (see `outcome`) under the limits `narrower`,
    which leave the rest of the policy as it is. `watches`: so many callers follow its files."""

    name: str
    code: str
    ends: frozenset[str]
    narrower: Mapping[str, str | int] = field(default_factory=dict)
    timeout_s: float = _SHORT_S
    watches: int = 0

    async def strike(self, box: Attacker, *, slower: float = 1.0) -> str:
        """Run it to its end; its outcome. `slower`: how many times the usual time it is given."""
        watching = [asyncio.create_task(_watch(box)) for _ in range(self.watches)]
        try:
            return outcome(await box.run(_PRELUDE + self.code, timeout=self.timeout_s * slower))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


async def _watch(box: Attacker) -> None:
    async with aclosing(box.files.watch()) as changes:
        async for _ in changes:
            pass


def outcome(run: Run) -> str:
    """In one word: `killed:memory` and its kin, `timeout`, an exception of the code, `ok`."""
    if run.cause is not None:
        return f"{run.status}:{run.cause}"
    if run.error is not None and run.status == "error":
        return run.error.name
    return str(run.status)


async def again_and_again(attack: Attack, box: Attacker, over: asyncio.Event) -> list[str]:
    """Strike until it is over; every outcome."""
    outcomes = []
    while not over.is_set():
        try:
            outcomes.append(await attack.strike(box))
        except errors.SbxError as error:  # a refusal is no end of an attack: the row has to tell
            outcomes.append(error.code)
            await asyncio.sleep(0.05)
    return outcomes


MARK = "sbx-attacker"
"""The name (prctl(2), PR_SET_NAME) of every process of an attack that has executed nothing else."""

_PRELUDE = f"""
import ctypes, glob, mmap, os, signal, subprocess, time
ctypes.CDLL(None).prctl(15, {MARK.encode()!r})
def die_not():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
def go_on(act):
    'Again and again, whatever is refused.'
    while True:
        try:
            act()
        except (OSError, RuntimeError):
            time.sleep(0.001)
"""
_MIB = 1 << 20
_SMALL: dict[str, str | int] = {"memory_max": "160MiB"}


def _attack(
    name: str,
    code: str,
    *ends: str,
    timeout_s: float = _SHORT_S,
    watches: int = 0,
    limits: Mapping[str, str | int] | None = None,
) -> Attack:
    return Attack(name, code, frozenset(ends), limits or {}, timeout_s, watches)


# Of who is stopped at last it may be told as well that a fork was refused meanwhile.
_STOPPED = ("timeout", "timeout:pids")
# Where no cgroup limits memory the watcher ends whoever takes too much, and a single allocation
# may meet RLIMIT_DATA instead.
_MEMORY = ("killed:memory", "MemoryError")

ATTACKS: tuple[Attack, ...] = (
    _attack(
        "fork bomb",
        """
def breed():
    while True:
        try:
            os.fork()
        except OSError:
            pass
breed()
""",
        *_STOPPED,
    ),
    _attack(
        "fork bomb of a shell",
        "go_on(lambda: subprocess.run(['sh', '-c', 'b() { b | b & }; b; sleep 0.2']))",
        *_STOPPED,
    ),
    _attack(
        "malloc",
        f"""
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
while (piece := libc.malloc(ctypes.c_size_t({_MIB}))):
    ctypes.memset(piece, 1, {_MIB})
raise MemoryError
""",
        *_MEMORY,
        limits=_SMALL,
        timeout_s=10,
    ),
    _attack(
        "tmpfs",
        f"""
with open('/tmp/hoard', 'wb', 0) as file:
    for _ in range(240): file.write(bytes({_MIB}))
time.sleep(30)
""",
        "killed:memory",
        limits=_SMALL,
        timeout_s=10,
    ),
    _attack(
        "shm",
        f"""
with open('/dev/shm/hoard', 'wb', 0) as file:
    for _ in range(60): file.write(bytes({_MIB}))
hoard = [mmap.mmap(-1, {_MIB}) for _ in range(400)]  # shared by nobody, and in no directory
for piece in hoard: piece.write(bytes({_MIB}))
time.sleep(30)
""",
        "killed:memory",
        limits=_SMALL,
        timeout_s=10,
    ),
    _attack(
        "memfd",
        f"""
held = []
for _ in range(40):
    held.append(os.memfd_create('hoard'))
    for _ in range(10): os.write(held[-1], bytes({_MIB}))
time.sleep(30)
""",
        "killed:memory",
        limits=_SMALL,
        timeout_s=10,
    ),
    _attack(
        "page cache",
        f"""
block = bytes({_MIB})
while True:
    with open('cached', 'wb', 0) as file:
        for _ in range(300): file.write(block)
    with open('cached', 'rb', 0) as file:
        while file.read({_MIB}): pass
""",
        "timeout",
        limits=_SMALL,
        timeout_s=2.5,
    ),
    _attack(
        "disk by size",
        f"""
for left in glob.glob('large*'): os.unlink(left)  # what is there already is tolerated
for number in range(400):
    with open(f'large{{number}}', 'wb', 0) as file:
        for _ in range(8): file.write(bytes({_MIB}))
time.sleep(30)
""",
        "killed:disk",
        "OSError",  # a quota of the host's file system
        limits={"workspace_max": "64MiB"},
        timeout_s=10,
    ),
    _attack(
        "disk by inodes",
        """
for left in glob.glob('name*'): os.unlink(left)
for number in range(20_000):
    os.close(os.open(f'name{number}', os.O_CREAT | os.O_WRONLY))
time.sleep(30)
""",
        "killed:disk",
        "OSError",
        limits={"workspace_files": 2000},
        timeout_s=10,
    ),
    _attack(
        "descriptors",
        """
def hold():
    held = []
    def more():
        held.extend((os.open('/', os.O_PATH), os.eventfd(1), *os.pipe()))
        os.set_blocking(held[-1], False)
        os.write(held[-1], bytes(65536))
    go_on(more)
for _ in range(24):
    if not os.fork(): hold()
hold()
""",
        "timeout",
    ),
    _attack(
        "timers",
        """
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
def arm():
    made = ctypes.c_void_p()
    while libc.timer_create(1, None, ctypes.byref(made)) == 0:
        every = (ctypes.c_long * 4)(0, 50_000, 0, 50_000)
        libc.timer_settime(made, 0, every, None)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    while True: time.sleep(0.01)
for _ in range(4):
    if not os.fork(): arm()
arm()
""",
        "timeout",
    ),
    _attack(
        "zombies",
        """
def leave():
    if not os.fork(): os._exit(0)
go_on(leave)
""",
        *_STOPPED,
    ),
    _attack(
        "stdout flood",
        "while True: os.write(1, b'x' * 65536)",
        "killed:output",
        timeout_s=10,
    ),
    _attack(
        "stdout flood of small pieces",
        "while True: print('x', flush=True)",
        "killed:output",
        "timeout",
    ),
    _attack(
        "JSON of many values",
        """
shown = {'application/json': [{}] * 140_000}
while True: display(shown, raw=True)
""",
        "killed:output",
        timeout_s=20,
    ),
    _attack(
        "CPU on all cores",
        """
for _ in range(2 * os.cpu_count()):
    if not os.fork():
        while True: pass
while True: pass
""",
        "timeout",
    ),
    _attack(
        "signals ignored",
        """
die_not()
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for _ in range(3):
    if not os.fork():
        os.setsid()
        while True: pass
while True:
    try: time.sleep(1)
    except BaseException: pass
""",
        "timeout",
    ),
    _attack(
        "renames that are watched",
        """
os.makedirs('one/b/c/d', exist_ok=True); os.makedirs('other/b', exist_ok=True)
libc = ctypes.CDLL(None)
while True: libc.renameat2(-100, b'one', -100, b'other', 2)
""",
        "timeout",
        watches=8,
    ),
    _attack(
        "as many files as are allowed",
        """
os.makedirs('many', exist_ok=True)
for number in range(48_000):
    os.close(os.open(f'many/{number}', os.O_CREAT | os.O_WRONLY))
while True: pass
""",
        "timeout",
        timeout_s=5.0,
    ),
)
