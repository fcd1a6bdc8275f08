"""What every test shares: a runtime, a sandbox, and a check that nothing of ours is left behind.

    --full            the escape tests attack kernels of all paths (pool, fork, cold), the attack
                      set under both policies and as two users; without it those of one, by turns:
                      another one with each commit
    runtime, box      one for each test that asks (escape/ keeps one for a whole module)
    core              marks what is run a second time as an unprivileged user; see
                      integration/test_unprivileged.py
    needs("memory")   marks what a host may lack: skipped there with the reason, and a failure where
                      CI=true says that the host is complete (save "cgroup2", which few have)

The check runs at the end of every module: no process below this one, no file descriptor more than
before, no mount, no cgroup, no temporary directory. All temporary directories of a session lie
in one of its own, so what other programs do in /tmp meanwhile is not mistaken for ours.
"""

import asyncio
import ctypes
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from attacking import attacked_users, turn

from sbx import Runtime
from sbx.isolation import launch
from sbx.isolation.probe import Capabilities
from sbx.runtime.sandbox import AsyncSandbox

SETTLE_S = 10.0
_OWN_PREFIX = "tests-of-sbx-"
_PR_SET_CHILD_SUBREAPER = 36
_brokers: set[str] = set()  # as the names of their cgroups end
_BY_TURNS = ("test_exchange_races.py", "test_programs_behind_filters.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="attack kernels of all three paths")
    parser.addoption(
        "--path",
        choices=("pool", "fork", "cold"),
        help="… of this one; without either, of one by turns",
    )
    parser.addoption(
        "--by-turns",
        action="store_true",
        help="of the crash tests, the longest races, and those that are run again as another user, "
        "only a third: another one with each commit",
    )
    parser.addoption(
        "--policy", choices=("default", "strict"), help="… under this policy, where there is one"
    )
    parser.addoption("--third", type=int, choices=(0, 1, 2), help="only this third of all tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "another_user: the attack set as one, where it is its turn")
    config.addinivalue_line("markers", "core: run a second time as an unprivileged user")
    config.addinivalue_line("markers", "needs(*names): what the host must have for this test")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Started as a background job, as CI may: what the tests start would ignore Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if _has_its_turn(item)]
    if left_out := set(items) - set(wanted):
        config.hook.pytest_deselected(items=left_out)
    # What takes longest comes first, for there may be several processes.
    items[:] = sorted(wanted, key=lambda item: "test_unprivileged" not in item.nodeid)


def _has_its_turn(item: pytest.Item) -> bool:
    users = attacked_users(item.config)
    if item.path.name == "test_attack_set.py" and "self" not in users:
        return False
    if "another_user" in item.keywords and "unprivileged" not in users:
        return False
    third = item.config.getoption("--third")
    slow = item.path.parent.name == "crash" or item.path.name in _BY_TURNS
    if third is None and slow and item.config.getoption("--by-turns"):
        third = turn() % 3
    return third is None or zlib.crc32(item.nodeid.encode()) % 3 == third


# -- what a host may lack --------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if (cause := _lacks(name)) is None:
                continue
            reason = f"this host lacks {name}: {cause}"
            if os.environ.get("CI") == "true" and name not in ("cgroup2", "root"):
                pytest.fail(reason)
            pytest.skip(reason)


def _lacks(name: str) -> str | None:
    """Why a test that needs `name` cannot run here; None if it can."""
    match name:
        case "root":
            return None if os.geteuid() == 0 else "the tests run as another user"
        case "cgroup2":
            layer = capabilities().layer("memory")
            return None if layer.detail == "cgroup v2" else "its cgroups are of another kind"
        case "landlock-scopes":
            abi = capabilities().landlock_abi
            return None if abi >= 6 else f"Landlock is of ABI {abi}, and scopes came with 6"
        case _:
            layer = capabilities().layer(name)
            return None if layer.found else layer.cause


@cache
def capabilities() -> Capabilities:
    """What this host can do, as a runtime finds it; in a thread, beside any running event loop."""

    async def ask() -> Capabilities:
        async with Runtime() as runtime:
            return runtime.capabilities

    found: list[Capabilities] = []
    asking = threading.Thread(target=lambda: found.append(asyncio.run(ask())))
    asking.start()
    asking.join()
    return found[0]


# -- a runtime and a sandbox -----------------------------------------------------------------------


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        yield runtime


@pytest.fixture
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create() as box:
        yield box


# -- nothing is left behind ------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """What a program could leave on its host, each with words to name it by."""

    processes: dict[int, str]
    descriptors: dict[int, str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    directories: frozenset[str]

    def since(self, before: "Traces") -> list[str]:
        mine = [f"process {pid}: {name}" for pid, name in self.processes.items()]
        mine += [f"descriptor {fd}: {name}" for fd, name in self.descriptors.items()]
        mine += [f"mount {line}" for line in self.mounts]
        mine += [f"cgroup {path}" for path in self.cgroups]
        mine += [f"directory {path}" for path in self.directories]
        theirs = {f"process {pid}: {name}" for pid, name in before.processes.items()}
        theirs |= {f"descriptor {fd}: {name}" for fd, name in before.descriptors.items()}
        theirs |= {f"mount {line}" for line in before.mounts}
        return sorted(set(mine) - theirs)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for all that this session makes, its child processes included."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where people look for it
    names = ("TMPDIR", "XDG_DATA_HOME")  # the second: where quarantines lie
    before = {name: os.environ.get(name) for name in names}
    top = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX))
    top.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(top)
    os.environ["XDG_DATA_HOME"] = str(top / "data-home")
    yield top
    tempfile.tempdir = None
    for name, value in before.items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def orphans_become_ours() -> Iterator[None]:
    """Whoever loses its parent becomes a child of the tests, so that none escapes the check; and
    brokers are remembered, because the names of their cgroups tell their pid and when it began: a
    pid alone comes again, for a broker of another process of the run."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    real = launch._start_process

    def remembered(*words: Any) -> Any:
        process = real(*words)
        with suppress(FileNotFoundError):
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            _brokers.add(f"-{process.pid}-{stat[19]}")
        return process

    patch = pytest.MonkeyPatch()
    patch.setattr(launch, "_start_process", remembered)
    yield
    patch.undo()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(own_temporary_directory: Path, orphans_become_ours: None) -> Iterator[None]:
    """Fails the module that leaves something, and says what."""
    before = _traces(own_temporary_directory)
    yield
    left = _settled(lambda: _traces(own_temporary_directory).since(before))
    assert not left, f"left behind by this module: {left}"


def _settled(find: Callable[[], list[str]]) -> list[str]:
    """What is still found after a moment: the end of a process is no single instant."""
    deadline = time.monotonic() + SETTLE_S
    gc.collect()
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _traces(temporary: Path) -> Traces:
    return Traces(
        processes=_processes(),
        descriptors=_descriptors(),
        mounts=frozenset(line for line in _mounts() if not _is_of_another_session(line)),
        cgroups=frozenset(_cgroups()),
        directories=frozenset(str(path) for path in temporary.glob("sbx-*")),
    )


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _is_of_another_session(line: str) -> bool:
    """Whether another process of the run mounted it, in the directory that is its own."""
    place = line.split()[4]
    return _OWN_PREFIX in place and not place.startswith(f"{tempfile.gettempdir()}/")


def _processes() -> dict[int, str]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)  # an orphan that became ours
                continue
            found[process.pid] = " ".join(process.cmdline())[:200] or process.name()
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def _cgroups() -> Iterator[str]:
    """Groups of the runtimes that this session started, wherever a hierarchy is mounted."""
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype in ("cgroup", "cgroup2"):
            for path, _, _ in os.walk(mount.mountpoint):  # which minds no group that goes meanwhile
                name = os.path.basename(path)
                if name.startswith("sbx-") and any(map(name.endswith, _brokers)):
                    yield path
