"""The copy of a project on which the tools of one conversation act.

    begin       make the copy equal to the project: all other writes to it are dropped
    act         a cell in the kernel over the copy, a command or script in a separate jail
    compare     take the changes out of the copy; none of them is in the project yet
    commit      make exactly these changes in the project, all or none
    rollback    drop them

The kernel lives as long as the conversation, so variables stay, whether or not the changes are
committed. A thread of an earlier cell can write to the copy at any time. `begin` drops its writes
between two calls, so that no permission of the next call covers them. Commands have no network:
traffic cannot be reverted. One transaction has the copy at a time; `WorkingCopies` has spare ones
for commands.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from msgspec.structs import replace

from sbx import errors
from sbx.aio import run_to_completion
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.runs import Run, RunError
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason, StartKernel
from sbx.runtime.snapshots.changes import Changes, ChangeSet, effect_of, protected
from sbx.runtime.snapshots.dry_run import dry_run_name, offline
from sbx.runtime.snapshots.snapshots import Snapshot, Snapshots
from sbx.workspace.quarantine import Quarantine
from sbx.workspace.snapshots.copy import take
from sbx.workspace.snapshots.mirror import Mirror
from sbx.workspace.snapshots.scan import Bounds

_log = logging.getLogger(__name__)
_TRIES = 3  # to restore a copy that live code writes to
_RETRY_S = 300.0  # until a project that could not be copied is tried again
_OVER = ClosedReason("the command", "its jail is gone")
_RENEWED = RunError("KernelStopped", "the copy of the project that it ran on was replaced", "")
# git would write to its index for `git status` or `git diff` alone, which would then be a change to
# ask about: on a copy every file looks touched.
COMMAND_ENV = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "diff.autoRefreshIndex",
    "GIT_CONFIG_VALUE_0": "false",
}


class WorkingCopy:
    """See the module. `python` is the kernel over the copy: both are made at the first use."""

    def __init__(
        self,
        conversation: str,
        policy: Policy,
        python_policy: Policy,
        opened: Callable[[], Awaitable[OpenFiles]],
        copies: Snapshots,
        start: StartKernel,
        grace_s: float,
        *,
        python: str,
        had_kernel: bool,
        grants: Grants,
        is_spare: bool = False,
    ) -> None:
        """`policy` is that of commands, `python_policy` that of cells; `python` is the name of
        their context. A spare copy closes after its first transaction."""
        self._grants = grants
        self._is_spare = is_spare
        self._conversation = conversation
        self._policy = offline(policy)
        self._opened = opened
        self._copies = copies
        self._start = start
        self._grace_s = grace_s
        self._lock = asyncio.Lock()
        self._making = asyncio.Lock()
        self._held = AsyncExitStack()
        self._copy: Snapshot | None = None
        self._files: OpenFiles | None = None
        self._mirror: Mirror | None = None
        self._items: frozenset[str] = frozenset()  # of the quarantine, by calls that were committed
        self._refusal: tuple[errors.SbxError, float] | None = None
        self._jails: set[Context] = set()
        self._closed = False
        self.python = Context(
            python,
            conversation,
            python_policy,
            self.files,
            start,
            grace_s,
            disk=DiskLimit(python_policy.limits),
            state_is_kept=had_kernel,
            grants=grants,
        )

    @property
    def contexts(self) -> list[Context]:
        return [self.python, *self._jails]

    @property
    def lent(self) -> bool:
        return self._lock.locked()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        return self.lent or any(context.busy for context in self.contexts)

    async def files(self) -> OpenFiles:
        """Return the files of the copy, and make the copy if there is none.

        Raise TooLarge `workspace_too_large`, Unavailable `no_space` and `too_many_searches`; the
        next try comes some minutes later.
        """
        async with self._making:
            if self._closed:
                raise errors.Closed("the conversation is closed")
            if self._files is None:
                await self._make()
            assert self._files is not None
            return self._files

    async def begin(self) -> "Transaction":
        """Update the copy, and lend it to the caller until the transaction ends.

        Raise as `files`. If the copy cannot be updated, replace it; then the variables of its
        kernel are lost.
        """
        await self._lock.acquire()
        try:
            new = self._files is None
            files = await self.files()
            opened = await self._opened()
            if not new:
                try:
                    await self.drop_items()
                    await self._update(opened)
                except errors.TooLarge:
                    await self.drop()
                    raise
                except errors.Closed:
                    raise
                except errors.SbxError as error:
                    _log.warning("the copy of a project is replaced: %s", error)
                    await self.drop()
                    files = await self.files()
            return Transaction(self, opened, files)
        except BaseException:
            self._lock.release()
            raise

    async def drop(self) -> None:
        """End the kernel and remove the copy; the next use makes new ones."""
        if self.python.state_is_kept:
            self.python.mark_state_lost()
        await self.python.halt(_RENEWED)
        async with self._making:
            await run_to_completion(self._held.aclose())

    async def close(self) -> None:
        """End all runs on the copy, and remove it finally."""
        self._closed = True
        for context in self.contexts:
            await context.close()
        async with self._making:
            await run_to_completion(self._held.aclose())

    def jail(self) -> Context:
        """Return a new jail over the copy, without network, for one command or script."""
        assert self._files is not None
        context = Context(
            dry_run_name(secrets.token_hex(8)),
            self._conversation,
            self._policy,
            self.files,
            self._start,
            self._grace_s,
            disk=DiskLimit(self._policy.limits),
            grants=self._grants,
        )
        self._jails.add(context)
        return context

    async def leave(self, jail: Context) -> None:
        """End a jail: no process of it writes to the copy from then on."""
        try:
            await run_to_completion(jail.close(_OVER))
        finally:
            self._jails.discard(jail)

    async def taken(self, opened: OpenFiles, stage: str) -> Changes:
        """Return the changes in the copy, and move the new content to the tree `stage`."""
        copy, mirror = self._copy, self._mirror
        assert copy is not None
        assert mirror is not None

        def act(bounds: Bounds) -> Changes:
            original, _ = self._copies.original(opened)
            with self._copies.tree(copy.name) as tree, self._copies.tree(stage) as staged:
                changed, left_out = mirror.compare(original, tree, bounds)
                changed = [change for change in changed if not protected(opened, change)]
                changed = take(changed, tree, staged, mirror.scope, bounds)
                return effect_of(changed, left_out, original, staged)

        return await self._copies.work(opened, act)

    async def commit(self, opened: OpenFiles, stage: str, effect: Changes) -> None:
        """Make these changes in the project. Raises as `Snapshots.commit`."""
        copy, mirror = self._copy, self._mirror
        assert copy is not None
        assert mirror is not None
        await self._copies.commit(opened, replace(copy, name=stage), effect, mirror.base)
        await run_to_completion(
            opened.call(lambda: mirror.accept(effect.changed, self._copies.original(opened)[0]))
        )

    async def keep_items(self) -> None:
        """Keep the present items of the quarantine: their call was committed."""
        if (quarantine := self._quarantine()) is not None:
            self._items = await asyncio.to_thread(quarantine.names)

    async def drop_items(self) -> None:
        """Drop the later items of the quarantine: their changes were dropped."""
        if (quarantine := self._quarantine()) is None:
            return
        try:
            await run_to_completion(asyncio.to_thread(quarantine.drop_others, self._items))
        except OSError as error:
            _log.warning("items of the quarantine are left over: %s", error)

    def _quarantine(self) -> Quarantine | None:
        return None if self._files is None else self._files.quarantine

    async def end(self, stage: str | None) -> None:
        try:
            await self.drop_items()
            if stage is not None:
                await self._copies.remove(stage)
        finally:
            self._lock.release()
            if self._is_spare:
                await self.close()

    async def stage(self, opened: OpenFiles) -> str:
        return await self._copies.empty(opened)

    async def _make(self) -> None:
        if self._refusal is not None and time.monotonic() < self._refusal[1]:
            raise self._refusal[0]
        async with AsyncExitStack() as stack:
            opened = await self._opened()
            stack.enter_context(opened.in_use())
            try:
                copy = await self._copies.make(opened)
            except (errors.TooLarge, errors.Unavailable) as error:
                self._refusal = error, time.monotonic() + _RETRY_S
                raise
            stack.push_async_callback(self._copies.remove, copy.name)
            stack.callback(self._forget)
            files = await stack.enter_async_context(self._copies.shown(opened, copy))
            stack.push_async_callback(self.drop_items)
            self._items = frozenset()
            self._mirror = Mirror(copy.base, copy.frozen, copy.scope)
            self._copy, self._files = copy, files
            self._refusal = None
            self._held = stack.pop_all()

    def _forget(self) -> None:
        self._copy = self._files = self._mirror = None

    async def _update(self, opened: OpenFiles) -> None:
        copy, mirror = self._copy, self._mirror
        assert copy is not None
        assert mirror is not None

        def act(bounds: Bounds) -> None:
            with self._copies.tree(copy.name) as tree:
                original, _ = self._copies.original(opened)
                mirror.restore(original, tree, self._copies.journal(opened, tree), bounds)

        for tries_left in reversed(range(_TRIES)):
            try:
                await self._copies.work(opened, act)
                return
            except errors.Conflict as error:  # live code writes to the copy at the same time
                if error.code != "workspace_changed" or not tries_left:
                    raise


class Transaction:
    """The changes of one tool call, from `WorkingCopy.begin` to `commit` or `rollback`."""

    def __init__(self, of: WorkingCopy, opened: OpenFiles, files: OpenFiles) -> None:
        self.files = files
        self.python = of.python
        self._of = of
        self._opened = opened
        self._jail: Context | None = None
        self._runs: list[ActiveRun] = []
        self._stage: str | None = None
        self._effect: Changes | None = None
        self._ended = False

    @property
    def jail(self) -> Context:
        if self._jail is None:
            self._jail = self._of.jail()
        return self._jail

    def follow(self, live: ActiveRun) -> ActiveRun:
        """Note a run of this call, whose result belongs to its changes."""
        self._runs.append(live)
        return live

    async def give_up(self, live: ActiveRun) -> None:
        for context in (self.python, self._jail):
            if context is not None:
                await context.give_up(live)

    async def compare(self) -> ChangeSet:
        """Wait for the end of all runs of the call, interrupt cells that still run, and return the
        changes. Raise as `Snapshots.effect`."""
        await self._over()
        self._stage = await self._of.stage(self._opened)
        self._effect = await self._of.taken(self._opened, self._stage)
        return ChangeSet(self._effect, await self._last_run())

    async def commit(self) -> None:
        """Make exactly the changes that `compare` gave. Raises Conflict `workspace_changed`, Denied
        `file_not_permitted` and `runs_on_the_host`, Unavailable; nothing was changed then."""
        assert self._effect is not None
        assert self._stage is not None
        try:
            if self._effect.changed:
                await run_to_completion(self._of.commit(self._opened, self._stage, self._effect))
            await run_to_completion(self._of.keep_items())
        finally:
            await self.rollback()

    async def rollback(self) -> None:
        """Drop the changes that were not committed. A second call does nothing."""
        if not self._ended:
            self._ended = True
            await run_to_completion(self._end())

    async def _end(self) -> None:
        try:
            if self._effect is None:  # the call was given up
                await self._over()
        finally:
            await self._of.end(self._stage)

    async def _over(self) -> None:
        for live in self._runs:
            await self.give_up(live)
            with suppress(errors.SbxError):
                await live.result()
        if self._jail is not None:
            await self._of.leave(self._jail)

    async def _last_run(self) -> Run | None:
        with suppress(errors.SbxError):
            return await self._runs[-1].result() if self._runs else None
        return None
