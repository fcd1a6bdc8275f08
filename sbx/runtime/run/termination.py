"""The end of a run: how it is stopped, and its status and cause.

GracefulTermination   stops a run in steps: interrupt, wait a little, kill
ending_of_…           pure functions: the status and the cause from the observations
explanation           the same as a sentence
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeVar

from sbx.isolation.broker.jail import JailExit
from sbx.kernels import frames
from sbx.kernels.kernel import Kernel
from sbx.policy.tables import LimitsPolicy
from sbx.protocol.runs import Cause, RunError, Status

T = TypeVar("T")
Ending = tuple[Status, Cause | None]
# Before that, a child of PID 1 may still have PID 1's handler, and lose the signal. A cell may be
# within its first print, and the user would get the text without its line end.
_SETTLED_S = 0.05


class StopReason(Enum):
    """The reason for which sbx stops a run."""

    DEADLINE = auto()
    OUTPUT = auto()
    CALLER = auto()
    ABANDONED = auto()

    def outcome(self) -> Ending:
        match self:
            case StopReason.DEADLINE:
                return Status.TIMEOUT, None
            case StopReason.OUTPUT:
                return Status.KILLED, Cause.OUTPUT
            case StopReason.CALLER | StopReason.ABANDONED:
                return Status.INTERRUPTED, None


class GracefulTermination:
    """Stops one run at its deadline, or earlier at a request.

    `interrupt` comes first, and `kill` after `grace_s` seconds without an end. The first reason
    counts, except that of a caller: code may ignore an interrupt, as in Jupyter, and continue until
    another reason stops it.
    """

    def __init__(
        self,
        timeout_s: float,
        grace_s: float,
        interrupt: Callable[[], Awaitable[object]],
        kill: Callable[[], Awaitable[object]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deadline = self._began + timeout_s
        self._grace_s = grace_s
        self._interrupt = interrupt
        self._kill = kill
        self.killed = False
        self._limit: asyncio.Timeout | None = None
        self.why: StopReason | None = None

    def kill_by(self, kill: Callable[[], Awaitable[object]]) -> None:
        """Kill the run in another way, from now on."""
        self._kill = kill

    async def next(self, following: Callable[[], Awaitable[T]], *, at_once: bool = False) -> T:
        """Await the next step of the run, and stop the run at its deadline. With `at_once` the step
        is ready: without a wait it needs no timer, which costs 9 µs."""
        if at_once:
            return await following()
        while True:
            try:
                async with asyncio.timeout_at(self._deadline) as limit:
                    self._limit = limit
                    return await following()
            except TimeoutError:
                if not limit.expired():
                    raise
            finally:
                self._limit = None
            if self.killed:
                raise TimeoutError("the run outlived its kill")
            await self._escalate()

    async def check_deadline(self) -> None:
        """Stop the run at its deadline. For a caller that waited elsewhere, while the following
        steps may all be ready."""
        if self._loop.time() >= self._deadline and not self.killed:
            await self._escalate()

    async def _escalate(self) -> None:
        if self.why in (None, StopReason.CALLER):
            await self.stop(StopReason.DEADLINE)
        else:
            self.killed = True
            self._deadline = self._loop.time() + self._grace_s
            await self._kill()

    @property
    def deadline_near(self) -> bool:
        """Whether half of the time for the end after an interrupt is over: from then on nothing may
        delay the last frames, or the run is killed because of them."""
        if self.why in (None, StopReason.CALLER):
            return False
        return self.killed or self._loop.time() >= self._deadline - self._grace_s / 2

    async def stop(self, why: StopReason) -> None:
        """Begin to stop the run, unless it is being stopped for a reason other than a caller's."""
        if self.why not in (None, StopReason.CALLER):
            return
        self.why = why
        if why is not StopReason.CALLER:
            self._deadline = self._loop.time() + self._grace_s
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._deadline)
        await asyncio.sleep(self._began + _SETTLED_S - self._loop.time())
        await self._interrupt()


def ending_of_reply(
    reply: frames.ReplyFrame, why: StopReason | None, *, pids_max_hits: int = 0
) -> Ending:
    """Return the ending of a run to which the kernel replied. An interrupt that did not end the
    code changes nothing. A process that could not be started is the cause if the run failed."""
    if why is not None and (why is not StopReason.CALLER or _is_interrupted(reply)):
        status, cause = why.outcome()
    else:
        status, cause = (Status.OK if reply.status == "ok" else Status.ERROR), None
    return _with_pids(status, cause, pids_max_hits)


def _is_interrupted(reply: frames.ReplyFrame) -> bool:
    if not isinstance(reply, frames.ExecuteReply):
        return False
    return reply.status == "error" and reply.ename == "KeyboardInterrupt"


def ending_of_jail(
    killed_for: Cause | None, why: StopReason | None, *, oom_kills: int, pids_max_hits: int
) -> Ending:
    """Return the ending of a run during which its jail ended: by a limit of sbx, by a limit of
    Linux (the counters are those of this run), by its termination, or by itself."""
    if killed_for is not None:
        return Status.KILLED, killed_for
    if oom_kills > 0:
        return Status.KILLED, Cause.MEMORY
    if why is not None:
        return why.outcome()
    if pids_max_hits > 0:
        return Status.KILLED, Cause.PIDS
    return Status.KILLED, Cause.CRASHED


def ending_of_command(
    code: int, why: StopReason | None, *, oom_kills: int, pids_max_hits: int = 0
) -> Ending:
    """Return the ending of a command by its exit code, which is 128 + N for a signal."""
    if why is not None:
        return _with_pids(*why.outcome(), pids_max_hits)
    if was_killed(code) and oom_kills > 0:
        return Status.KILLED, Cause.MEMORY
    return _with_pids(Status.OK if code == 0 else Status.ERROR, None, pids_max_hits)


def ending_of_program(
    code: int, why: StopReason | None, *, oom_kills: int, pids_max_hits: int = 0
) -> Ending:
    """Do the same for a file of Python. An interrupt that did not end it changes nothing."""
    if why is StopReason.CALLER and code != 128 + signal.SIGINT:
        why = None
    return ending_of_command(code, why, oom_kills=oom_kills, pids_max_hits=pids_max_hits)


def _with_pids(status: Status, cause: Cause | None, hits: int) -> Ending:
    if cause is None and hits > 0 and status in (Status.ERROR, Status.TIMEOUT):
        return status, Cause.PIDS
    return status, cause


def ending_in_kernel(
    kernel: Kernel, seen: tuple[int, int], end: JailExit, why: StopReason | None
) -> Ending:
    """Return the ending of a run during which the jail of this kernel ended. `seen` are the
    counters of the kernel before the run."""
    oom_kills, pids_max_hits = seen
    return ending_of_jail(
        kernel.killed_for,
        why,
        oom_kills=end.oom_kills - oom_kills,
        pids_max_hits=end.pids_max_hits - pids_max_hits,
    )


def end_of_kernel(kernel: Kernel, end: JailExit, limits: LimitsPolicy) -> RunError:
    ending = ending_in_kernel(kernel, kernel.seen, end, None)
    error = cut_off(kernel) if ending[1] is Cause.CRASHED else None
    error = error or explanation(ending, limits, "the kernel")
    assert error is not None  # it did not reply
    return error


def cut_off(kernel: Kernel) -> RunError | None:
    """Return the error for a kernel that sbx ended because of its hostile frames."""
    if kernel.cut_off is None:
        return None
    return RunError("KernelCutOff", f"the kernel was ended: {kernel.cut_off}", "")


def exit_code(exited: frames.Exited) -> int:
    return exited.code if exited.code is not None else 128 + (exited.signal or 0)


def was_killed(code: int) -> bool:
    """Return whether the process got SIGKILL, which Linux sends when memory runs out."""
    return code == 128 + signal.SIGKILL


def explanation(ending: Ending, limits: LimitsPolicy, what: str = "the run") -> RunError | None:
    """Return the reason for the end as a sentence for the reader of the result, often a model.
    Return None if the error of the code itself states it."""
    match ending:
        case Status.TIMEOUT, _:
            return RunError("Timeout", "the run took longer than its time-out", "")
        case Status.KILLED, Cause.MEMORY:
            text = f"{what} used more memory than the limit of {limits.memory_max} bytes"
            return RunError("MemoryLimit", text, "")
        case Status.KILLED, Cause.OUTPUT:
            text = f"{what} wrote more output than the limit of {limits.output_max} bytes"
            return RunError("OutputLimit", text, "")
        case Status.KILLED, Cause.PIDS:
            text = f"{what} started more processes than the limit of {limits.tasks_max}"
            return RunError("ProcessLimit", text, "")
        case Status.KILLED, Cause.DISK:
            sizes = f"{limits.workspace_max} bytes or {limits.workspace_files} files"
            text = f"the workspace grew beyond its limit of {sizes}"
            return RunError("DiskLimit", text, "")
        case Status.KILLED, Cause.HONEYTOKEN:
            text = "a planted credential was used, and the sandbox is frozen"
            return RunError("Honeytoken", text, "")
        case Status.KILLED, Cause.DESCRIPTORS:
            text = f"{what} held more pipes or epoll instances than one sandbox may"
            return RunError("DescriptorLimit", text, "")
        case Status.KILLED, _:
            return RunError("KernelDied", "the kernel process ended by itself", "")
    return None
