"""What every test shares: a runtime, a sandbox, and a check that nothing of ours is left behind.

    --full            the full tier: adds the tests marked full_tier, kernels of all paths (pool,
                      fork, cold) to each escape test, 1,000 examples to each property test, and
                      private runtimes. Without it the CI tier runs.
    --private-runtimes    each test gets its own runtime
    runtime           one for all tests of a process; own_runtime is for a test that kills, closes,
                      configures or counts it, or looks at its directory
    box               a new sandbox of it
    full_tier         marks a module, a test, or one row of a matrix that the CI tier leaves out
    ci_tier           marks a test that the CI tier runs of a module that is marked full_tier
    unprivileged      marks a test of a wall or of a host fact: it runs a second time as a user
                      without rights; see integration/test_unprivileged.py
    core              marks what else the full tier runs as that user
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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import forked_serve
import psutil
import pytest
from console_service import console  # noqa: F401  # a fixture
from hypothesis import settings
from sdk_service import sdk  # noqa: F401  # a fixture
from shared_services import (  # noqa: F401  # fixtures
    client,
    served,
    service,
    shared_application,
    shared_service,
)
from web import site  # noqa: F401  # a fixture

from sbx import Runtime
from sbx.isolation.broker import spawned
from sbx.isolation.probe import Capabilities
from sbx.linux import mounts, namespaces
from sbx.runtime.sandbox import AsyncSandbox
from tests import disks
from tests.debian_tools import debian_tool

SETTLE_S = 60.0
_LOOK_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36
_brokers: dict[int, str] = {}  # pid: how the names of its cgroups end
_CI_EXAMPLES = 30
_FULL_EXAMPLES = 1_000
_FULL_PROPERTY_TIMEOUT_S = 1_800


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full tier")
    parser.addoption(
        "--private-runtimes",
        action="store_true",
        help="give each test its own runtime; --full implies this",
    )
    parser.addoption(
        "--path",
        choices=("pool", "fork", "cold"),
        help="start the kernels that escape tests attack by this path only",
    )
    parser.addoption(
        "--policy", choices=("default", "strict"), help="try the attack set under this policy only"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "full_tier: the CI tier leaves this test out",
        "ci_tier: the CI tier runs this test of a module that is marked full_tier",
        "unprivileged: run this test a second time as a user without rights",
        "core: the full tier runs this test a second time as a user without rights",
        "needs(*names): what the host must have for this test",
    ):
        config.addinivalue_line("markers", line)
    if config.option.full:
        config.option.private_runtimes = True
    _load_examples(config)
    # Started as a background job or by nohup, as CI may: what the tests start would ignore these
    # signals as well.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _take_own_mounts()


def _take_own_mounts() -> None:
    """Move this process into a mount namespace of its own, if it may have one: what the other
    processes of the run mount is then no leak of this one."""
    with suppress(PermissionError):
        namespaces.unshare(namespaces.Namespace.MOUNT)
        mounts.receive_only("/")


def _load_examples(config: pytest.Config) -> None:
    """Load the settings of Hypothesis for this tier, before it reads its own option.

    The CI tier tries the same examples in each run, so that only a change of the code changes the
    outcome. The full tier looks for new examples. Neither judges how long an example takes.
    """
    settings.register_profile("ci", max_examples=_CI_EXAMPLES, deadline=None, derandomize=True)
    settings.register_profile("full", max_examples=_FULL_EXAMPLES, deadline=None, print_blob=True)
    settings.load_profile("full" if config.option.full else "ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what collection makes out of every later garbage collection. The 11,000 tests and their
    modules are half a gigabyte, and to walk it took four fifths of the CPU of a test process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.full:
        for item in items:
            # A state machine is run by a plain function, which hypothesis does not mark.
            is_property = item.path.parent.name == "property"
            if is_property or getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.timeout(_FULL_PROPERTY_TIMEOUT_S))
    else:
        left_out = [item for item in items if _is_full_tier(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_full_tier(item)]
    # The longest tests come first, for several processes share the tests.
    items.sort(key=lambda item: "test_unprivileged" not in item.nodeid)


def _is_full_tier(item: pytest.Item) -> bool:
    return "full_tier" in item.keywords and "ci_tier" not in item.keywords


# -- what a host may lack --------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if (cause := _lacks(name)) is None:
                continue
            reason = f"this host lacks {name}: {cause}"
            if os.environ.get("CI") == "true" and name not in ("cgroup2", "root", "casefold"):
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
        case "prometheus" | "promtool" | "go":
            return None if debian_tool(name) else f"scripts/test could not unpack {name}"
        case "btrfs" | "ext4" | "casefold":
            return disks.lacking(name) if os.geteuid() == 0 else "only root can mount"
        case "landlock-scopes":
            abi = capabilities().landlock_abi
            return None if abi >= 6 else f"Landlock is of ABI {abi}, and scopes came with 6"
        case _:
            layer = capabilities().layer(name)
            return None if layer.available else layer.cause


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


class SharedRuntime:
    """The runtime of one process of the run. Its pool gives each test a new sandbox in
    milliseconds, where a runtime and its first kernel take more than a second.

    Between tests it may hold what a runtime without sandboxes holds.
    """

    _DESCRIPTORS = 5  # the socket of the broker, the data directory, its lock, two directories
    _OF_AN_IDLE_KERNEL = 2  # two sockets
    _OF_A_PREWARMED_KERNEL = 5  # those of its kernel, and three directories
    _OF_A_ZYGOTE = 3  # bwrap, PID 1, the zygote
    _OF_A_KERNEL = 2  # PID 1 and the kernel

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.of_its_service = 0  # descriptors of the service that has this runtime, where one does

    async def started(self) -> Runtime:
        if self.runtime is None:
            self.runtime = await Runtime().start()
        return self.runtime

    async def close(self) -> None:
        if self.runtime is not None:
            runtime, self.runtime = self.runtime, None
            await runtime.close()

    async def end_sandboxes(self) -> None:
        """Close what the test left open. Fails the test if it ended the runtime itself."""
        runtime = self.runtime
        if runtime is None:
            return
        if not runtime.alive:
            await self.close()
            pytest.fail("this test ended the runtime that all tests share: it needs own_runtime")
        for box in list(runtime._sandboxes):
            await box.close()

    @property
    def broker(self) -> int | None:
        """The pid of its broker."""
        broker = None if self.runtime is None else self.runtime._broker
        return None if broker is None or broker._process is None else broker._process.pid

    @property
    def data(self) -> Path | None:
        return None if self.runtime is None else self.runtime.data.path

    @property
    def descriptors(self) -> int:
        """How many descriptors it may have open now."""
        if self.runtime is None:
            return 0
        assert self.runtime._resources is not None
        pools = self.runtime._resources.starter._pools.values()
        idle = self._OF_AN_IDLE_KERNEL * sum(len(pool._idle) for pool in pools)
        prewarmed = self._OF_A_PREWARMED_KERNEL * sum(len(pool._prewarmed) for pool in pools)
        return self._DESCRIPTORS + self.of_its_service + idle + prewarmed

    def surplus(self, processes: dict[int, str]) -> list[str]:
        """Its processes, if they are more than its zygotes and idle kernels have."""
        if self.runtime is None:
            return []
        assert self.runtime._broker is not None
        zygotes = len(self.runtime._broker._zygotes)
        most = 1 + self._OF_A_ZYGOTE * zygotes + self._OF_A_KERNEL * self.runtime.idle
        if len(processes) <= most:
            return []
        return [f"{len(processes)} processes of a shared runtime, and not {most}: {processes}"]


_shared = SharedRuntime()


class Lasting:
    """What lives until the end of the session and is therefore no leak of a module."""

    def __init__(self) -> None:
        self.runtimes = [_shared]  # and those of services in this process
        self.services: list[int] = []  # pids of `sbx serve`, each with all it started

    @contextmanager
    def in_process(self, runtime: Runtime, descriptors: int) -> Iterator[None]:
        kept = SharedRuntime()
        kept.runtime, kept.of_its_service = runtime, descriptors
        self.runtimes.append(kept)
        try:
            yield
        finally:
            self.runtimes.remove(kept)

    @contextmanager
    def service(self, pid: int) -> Iterator[None]:
        self.services.append(pid)
        try:
            yield
        finally:
            self.services.remove(pid)


_lasting = Lasting()


@pytest.fixture(scope="session")
def lasting(nothing_is_left_at_the_end: None) -> Lasting:
    """For a fixture that keeps a service or a service for the whole run."""
    return _lasting


@pytest.fixture(scope="session", autouse=True)
async def shared_runtimes(nothing_is_left_at_the_end: None) -> AsyncIterator[SharedRuntime]:
    """Its start is left to the first test that asks; the loop of all tests starts with this."""
    yield _shared
    await _shared.close()


@pytest.fixture
async def own_runtime() -> AsyncIterator[Runtime]:
    """A runtime for one test, which kills, closes, configures or counts it."""
    async with Runtime() as runtime:
        yield runtime


@pytest.fixture
async def runtime(
    shared_runtimes: SharedRuntime, pytestconfig: pytest.Config
) -> AsyncIterator[Runtime]:
    """The runtime of this process of the run; with --private-runtimes one for each test."""
    if pytestconfig.getoption("--private-runtimes"):
        async with Runtime() as runtime:
            yield runtime
        return
    yield await shared_runtimes.started()
    await shared_runtimes.end_sandboxes()


@pytest.fixture
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create() as box:
        yield box


# -- nothing is left behind ------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """What a program could leave on its host, each with words to name it by. `surplus` describes
    what the runtimes of the whole run hold beyond what they may; their other processes are left
    out here. `may_open`: how many of the descriptors they may hold."""

    processes: dict[int, str]
    surplus: list[str]
    descriptors: dict[int, str]
    may_open: int
    mounts: frozenset[str]
    cgroups: frozenset[str]
    directories: frozenset[str]

    def since(self, before: "Traces") -> list[str]:
        mine = [f"process {pid}: {name}" for pid, name in self.processes.items()]
        mine += [f"mount {line}" for line in self.mounts]
        mine += [f"cgroup {path}" for path in self.cgroups]
        mine += [f"directory {path}" for path in self.directories]
        theirs = {f"process {pid}: {name}" for pid, name in before.processes.items()}
        theirs |= {f"mount {line}" for line in before.mounts}
        return [*sorted(set(mine) - theirs), *self.surplus, *self._descriptors_since(before)]

    def _descriptors_since(self, before: "Traces") -> list[str]:
        opened = {f"descriptor {fd}: {name}" for fd, name in self.descriptors.items()}
        opened -= {f"descriptor {fd}: {name}" for fd, name in before.descriptors.items()}
        grown = len(self.descriptors) - len(before.descriptors)
        if self.may_open or before.may_open:  # its descriptors change as its pool does
            return sorted(opened) if grown > self.may_open - before.may_open else []
        return sorted(opened)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for all that this session makes, its child processes included."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where people look for it
    names = ("TMPDIR", "XDG_DATA_HOME")  # the second: where quarantines lie
    before = {name: os.environ.get(name) for name in names}
    top = Path(tempfile.mkdtemp(prefix="tests-of-sbx-"))
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
    real = spawned.start_process

    def remembered(*words: Any) -> Any:
        process = real(*words)
        with suppress(FileNotFoundError):
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            _brokers[process.pid] = f"-{process.pid}-{stat[19]}"
        return process

    patch = pytest.MonkeyPatch()
    patch.setattr(spawned, "start_process", remembered)
    yield
    patch.undo()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_at_the_end(
    own_temporary_directory: Path, orphans_become_ours: None
) -> Iterator[None]:
    """The same for the whole run, after the shared runtime has ended."""
    before = _traces(own_temporary_directory)
    yield
    forked_serve.close()
    deadline = time.monotonic() + SETTLE_S
    while (left := _traces(own_temporary_directory).since(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(_LOOK_S)
    assert not left, f"left behind by this run: {left}"


@pytest.fixture(scope="module", autouse=True)
async def nothing_is_left(
    own_temporary_directory: Path, shared_runtimes: SharedRuntime
) -> AsyncIterator[None]:
    """Fails the module that leaves something, and says what. The loop of the tests runs meanwhile,
    in which the shared runtime fills its pool."""
    before = _traces(own_temporary_directory)
    yield
    gc.collect(1)  # finds what this module dropped; to walk all objects takes a fifth of the CPU
    deadline = time.monotonic() + SETTLE_S  # the end of a process is no single instant
    while (left := _traces(own_temporary_directory).since(before)) and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(_LOOK_S)
    assert not left, f"left behind by this module: {left}"


def _data_directories(temporary: Path) -> set[Path]:
    return set(temporary.glob("sbx-*")) - {runtime.data for runtime in _lasting.runtimes}


@pytest.fixture
def data_directories(own_temporary_directory: Path) -> Callable[[], set[Path]]:
    """Find the data directories of runtimes, except those of what all tests share."""
    return lambda: _data_directories(own_temporary_directory)


def _traces(temporary: Path) -> Traces:
    brokers = {runtime.broker for runtime in _lasting.runtimes}
    processes = _processes(brokers)
    surplus = []
    for runtime in _lasting.runtimes:
        surplus += runtime.surplus(_taken(processes, runtime.broker))
    for pid in _lasting.services:
        _taken(processes, pid)
    return Traces(
        processes=processes,
        surplus=surplus,
        descriptors=_descriptors(),
        may_open=sum(runtime.descriptors for runtime in _lasting.runtimes)
        + (forked_serve.running() is not None),
        mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
        cgroups=frozenset(_cgroups(brokers)),
        directories=frozenset(map(str, _data_directories(temporary))),
    )


def _processes(brokers: set[int | None]) -> dict[int, str]:
    """The children of this process, and theirs. `brokers`: of the runtimes of the whole run."""
    found = {}
    forking = forked_serve.running()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                if process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)  # an orphan that became ours
                    continue
                if process.ppid() in brokers:
                    continue  # the broker waits for a bwrap together with its zygote
            if forking is None or process.pid != forking.process.pid:
                found[process.pid] = " ".join(process.cmdline())[:200] or process.name()
    return found


def _taken(processes: dict[int, str], top: int | None) -> dict[int, str]:
    """Remove this process and its descendants from `processes`, and return them."""
    family: list[int] = []
    if top is not None:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(top).children(recursive=True)
            family = [top, *(process.pid for process in children)]
    return {pid: processes.pop(pid) for pid in family if pid in processes}


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def _cgroups(but: set[int | None]) -> Iterator[str]:
    """Groups of the runtimes that this session started, wherever a hierarchy is mounted; but not of
    the brokers with these pids."""
    ends = tuple(end for pid, end in _brokers.items() if pid not in but)
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype in ("cgroup", "cgroup2"):
            for path, _, _ in os.walk(mount.mountpoint):  # which minds no group that goes meanwhile
                name = os.path.basename(path)
                if name.startswith("sbx-") and name.endswith(ends):
                    yield path
