"""The kernel of one context: at most one at a time, over the files of the conversation.

The kernel starts when it is first needed. It ends with the conversation, with the limit that it
crossed, or with a deadline that it ignored. The next use then starts another kernel and reports
`state_lost`.

In a directory of the host, the path guard protects the names of its table at any time. The targets
of existing names (symlinks, and directories that git's configuration names) are found by a walk,
before a start and every few seconds while code runs. inotify does not help: Linux allows few
watches per user, and a tree may have thousands of directories.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, replace

from msgspec import Struct

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.isolation.receipt import Receipt
from sbx.kernels.kernel import Kernel
from sbx.kernels.watch import keep_watching
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.runs import Cause, Quarantined, RunError
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.run import termination
from sbx.telemetry.background import background_context
from sbx.workspace.quarantine import Quarantine

_log = logging.getLogger(__name__)
LINKS_PERIOD_S = 3.0
_LINKS_SHARE = 50  # at most 2 % of one CPU, however large the tree is
# As jupyter_client waits for a kernel. The end of a kernel without handlers takes milliseconds.
_FINISH_S = 5.0
_EVICTED = RunError("KernelEvicted", "its kernel made room for others", "")

StartKernel = Callable[[str, OpenFiles], Awaitable[Kernel]]  # in this context, over these files


class ClosedReason(Struct, frozen=True):
    """The closed thing, and the loss that comes with it; in words."""

    what: str
    lost: str


SANDBOX_GONE = ClosedReason("the sandbox", "its files and state are gone")


@dataclass(eq=False, repr=False)
class ContextKernel:
    """See the module. A task that reads from the kernel holds `turn`.

    `opened` returns the files of the conversation, and `start_kernel` starts a kernel over them.
    `state_is_kept`: a kernel lives or lived, whose variables the caller may count on: if it ends
    without a request, the next run reports `state_lost`. `ends_with_command`: the jail is for one
    command. `grants` are those of the conversation; None: the policy permits none here.
    """

    name: str
    conversation: str
    policy: Policy
    opened: Callable[[], Awaitable[OpenFiles]]
    start_kernel: StartKernel
    grace_s: float
    _: KW_ONLY
    disk: DiskLimit
    state_is_kept: bool = False
    ends_with_command: bool = False
    grants: Grants = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        if self.grants is None:  # a dry run
            self.grants = Grants(self.policy.model_copy(update={"grant": ()}))
        self.output_max = self.policy.limits.output_max  # bytes that one run may write
        self.used_at = time.monotonic()
        self.turn = asyncio.Lock()
        self.gone: ClosedReason | None = None
        self.git_outside = False
        self.halting: RunError | None = None
        self._kernel: Kernel | None = None
        self._starting = asyncio.Lock()
        self._starter: asyncio.Task[object] | None = None
        self._links: asyncio.Task[None] | None = None
        self._quarantine: Quarantine | None = None
        self._borrowed = 0
        self._background = 0
        self._pid = os.getpid()

    @property
    def receipt(self) -> Receipt | None:
        """The walls around the live kernel; None without one."""
        return self._kernel.receipt if self._kernel is not None and self._kernel.alive else None

    async def read_receipt(self) -> Receipt | None:
        """Read the receipt from the live jail now. It names the walls that `changed` meanwhile."""
        kernel = self._kernel
        if kernel is None or not kernel.alive:
            return None
        receipt = await kernel.read_receipt()
        if receipt is None:
            return None
        grants = tuple(grant.to_json() for grant in self.grants.active)
        return replace(receipt, grants=grants)

    @property
    def alive(self) -> bool:
        return self._kernel is not None and self._kernel.alive

    @property
    def processes(self) -> list[int]:
        """The host pids of the processes inside; empty without a live kernel."""
        return self._kernel.jail.processes() if self._kernel is not None and self.alive else []

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a TCP port inside, of the live kernel's jail; start nothing.

        Raise Unavailable `port_not_open`, and as `check_open`."""
        self.check_open()
        if self._kernel is None or not self.alive:
            raise errors.Unavailable(
                "nothing runs in this sandbox now",
                code="port_not_open",
                hint="start a server inside first",
            )
        return await self._kernel.jail.connect(port)

    @property
    def busy(self) -> bool:
        return self._borrowed > 0 or self._starting.locked() or self.turn.locked()

    def check_open(self) -> None:
        """Raise Closed after a close."""
        check_process(self._pid)
        if self.gone is not None:
            raise self.closed("is closed")

    def closed(self, event: str) -> errors.Closed:
        gone = self.gone or SANDBOX_GONE
        return errors.Closed(f"{gone.what} {event}", hint=f"make a new one: {gone.lost}")

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run, and return its receipt."""
        kernel, _ = await self.ready()
        return kernel.receipt

    async def ready(self) -> tuple[Kernel, bool]:
        """Return the live kernel, and whether an earlier state is lost. Start one if necessary."""
        async with self._starting:
            self.check_open()
            if self._kernel is not None and self._kernel.alive:
                return self._kernel, False
            await self._drop_kernel()
            opened = await self.opened()
            await self.disk.check(opened)
            lost = self.state_is_kept
            self._quarantine = opened.quarantine
            host = opened.host_directory
            self.git_outside = host is not None and host.git_outside
            self._kernel = await self._started(opened)
            self.state_is_kept = True
            self.disk.watch(self._kernel, opened)
            if opened.quarantine is not None:
                looking = keep_watching(
                    lambda: _look_at_links(opened, self.last_use),
                    lambda: self.kill_for(Cause.CRASHED),
                )
                self._links = asyncio.create_task(looking, context=background_context())
            return self._kernel, lost

    async def _started(self, opened: OpenFiles) -> Kernel:
        """Start a kernel. `close` does not wait for the start, which may take long."""
        self._starter = task = asyncio.current_task()
        assert task is not None
        try:
            return await self.start_kernel(self.name, opened)
        except asyncio.CancelledError:
            if self._starter is None and task.uncancel() == 0:  # only `_cancel_start` cancelled it
                raise self._start_ended() from None
            raise
        except errors.SbxError as error:
            # The broker kills the jail of a dropped sandbox, and reports that it did not start
            if self.gone is not None or self.halting is not None:
                raise self._start_ended() from error
            raise
        finally:
            self._starter = None

    def _start_ended(self) -> errors.Conflict:
        if self.halting is not None:
            return errors.Conflict(self.halting.value, code="stopped")
        return self.closed("was closed while its kernel started")

    def _cancel_start(self, excluding: "list[asyncio.Task[None]]") -> None:
        """Cancel a start, unless one of these tasks does it."""
        starter = self._starter
        if starter is not None and starter not in excluding:
            self._starter = None
            starter.cancel()

    @contextlib.asynccontextmanager
    async def borrow_kernel(self) -> AsyncIterator[Kernel]:
        """Lend the live kernel for work in its jail that is not a run. Meanwhile the context is
        busy, and its disk is watched."""
        self.check_open()
        self._borrowed += 1
        try:
            kernel, _ = await self.ready()
            self.disk.run_began()
            try:
                yield kernel
            finally:
                self.disk.run_ended()
        finally:
            self._borrowed -= 1
            self.used_at = time.monotonic()

    def background_began(self) -> None:
        """Note that a background command runs in the jail. Meanwhile the kernel does not make room
        for others, and the disk is watched."""
        self._background += 1
        self.use_began()

    def background_ended(self) -> None:
        self._background -= 1
        self.use_ended()

    def use_began(self) -> None:
        self.used_at = time.monotonic()
        self.disk.run_began()

    def use_ended(self) -> None:
        self.used_at = time.monotonic()
        self.disk.run_ended()

    def last_use(self) -> float:
        """Return the monotonic time of the last use: now, while one lasts."""
        return time.monotonic() if self.busy or self._background else self.used_at

    def unreported_quarantine(self) -> tuple[Quarantined, ...]:
        """Return the files that were quarantined since the last call."""
        return self._quarantine.unreported() if self._quarantine is not None else ()

    def mark_killed(self, cause: Cause) -> None:
        """Close the kernel for new work, and note the cause of its end for the current run."""
        if self._kernel is not None and self._kernel.alive:
            self._kernel.killed_for = self._kernel.killed_for or cause
            self._kernel.close()

    async def kill_for(self, cause: Cause) -> None:
        """Do the same, kill the kernel, and wait until all its processes have ended."""
        self.mark_killed(cause)
        if self._kernel is not None:
            await self._kernel.kill()

    async def end_if_idle(self) -> bool:
        """End the kernel if nothing uses it; the next run then reports `state_lost`."""
        if self.busy or self._background or not self.alive:
            return False
        async with self._starting:
            await run_to_completion(self._drop_kernel(_EVICTED))
        return True

    def leave(self, gone: ClosedReason) -> None:
        """Take no more calls, as a first step of `close`."""
        check_process(self._pid)
        self.gone = self.gone or gone

    def release_files(self) -> None:
        """Stop to watch the files, which are about to be closed. No kernel lives."""
        self.disk.leave()  # of a kernel that died by itself
        if self._links is not None:
            self._links.cancel()
            self._links = None

    async def ended(self, kernel: Kernel) -> RunError:
        """Wait until this kernel has ended for any reason, and return the reason in words."""
        end = await kernel.ended()
        if kernel.left is not None:
            return kernel.left
        return termination.end_of_kernel(kernel, end, self.grants.limits)

    async def _drop_kernel(self, reason: RunError | None = None) -> None:
        try:
            if self._kernel is not None:
                self._kernel.left = self._kernel.left or self.halting or reason
                await self._finish(self._kernel)
        finally:
            kernel, self._kernel = self._kernel, None
            links, self._links = self._links, None
            await self.disk.close()
            if links is not None:
                links.cancel()
                await asyncio.gather(links, return_exceptions=True)
            if kernel is not None:
                await kernel.kill()

    async def _finish(self, kernel: Kernel) -> None:
        """Let an idle kernel end by itself: open files and handlers of atexit need that."""
        if self.turn.locked():
            return
        async with self.turn:  # no run begins on it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINISH_S):
                    await kernel.finish(self.output_max)


def kernel_gone(message: str = "there is no live kernel") -> errors.Conflict:
    return errors.Conflict(message, code="kernel_gone", hint="restart the kernel")


async def _look_at_links(opened: OpenFiles, used_at: Callable[[], float]) -> None:
    """Repeat the walk. `used_at` is the monotonic time of the last use of the kernel: an unused
    kernel is not examined."""
    wait_s, looked_at = LINKS_PERIOD_S, time.monotonic()
    while True:
        await asyncio.sleep(wait_s)
        if used_at() < looked_at:
            continue
        looked_at = time.monotonic()
        try:
            await opened.call(opened.look_at_links)
        except (OSError, errors.SbxError) as error:
            _log.warning("the links of a directory could not be read again: %s", error)
        wait_s = max(LINKS_PERIOD_S, _LINKS_SHARE * (time.monotonic() - looked_at))
