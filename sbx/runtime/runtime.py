"""Runtime: one broker, one data directory, and the sandboxes of one process."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec.structs import replace

from sbx import errors
from sbx.aio import check_process, in_thread, run_to_completion
from sbx.environments.interpreter import interpreter_at, own_interpreter
from sbx.imports import import_in_thread
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.process import BrokerProcess
from sbx.isolation.broker.spawned import SpawnedBroker
from sbx.isolation.launch_plan import Interpreter
from sbx.isolation.plan import decide_walls
from sbx.isolation.probe import Capabilities
from sbx.isolation.seccomp import load_filters
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.zygotes import Key, key_of
from sbx.policy import Policy, load, narrow, unchanged
from sbx.runtime.data_dir import DataDirLock
from sbx.runtime.lifetime import Lifetime
from sbx.runtime.prewarm import PrewarmedSandbox, prewarm_spec, to_prewarmed_sandbox
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.settings import Settings
from sbx.telemetry.starts import StartCounts
from sbx.workspace.allowed_paths import MountSources, OwnPaths
from sbx.workspace.layout import DataDirectory

if TYPE_CHECKING:
    from sbx.runtime.sandbox import AsyncSandbox

_PREPARED_AT_ONCE = 2 * (os.cpu_count() or 1)  # more would all be ready late, at the same time
_Sandbox = TypeVar("_Sandbox", bound="AsyncSandbox")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class Runtime:
    """Everything that sandboxes share: `async with Runtime() as runtime`.

    It starts one process, the broker, and adds no signal handler, thread or namespace to the
    program. A handle raises Broken `used_after_fork` in a forked child, and Closed after `close`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker: BrokerProcess | SpawnedBroker | None = None,
        keep_files: bool = False,
    ) -> None:
        """`broker`: a broker that was started before this program gave up its privileges, or a
        process that becomes one. `keep_files`: keep the files in the data directory, which a
        service knows."""
        self.settings = settings or Settings()
        self._keep_files = keep_files
        self._room = asyncio.Semaphore(_PREPARED_AT_ONCE)
        self._started_broker = broker
        self._pid = os.getpid()
        self._broker: BrokerClient | None = None
        self._starter: KernelFactory | None = None
        self._data: DataDirLock | None = None
        self._resources: RuntimeResources | None = None
        self._sandboxes: set[AsyncSandbox] = set()

    async def start(self) -> Self:
        """Start the broker and lock the data directory. Raise Conflict, Unavailable. If the host
        lacks a layer, `create` refuses the policies that need it."""
        settings, broker = self.settings, self._started_broker
        try:
            await run_to_completion(self._open_data())  # with its result, also if cancelled
            assert self._data is not None
            filters = load_filters(os.uname().machine)
            if isinstance(broker, BrokerProcess):
                self._broker = BrokerClient.adopt(broker)
            else:
                self._broker = await BrokerClient.start(
                    bwrap=str(settings.bwrap) if settings.bwrap else None,
                    uids=settings.uid_range,
                    groups=settings.cgroups,
                    spawned=broker,
                )
            await self._broker.look_at_disk(str(self._data.directory.path))
        except BaseException:
            await self.close()
            raise
        self._starter = KernelFactory(
            self._broker,
            most=settings.zygotes_max if settings.fast_path else 0,
            deadline_s=settings.start_timeout,
        )
        self._resources = RuntimeResources(
            broker=self._broker,
            starter=self._starter,
            data=self._data.directory,
            filters=filters,
            guest=_PACKAGE_ROOT,
            grace_s=settings.interrupt_grace,
            disk_quota=settings.disk_quota,
            protection=settings.protection,
            own_paths=self.own_paths,
            confined=self.confined,
        )
        return self

    @property
    def alive(self) -> bool:
        """Whether it was started, is not closed, and its broker answers."""
        return self._resources is not None and self._resources.broker.alive

    @property
    def failure(self) -> errors.SbxError | None:
        """The reason why it is not alive: `broker_died`, `broker_silent`, or Closed."""
        return _not_running() if self._resources is None else self._resources.broker.failure

    @property
    def capabilities(self) -> Capabilities:
        return self._started().capabilities

    @property
    def mount_sources(self) -> MountSources:
        """The directories that a client of a service may have mounted."""
        return MountSources(self.settings.mount_dirs, writable=not self.confined)

    @property
    def own_paths(self) -> OwnPaths:
        """The paths of sbx, which no sandbox may see."""
        assert self._data is not None
        own = self.settings.own_paths
        return replace(own, private=(*own.private, self._data.directory.path))

    async def create(
        self,
        policy: str | Path | Policy = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        workspace: str | Path | None = None,
        uploads: str | Path | None = None,
        ttl: float | None = None,
        idle_timeout: float | None = None,
    ) -> "AsyncSandbox":
        """Create a sandbox. Its kernel starts with the first run.

        `policy` is a name, the Path of a file, or a value. `narrower` tightens it, for instance
        `{"limits": {"memory_max": "64MiB"}}`; `env` adds environment variables. `workspace` is a
        directory of the host to be /workspace, `uploads` one to be the read-only uploads. Seconds
        after its last use, `ttl` closes it, and `idle_timeout` ends its kernels.

        As root, a `workspace` of root is mapped: the jail sees the files as its own, and new files
        belong to root.

        Raises NotFound `policy_not_found`, PolicyError, BadRequest (`limit_widened`,
        `invalid_lifetime`), CannotEnforce, Denied (`directory_forbidden`, `workspace_has_set_id`,
        `workspace_has_socket`, `workspace_owned_by_root`: also where it cannot be mapped).
        """
        resources = self._started()
        lifetime = Lifetime.of(ttl, idle_timeout)
        loaded, decided = await self.decide(policy, narrower=narrower, env=env)
        interpreter = await _interpreter_of(self.settings, decided)
        new = workspace is None and uploads is None
        prewarmed = self._take_prewarmed(loaded, decided, interpreter) if new else None
        await import_in_thread("sbx.runtime.sandbox")  # 40 ms, while the first zygote starts
        from sbx.runtime.sandbox import AsyncSandbox

        sandbox = AsyncSandbox(
            resources,
            decided,
            loaded,
            interpreter,
            workspace=Path(workspace) if workspace is not None else None,
            uploads=Path(uploads) if uploads is not None else None,
            on_close=self._sandboxes.discard,
            prewarmed=prewarmed,
            lifetime=lifetime,
        )
        if prewarmed is not None:
            self.release_directory(prewarmed)  # the sandbox removes its directory
        return await self._prepared(sandbox)

    async def decide(
        self,
        policy: str | Path | Policy,
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[Policy, Policy]:
        """Return the policy as it was loaded, and as the request narrows it. Raise as `create`, but
        not for walls that this host cannot enforce."""
        if isinstance(policy, str):
            policy = self.settings.policy_aliases.get(policy, policy)
            policy = unchanged(policy, search=self.settings.policy_dirs) or policy
        if isinstance(policy, Policy) and not policy.filesystem.mount:
            return _decide(self.settings, policy, narrower, env)  # which then reads no file
        return await asyncio.to_thread(_decide, self.settings, policy, narrower, env)

    async def find_prewarmed(self, loaded: Policy, decided: Policy) -> PrewarmedSandbox | None:
        """Return a prewarmed sandbox, which the caller passes to `open` or discards. Return None if
        none is ready; the request makes the pool prepare some."""
        self._started()
        return self._take_prewarmed(loaded, decided, await _interpreter_of(self.settings, decided))

    def _take_prewarmed(
        self, loaded: Policy, decided: Policy, interpreter: Interpreter
    ) -> PrewarmedSandbox | None:
        resources = self._started()
        spec = prewarm_spec(resources, loaded, decided, interpreter)
        decide_walls(decided, self.capabilities)
        key = _key(resources, loaded, decided, interpreter)
        return to_prewarmed_sandbox(resources.starter.take_prewarmed(key, spec), key)

    async def _prepared(self, sandbox: _Sandbox) -> _Sandbox:
        """Prepare a sandbox. It is closed with the runtime, or at once if this fails."""
        self._sandboxes.add(sandbox)
        try:
            async with self._room:
                await sandbox.prepare()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def release_directory(self, prewarmed: PrewarmedSandbox) -> None:
        """Note that a store has the directory of this sandbox now."""
        self._started().unowned_directories.discard(prewarmed.directory)

    @property
    def unowned_directories(self) -> frozenset[str]:
        """The directories of prewarmed sandboxes, which have no owner yet."""
        return frozenset(self._started().unowned_directories)

    @property
    def copies(self) -> frozenset[str]:
        """The directories of frozen copies, each among the conversations of its sandbox."""
        return frozenset(self._started().copies)

    async def open(
        self, loaded: Policy, decided: Policy, make: Callable[..., _Sandbox]
    ) -> _Sandbox:
        """Return a sandbox of a class of the caller, prepared. It is closed with the runtime.

        `make` is called with the resources, both policies, the interpreter and `on_close`. Raises
        CannotEnforce and the errors of `make`.
        """
        interpreter = await _interpreter_of(self.settings, decided)
        on_close = self._sandboxes.discard
        sandbox = make(self._started(), decided, loaded, interpreter, on_close=on_close)
        return await self._prepared(sandbox)

    @property
    def confined(self) -> bool:
        """Whether this process gave up the rights with which its broker was started."""
        return isinstance(self._started_broker, BrokerProcess)

    @property
    def as_root(self) -> bool:
        """Whether processes that this program starts outside of a sandbox run as root."""
        return os.geteuid() == 0

    @property
    def data(self) -> DataDirectory:
        return self._started().data

    async def warm(
        self, policy: str | Path | Policy = "default", *, count: int = 1, new: bool = False
    ) -> None:
        """Return when `count` kernels of the policy are ready for the next requests.

        With `new` they are locked down in empty workspaces, for new sandboxes. Otherwise they are
        for existing sandboxes and for directories of the host. They stay for at least a minute.
        Without this call the pool fills after the first kernel.

        Raise as `create`, BadRequest `limit_widened` above pool.max_idle of the policy, and
        Unavailable with the cause if this host cannot fork kernels.
        """
        resources = self._started()
        loaded, _ = await self.decide(policy)
        decide_walls(loaded, self.capabilities)
        interpreter = await _interpreter_of(self.settings, loaded)
        key = _key(resources, loaded, loaded, interpreter)
        if key is None:
            raise errors.BadRequest(
                f'policy {loaded.name} has pool.start = "cold", so its kernels are not forked',
                code="pool_unavailable",
                hint='remove start = "cold" from the policy',
            )
        spec = prewarm_spec(resources, loaded, loaded, interpreter) if new else None
        await resources.starter.warm(key, count, spec)

    @property
    def starts(self) -> StartCounts:
        """The number of kernels by the path of their start, and why no faster path was taken."""
        return self._starter.starts if self._starter is not None else StartCounts()

    @property
    def idle(self) -> int:
        """The number of kernels that are ready for the next request."""
        return self._starter.all_idle if self._starter is not None else 0

    async def close(self) -> None:
        """End every sandbox and the broker, and remove a temporary data directory."""
        if self._pid != os.getpid():
            return  # a forked copy: the sandboxes and the broker belong to the parent
        self._resources = None
        await run_to_completion(self._end())

    async def _open_data(self) -> None:
        open_data = partial(DataDirLock, self.settings.data_dir, keep=self._keep_files)
        self._data = await in_thread(open_data)

    async def _end(self) -> None:
        """End the sandboxes, the broker and the data, each even if the one before fails."""
        async with AsyncExitStack() as last:
            if self._data is not None:
                data, self._data = self._data, None
                last.push_async_callback(in_thread, data.close)
            if self._broker is not None:
                broker, self._broker = self._broker, None
                last.push_async_callback(broker.close)
            if self._starter is not None:
                last.push_async_callback(self._starter.close)
            ends = (sandbox.close() for sandbox in list(self._sandboxes))
            for end in await asyncio.gather(*ends, return_exceptions=True):
                if end is not None:
                    raise end

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _started(self) -> RuntimeResources:
        check_process(self._pid)
        if self._resources is None:
            raise _not_running()
        return self._resources


def _decide(
    settings: Settings,
    policy: str | Path | Policy,
    narrower: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
) -> tuple[Policy, Policy]:
    if not isinstance(policy, Policy):
        policy = load(policy, search=settings.policy_dirs)
    request = {**(narrower or {}), **({"env": dict(env)} if env else {})}
    decided = narrow(policy, request) if request else policy
    for number, mount in enumerate(decided.filesystem.mount):
        if not Path(mount.source).is_dir():
            raise errors.PolicyError(
                f"policy {decided.name}: filesystem.mount[{number}].source is {mount.source}, "
                "and there is no such directory on this host",
                code="mount_unavailable",
                hint="make the directory, or correct the name",
            )
    return policy, decided


async def _interpreter_of(settings: Settings, policy: Policy) -> Interpreter:
    """Raise PolicyError `interpreter_unavailable`, `environment_unavailable`."""
    if policy.interpreter is None:
        return own_interpreter()
    if (name := policy.environment) is not None:
        from sbx.environments.directory import Environments  # most policies name no environment

        environments = Environments(settings.environments)
        return await in_thread(environments.interpreter, name, policy.name)
    return await interpreter_at(policy.interpreter)


def _key(
    resources: RuntimeResources, loaded: Policy, decided: Policy, interpreter: Interpreter
) -> Key | None:
    """Return the key of the zygote from which kernels of any workspace of sbx may be forked.
    `decide_walls` has accepted the policy."""
    capabilities = resources.broker.capabilities
    assert capabilities is not None
    paths = resources.paths_of_any(interpreter, decided)
    return key_of(loaded, decided, capabilities, paths, resources.filters)


def _not_running() -> errors.Closed:
    return errors.Closed(
        "the runtime is not running", hint="use it within `async with Runtime() as runtime`"
    )
