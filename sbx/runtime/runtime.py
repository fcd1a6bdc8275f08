"""Runtime: one broker, one data directory, and the sandboxes of one process."""

import asyncio
import os
import platform
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sbx import errors
from sbx.isolation.filters import load_filter
from sbx.isolation.forked import check_process
from sbx.isolation.launch import Broker
from sbx.isolation.patience import in_thread, to_the_end
from sbx.isolation.plan import Filters
from sbx.isolation.probe import Capabilities
from sbx.policy import Policy, load, narrow, unsupported
from sbx.runtime.data import Data
from sbx.runtime.interpreter import interpreter_at, own_interpreter
from sbx.runtime.sandbox import AsyncSandbox, Means
from sbx.runtime.settings import Settings

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class Runtime:
    """Everything that sandboxes share: `async with Runtime() as runtime`.

    It starts one process, the broker, and adds nothing else to the program: no signal handler, no
    thread, no namespace. A handle used in a forked child of the program raises Broken
    `used_after_fork`; one used after `close` raises Closed.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._pid = os.getpid()
        self._broker: Broker | None = None
        self._data: Data | None = None
        self._means: Means | None = None
        self._sandboxes: set[AsyncSandbox] = set()

    async def start(self) -> Self:
        """Start the broker and take the data directory. Raises Conflict, Unavailable.

        A host that lacks a layer is no error here: what a policy demands is refused by `create`.
        """
        settings = self.settings
        try:
            await to_the_end(self._open_data())
            assert self._data is not None
            machine = platform.machine()
            filters = Filters(load_filter("default", machine), load_filter("strict", machine))
            self._broker = await Broker.start(
                bwrap=str(settings.bwrap) if settings.bwrap else None,
                uids=settings.uid_range,
                groups=settings.cgroups,
            )
        except BaseException:
            await self.close()
            raise
        self._means = Means(
            broker=self._broker,
            data=self._data.directory,
            filters=filters,
            guest=_PACKAGE_ROOT,
            start_timeout_s=settings.start_timeout,
            grace_s=settings.interrupt_grace,
        )
        return self

    @property
    def alive(self) -> bool:
        """Whether it can run anything: started, not closed, and its broker has not died."""
        return self._means is not None and self._means.broker.alive

    @property
    def capabilities(self) -> Capabilities:
        """What this host can do, layer by layer."""
        assert self._broker is not None
        assert self._broker.capabilities is not None
        return self._broker.capabilities

    async def create(
        self,
        policy: str | Path | Policy = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        workspace: str | Path | None = None,
        uploads: str | Path | None = None,
    ) -> AsyncSandbox:
        """A new sandbox; its kernel starts with the first run.

        `policy` is a name, the Path of a file, or a value. `narrower` tightens it, for instance
        `{"limits": {"memory_max": "64MiB"}}`; `env` adds environment variables. `workspace` is a
        directory of the host to be /workspace, `uploads` one to be the read-only uploads.

        Raises NotFound `policy_not_found`, PolicyError, BadRequest `limit_widened`, CannotEnforce,
        Denied `workspace_owned_by_root`.
        """
        means = self._started()
        decided = await asyncio.to_thread(self._decide, policy, narrower, env)
        interpreter = (
            own_interpreter()
            if decided.interpreter is None
            else await interpreter_at(decided.interpreter)
        )
        box = AsyncSandbox(
            means,
            decided,
            interpreter,
            workspace=Path(workspace) if workspace is not None else None,
            uploads=Path(uploads) if uploads is not None else None,
            on_close=self._sandboxes.discard,
        )
        self._sandboxes.add(box)
        try:
            await box.prepare()
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        """End every sandbox and the broker, and remove a temporary data directory."""
        if self._pid != os.getpid():
            return  # a forked copy: what is here belongs to the parent
        self._means = None
        await to_the_end(self._end())

    async def _open_data(self) -> None:
        self._data = await in_thread(Data, self.settings.data_dir)

    async def _end(self) -> None:
        """Sandboxes, broker, data: each is ended whatever became of the one before."""
        async with AsyncExitStack() as last:
            if self._data is not None:
                data, self._data = self._data, None
                last.push_async_callback(in_thread, data.close)
            if self._broker is not None:
                broker, self._broker = self._broker, None
                last.push_async_callback(broker.close)
            ends = (box.close() for box in list(self._sandboxes))
            for end in await asyncio.gather(*ends, return_exceptions=True):
                if end is not None:
                    raise end

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _started(self) -> Means:
        check_process(self._pid)
        if self._means is None:
            raise errors.Closed(
                "the runtime is not running",
                hint="use it within `async with Runtime() as runtime`",
            )
        return self._means

    def _decide(
        self,
        policy: str | Path | Policy,
        narrower: Mapping[str, Any] | None,
        env: Mapping[str, str] | None,
    ) -> Policy:
        if not isinstance(policy, Policy):
            policy = load(policy, search=self.settings.policy_dirs)
        request = {**(narrower or {}), **({"env": dict(env)} if env else {})}
        if request:
            policy = narrow(policy, request)
        if (refusal := unsupported(policy)) is not None:
            raise refusal
        for number, mount in enumerate(policy.filesystem.mount):
            if not Path(mount.source).is_dir():
                raise errors.PolicyError(
                    f"policy {policy.name}: filesystem.mount[{number}].source is {mount.source}, "
                    "and there is no such directory on this host",
                    code="mount_unavailable",
                    hint="make the directory, or name the one that is meant",
                )
        return policy
