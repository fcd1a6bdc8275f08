"""A service: all parts of one `sbx serve` process, over one data directory.

{data}/store.sqlite        all records
{data}/store_mark.json     the identity of the store (store/marks.py)
{data}/audit.jsonl         the audit log
{data}/audit_key           the key that signs it
{data}/token_secret        the key that signs tokens
{data}/reserve             space for records on a full disk
{data}/tools/              sources of tools that the operator added over HTTP
{data}/sandboxes/ removed/ files (workspace/layout.py)
"""

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Self

from platformdirs import user_data_path

from sbx.aio import Clock, LoopMonitor, in_thread, run_to_completion
from sbx.errors import SbxError
from sbx.isolation.broker.process import BrokerProcess
from sbx.linux.namespaces import unmapped_uid
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service.agent_profiles import AgentProfiles
from sbx.service.auth import Authenticator
from sbx.service.console import ConsoleLogins
from sbx.service.deletion import Deletions
from sbx.service.events import SandboxEvents
from sbx.service.garbage import GarbageCollector
from sbx.service.idempotency import IdempotencyCache
from sbx.service.links import Links
from sbx.service.notices import Notices
from sbx.service.projects.link import ProjectProcess, ProjectServerLink
from sbx.service.projects.projects import Projects
from sbx.service.prompt_templates import PromptTemplates
from sbx.service.reaper import Reaper
from sbx.service.recording import Recording
from sbx.service.reserve import Reserve
from sbx.service.runs import Runs
from sbx.service.sandboxes import Sandboxes
from sbx.service.uploads import UserUploads
from sbx.service.workspaces import Workspaces
from sbx.store import Store, agent_runs, runs, tasks
from sbx.store import sandboxes as rows
from sbx.store.pending import PendingWrites
from sbx.telemetry import metrics
from sbx.telemetry.audit import Audit
from sbx.telemetry.audit_rotation import Rotation
from sbx.telemetry.host_paths import hide_below
from sbx.workspace.layout import DataDirectory
from sbx.workspace.secret_files import secret_at

_TIDY_S = 5.0
_LOGGED_EVERY_S = 10.0  # a stall of the event loop
_log = logging.getLogger(__name__)


class Service:
    """`async with Service(settings) as service`. Its parts exist until it is closed.

    Raise the errors of its parts when they open: Conflict `data_dir_in_use`, Unavailable
    `store_corrupt`, `store_newer`, `store_missing`, `store_older`, `store_of_another`, `no_space`
    and the errors of a broker. The opened parts are closed again then.
    """

    runtime: Runtime
    store: Store
    garbage: GarbageCollector
    workspaces: Workspaces
    sandboxes: Sandboxes
    events: SandboxEvents
    runs: Runs
    uploads: UserUploads
    access: Authenticator
    links: Links
    console: ConsoleLogins
    notices: Notices
    templates: PromptTemplates
    agent_profiles: AgentProfiles
    projects: Projects
    deletions: Deletions
    replies: IdempotencyCache
    audit: Audit
    pending: PendingWrites
    recording: Recording
    reaper: Reaper

    def __init__(
        self,
        settings: Settings | None = None,
        clock: Clock | None = None,
        broker: BrokerProcess | None = None,
        project_server: ProjectProcess | None = None,
    ) -> None:
        """Without a `data_dir` the settings mean the user's own for sbx. `broker`: see Runtime.
        `project_server`: the process that has the directories of projects, where it is another."""
        settings = settings or Settings()
        data_dir = settings.data_dir or user_data_path("sbx")
        self.settings = settings.model_copy(update={"data_dir": data_dir})
        hide_below(data_dir)
        self.clock: Clock = clock or Clock()
        self.instance_id = f"sbx-{secrets.token_hex(4)}"
        self.started_at = self.clock.now()
        self._broker = broker
        self._project_process = project_server
        self._project_server: ProjectServerLink | None = None
        self._held = AsyncExitStack()

    @property
    def failure(self) -> SbxError | None:
        """Return the error of a process that has ended or answers nothing, which this service
        cannot start again; None while it has all its processes."""
        server = self._project_server
        return self.runtime.failure or (server.failure if server is not None else None)

    @property
    def data_dir(self) -> Path:
        assert self.settings.data_dir is not None
        return self.settings.data_dir

    async def start(self) -> Self:
        """Open everything, and repair the remains of an earlier process. Nothing runs before."""
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._held = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        settings, clock, data = self.settings, self.clock, self.data_dir
        self.runtime = Runtime(settings, broker=self._broker, keep_files=True)
        await stack.enter_async_context(self.runtime)  # its lock protects the data
        stack.callback(LoopMonitor(metrics.loop_lagged, _log_stall()).close)
        reserve = await asyncio.to_thread(Reserve, data / "reserve")
        stack.callback(reserve.close)
        self.store = await Store.open_in(data, on_full=reserve.give_up)
        stack.push_async_callback(self.store.close)
        self.pending = PendingWrites(self.store)
        stack.push_async_callback(self.pending.close)
        key = await asyncio.to_thread(secret_at, data / "audit_key")
        self.audit = await Audit.open(
            data / "audit.jsonl",
            clock=clock.now,
            key=key,
            on_full=reserve.give_up,
            rotation=Rotation(settings.audit_size_max, settings.audit_rotation),
        )
        stack.push_async_callback(self.audit.close)
        self.recording = Recording(reserve, self.audit, self.pending)
        await recover(self.store, clock, self.runtime)
        self.access = Authenticator(
            self.store,
            clock,
            data / "token_secret",
            os.geteuid(),
            self.pending,
            shared_uid=await asyncio.to_thread(unmapped_uid),
        )
        self.links = Links(self.access, clock)
        self.console = ConsoleLogins(self.store, self.access, clock)
        self.replies = IdempotencyCache(self.store, clock)
        self.garbage = GarbageCollector(self.store, clock, self.runtime, settings)
        self.workspaces = Workspaces(
            self.store,
            clock,
            self.runtime,
            self.garbage,
            settings.workspaces_per_owner,
            self.recording,
        )
        self.templates = PromptTemplates(self.store, clock)
        self.agent_profiles = AgentProfiles(self.store, clock, self.runtime.settings.agents_dir)
        self.notices = Notices()
        self.sandboxes = Sandboxes(
            self.store,
            clock,
            self.runtime,
            settings,
            self.garbage,
            self.workspaces,
            self.audit,
            self.recording,
            self.notices,
        )
        self.events = SandboxEvents(self.store, self.sandboxes.index)
        await self.sandboxes.load()
        await self.garbage.collect(briefly=True)
        self.runs = Runs(
            self.store,
            clock,
            self.sandboxes,
            queue_max=settings.queue_max,
            history_max=settings.history_max,
            pending=self.pending,
        )
        stack.push_async_callback(self.runs.close)
        stack.push_async_callback(self.sandboxes.close)
        self.uploads = UserUploads(self.store, self.sandboxes, self.recording, self.notices)
        if self._project_process is not None:
            link = ProjectServerLink(self._project_process)
            self._project_server = await stack.enter_async_context(link)
        self.projects = Projects(
            self.store, clock, self.runtime, settings, self._project_server, self.audit
        )
        stack.push_async_callback(self.projects.close)
        self.deletions = Deletions(
            self.store, self.sandboxes, self.projects, self.garbage, self.access
        )
        await self.deletions.finish()
        self.reaper = Reaper(
            self.sandboxes, clock, settings, self.garbage, self.projects, reserve=reserve
        )
        reaping = asyncio.create_task(self.reaper.run())
        stack.push_async_callback(_cancelled, reaping)
        metrics.watch(
            kernels=self._kernels,
            sandboxes=lambda: Counter(
                (each.state.value, each.policy_name) for each in self.sandboxes.every()
            ),
            idle=lambda: float(self.runtime.idle),
            starts=lambda: self.runtime.starts,
            reserve=lambda: float(reserve.allocated),
            unrecorded=lambda: float(self.pending.count + self.audit.waiting),
        )

    def _kernels(self) -> Counter[tuple[str, ...]]:
        """Return the number of live kernels by policy."""
        kernels: Counter[tuple[str, ...]] = Counter()
        for sandbox in self.sandboxes.every():
            kernels[sandbox.policy_name,] += sandbox.kernels
        return kernels

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await this before any part of the service is closed, the last one first."""
        self._held.push_async_callback(close)

    async def close(self) -> None:
        """End all runs, which are recorded as interrupted, and close everything. The files stay."""
        stack, self._held = self._held, AsyncExitStack()
        await run_to_completion(stack.aclose())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _log_stall() -> Callable[[float, str], None]:
    """Return a function that logs a stall of the event loop, unless it logged one just before."""
    next_at = 0.0

    def log(seconds: float, stack: str) -> None:
        nonlocal next_at
        if (now := time.monotonic()) >= next_at:
            next_at = now + _LOGGED_EVERY_S
            _log.warning(
                "the event loop has not run for %d ms, and is at:\n%s", seconds * 1e3, stack
            )

    return log


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def recover(store: Store, clock: Clock, runtime: Runtime) -> None:
    """Mark interrupted runs, clear the kernels of all rows, remove partial files, and revert
    interrupted commits.

    `GarbageCollector.collect` removes files that the store does not name, and finishes deletions.
    """
    interrupted = await runs.mark_interrupted(store, clock.now())
    agents = await agent_runs.mark_interrupted(store, clock.now())
    await tasks.mark_interrupted(store, clock.now())
    await store.write(rows.reset)
    if interrupted or agents:
        _log.warning(
            "%d runs, and %d of agents, were cut off by the end of an earlier service",
            interrupted,
            agents,
        )
    await in_thread(_tidy, runtime.data)


def _tidy(data: DataDirectory) -> None:
    for sandbox in data.sandboxes():
        for conversation in data.conversations(sandbox):
            try:
                data.tidy(sandbox, conversation, deadline_s=_TIDY_S)
            except (SbxError, OSError) as error:
                _log.warning("unfinished writes could not be repaired: %s", error)
