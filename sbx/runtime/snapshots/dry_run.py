"""A command that runs on a frozen copy of the files, without network: the user sees its effect
first.

    copy      the files as they are, by shared blocks where the file system supports that
    run       in a separate jail by the same policy, which sees no live directory with a socket or
              FIFO in it: /workspace/shared is a frozen copy, and a mount is visible only if it is
              read-only and has only files
    compare   the changes of the command, with a digest of each new content; none is real yet
    commit    the same changes, all or none, if no other writer changed the same files, and if every
              content still has the recorded digest

Nothing runs twice. A dry run ends with its commit or discard, after ten minutes, and with its
conversation.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbx import errors
from sbx.aio import outcome, run_to_completion
from sbx.policy import Policy
from sbx.protocol.dry_runs import CHANGES_MAX, DRY_RUNS_MAX, LIFETIME_S, FileChange
from sbx.protocol.runs import Run
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.run import checks
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason, StartKernel
from sbx.runtime.snapshots.changes import Changes
from sbx.runtime.snapshots.snapshots import Snapshot, Snapshots
from sbx.telemetry.background import background_context
from sbx.workspace.quarantine import drop_all

_log = logging.getLogger(__name__)
_PREFIX = "dry_run/"  # no context of a caller's has such a name
_OVER = ClosedReason("the dry run", "its copy of the files is gone")


def is_dry_run(context: str) -> bool:
    return context.startswith(_PREFIX)


def dry_run_name(suffix: str) -> str:
    return f"{_PREFIX}{suffix}"


def offline(policy: Policy) -> Policy:
    """Return the policy of the jail of a dry run: network traffic cannot be reverted."""
    return policy.model_copy(update={"network": policy.network.model_copy(update={"mode": "none"})})


@dataclass(slots=True, eq=False)
class DryRun:
    """The effect of a command on a copy, and its changes. `truncated`: there are more changes than
    listed, and a commit makes those too. `left_out`: paths that the copy lacks, or that are not
    committed: FIFOs, sockets and the like, unreadable files, and mounts that the dry run did not
    see. `expires_at` in seconds of the epoch."""

    id: str
    run: Run
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    expires_at: float
    _of: "DryRuns" = field(repr=False)
    _copy: Snapshot = field(repr=False)
    _effect: Changes = field(repr=False)
    _quarantine: Path | None = field(repr=False)

    async def commit(self) -> None:
        """Make the same changes, all or none. A cancelled call still completes.

        Raise Conflict `workspace_changed` if the affected files have changed, Denied
        `file_not_permitted` and `runs_on_the_host`: then the dry run ends, and nothing was changed.
        Raise Unavailable `no_space`, which keeps it for another try; NotFound if it does not exist.
        """
        await self._of.commit(self)

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        await self._of.discard(self)


class DryRuns:
    """The dry runs of one conversation. Call the methods from one event loop; calls may be
    concurrent."""

    def __init__(
        self,
        conversation: str,
        policy: Policy,
        opened: Callable[[], Awaitable[OpenFiles]],
        copies: Snapshots,
        start: StartKernel,
        grace_s: float,
        *,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        self._conversation = conversation
        self._policy = offline(policy)
        self._opened = opened
        self._copies = copies
        self._start = start
        self._grace_s = grace_s
        self._lifetime_s = lifetime_s
        self._there: dict[str, tuple[DryRun, asyncio.TimerHandle]] = {}
        self._making: set[asyncio.Task[DryRun]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._committing = asyncio.Lock()
        self._closed = False
        self.contexts: set[Context] = set()

    @property
    def busy(self) -> bool:
        return bool(self._making) or self._committing.locked()

    async def create(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> DryRun:
        """Run a shell command on a copy. Cancelled, or failed, it leaves nothing.

        Raises as `Conversation.start_shell`, Conflict `too_many_dry_runs`, TooLarge
        `workspace_too_large`, Unavailable `no_space`.
        """
        checks.require_capability(self._policy, "shell")
        checks.require_processes(self._policy)
        checks.check_command(command)
        checks.timeout_s(self._policy, timeout)
        checks.directory(cwd)
        self._check_open()
        if len(self._there) + len(self._making) >= DRY_RUNS_MAX:
            raise errors.Conflict(
                f"a conversation has at most {DRY_RUNS_MAX} dry runs",
                code="too_many_dry_runs",
                hint="commit or discard one",
                details={"limit": DRY_RUNS_MAX},
            )
        task = asyncio.create_task(self._create(command, timeout, cwd))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        if (dry_run := await outcome(task, self.discard)) is None:
            raise _closed()
        return dry_run

    def get(self, dry_run_id: str) -> DryRun:
        """Return the dry run of this id. Raise NotFound `dry_run_not_found`, Closed."""
        self._check_open()
        entry = self._there.get(dry_run_id)
        if entry is None:
            raise _not_found(dry_run_id)
        return entry[0]

    async def commit(self, dry_run: DryRun) -> None:
        """See `DryRun.commit`."""
        async with self._committing:
            self._check_open()
            if not self._forget(dry_run):
                raise _not_found(dry_run.id)
            await run_to_completion(self._commit(dry_run))

    async def discard(self, dry_run: DryRun) -> None:
        """See `DryRun.discard`."""
        if self._forget(dry_run):
            await run_to_completion(self._remove(dry_run._copy, dry_run._quarantine))

    async def close(self) -> None:
        """Discard all of them finally, and cancel those in progress."""
        self._closed = True
        for task in self._making:
            task.cancel()
        if self._making:
            await asyncio.wait(list(self._making))
        async with self._committing:
            for dry_run, _ in list(self._there.values()):
                await self.discard(dry_run)
        if self._leaving:
            await asyncio.wait(list(self._leaving))

    async def _create(self, command: str, timeout: float | None, cwd: str | None) -> DryRun:
        opened = await self._opened()
        with opened.in_use():
            copy = await self._copies.make(opened)
            quarantine: Path | None = None
            try:
                name = f"dry-run-{secrets.token_hex(8)}"
                run, unseen, quarantine = await self._run(name, opened, copy, command, timeout, cwd)
                effect = await self._copies.effect(opened, copy)
            except BaseException:
                await run_to_completion(self._remove(copy, quarantine))
                raise
        left_out = (*effect.left_out, *unseen)
        dry_run = DryRun(
            name,
            run,
            effect.summary,
            effect.truncated or len(left_out) > CHANGES_MAX,
            left_out[:CHANGES_MAX],
            time.time() + self._lifetime_s,
            self,
            copy,
            effect,
            quarantine,
        )
        self._keep(dry_run)
        return dry_run

    async def _run(
        self,
        name: str,
        opened: OpenFiles,
        copy: Snapshot,
        command: str,
        timeout: float | None,
        cwd: str | None,
    ) -> tuple[Run, Sequence[str], Path | None]:
        """Run the command in a jail that has ended at the return. Return the result, the paths that
        the jail did not see, and its quarantine.

        A process elsewhere may still have a descriptor of a file of the copy, so the contents are
        digested next, and compared at the commit.
        """
        quarantine: Path | None = None
        try:
            async with self._copies.shown(opened, copy) as files:
                quarantine = None if files.quarantine is None else files.quarantine.top
                run = await self._run_in(name, files, command, timeout, cwd)
                return run, tuple(files.left_out), quarantine
        except BaseException:
            await run_to_completion(_drop(quarantine))
            raise

    async def _run_in(
        self, name: str, files: OpenFiles, command: str, timeout: float | None, cwd: str | None
    ) -> Run:
        async def shown() -> OpenFiles:
            return files

        context = Context(
            f"{_PREFIX}{name}",
            self._conversation,
            self._policy,
            shown,
            self._start,
            self._grace_s,
            disk=DiskLimit(self._policy.limits),
        )
        self.contexts.add(context)
        try:
            return await context.shell(command, timeout=timeout, cwd=cwd)
        finally:
            try:
                await run_to_completion(context.close(_OVER))
            finally:
                self.contexts.discard(context)

    async def _commit(self, dry_run: DryRun) -> None:
        try:
            opened = await self._opened()
            with opened.in_use():
                base = dry_run._copy.base.nodes
                await self._copies.commit(opened, dry_run._copy, dry_run._effect, base)
        except errors.Unavailable:
            self._keep(dry_run)
            raise
        except BaseException:
            await self._remove(dry_run._copy, dry_run._quarantine)
            raise
        await self._copies.remove(dry_run._copy.name)

    async def _remove(self, copy: Snapshot, quarantine: Path | None) -> None:
        """Remove a copy whose changes are dropped, with its quarantine."""
        await self._copies.remove(copy.name)
        await _drop(quarantine)

    def _keep(self, dry_run: DryRun) -> None:
        left_s = max(0.0, dry_run.expires_at - time.time())
        timer = asyncio.get_running_loop().call_later(left_s, self._expire, dry_run)
        self._there[dry_run.id] = dry_run, timer

    def _forget(self, dry_run: DryRun) -> bool:
        """Whether it was there; it is the caller's to remove then."""
        entry = self._there.pop(dry_run.id, None)
        if entry is not None:
            entry[1].cancel()
        return entry is not None

    def _expire(self, dry_run: DryRun) -> None:
        task = asyncio.create_task(self._leave(dry_run), context=background_context())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, dry_run: DryRun) -> None:
        try:
            await self.discard(dry_run)
        except (errors.SbxError, OSError) as error:
            _log.warning("the copy of a dry run is left over: %s", error)

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


async def _drop(quarantine: Path | None) -> None:
    if quarantine is not None:
        try:
            await asyncio.to_thread(drop_all, quarantine)
        except (errors.SbxError, OSError) as error:
            _log.warning("the quarantine of a dry run is left over: %s", error)


def _closed() -> errors.Closed:
    return errors.Closed(
        "the conversation is closed, and its dry runs are gone",
        hint="dry-run the command again",
    )


def _not_found(dry_run_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"dry run {dry_run_id[:80]!r} does not exist: it was committed, discarded, or has expired",
        code="dry_run_not_found",
        hint="dry-run the command again",
    )
