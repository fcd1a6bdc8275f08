"""How a run ended, decided from what was seen: pure functions over plain values."""

import signal

from sbx.kernels import frames
from sbx.policy.model import LimitsPolicy
from sbx.protocol.runs import Cause, RunError, Status
from sbx.runtime.run.termination import StopReason

Verdict = tuple[Status, Cause | None]


def replied(reply: frames.ReplyFrame, why: StopReason | None, *, pids_max_hits: int = 0) -> Verdict:
    """The kernel answered. An interrupt that the code did not end by changes nothing; a process
    that could not be started is named as the cause where the run did not end well."""
    if why is not None and (why is not StopReason.CALLER or _is_interrupted(reply)):
        status, cause = why.outcome()
    else:
        status, cause = (Status.OK if reply.status == "ok" else Status.ERROR), None
    return _with_pids(status, cause, pids_max_hits)


def _is_interrupted(reply: frames.ReplyFrame) -> bool:
    if not isinstance(reply, frames.ExecuteReply):
        return False
    return reply.status == "error" and reply.ename == "KeyboardInterrupt"


def died(
    killed_for: Cause | None, why: StopReason | None, *, oom_kills: int, pids_max_hits: int
) -> Verdict:
    """The kernel ended during the run: for a limit of ours, for one of linux (the counters say how
    often it struck meanwhile), by the ladder, or by itself."""
    if killed_for is not None:
        return Status.KILLED, killed_for
    if oom_kills > 0:
        return Status.KILLED, Cause.MEMORY
    if why is not None:
        return why.outcome()
    if pids_max_hits > 0:
        return Status.KILLED, Cause.PIDS
    return Status.KILLED, Cause.CRASHED


def exited(code: int, why: StopReason | None, *, oom_kills: int, pids_max_hits: int = 0) -> Verdict:
    """A command ended with an exit code, 128 + N for a signal, as in a shell."""
    if why is not None:
        return _with_pids(*why.outcome(), pids_max_hits)
    if was_killed(code) and oom_kills > 0:
        return Status.KILLED, Cause.MEMORY
    return _with_pids(Status.OK if code == 0 else Status.ERROR, None, pids_max_hits)


def _with_pids(status: Status, cause: Cause | None, hits: int) -> Verdict:
    if cause is None and hits > 0 and status in (Status.ERROR, Status.TIMEOUT):
        return status, Cause.PIDS
    return status, cause


def exit_code(told: frames.Exited) -> int:
    return told.code if told.code is not None else 128 + (told.signal or 0)


def was_killed(code: int) -> bool:
    """Whether somebody sent SIGKILL: what linux does when memory ran out."""
    return code == 128 + signal.SIGKILL


def explained(verdict: Verdict, limits: LimitsPolicy, what: str = "the run") -> RunError | None:
    """What ended the run, in a sentence for whoever reads the result, often a model; None where
    the code's own error says it."""
    match verdict:
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
            text = f"the workspace grew beyond its limit of {limits.workspace_max} bytes"
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
