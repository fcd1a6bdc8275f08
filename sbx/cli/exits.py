"""The exit codes of every command. No other module contains exit codes as numbers."""

from enum import IntEnum
from typing import TYPE_CHECKING

from sbx import errors

if TYPE_CHECKING:
    from sbx.protocol.agent import Reason
    from sbx.protocol.runs import Run


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    MAX_STEPS = 4
    BUDGET = 5
    BROKEN = 70
    TIMEOUT = 124
    INTERRUPTED = 130
    KILLED = 137
    READER_GONE = 141


EPILOG = """\b
exit codes:
  0    success
  1    the code raised; for doctor --attack: an attack escaped; for agent: it failed
  2    the call was wrong: an option, a file, a policy
  3    refused: denied by the policy, impossible here, or no service answers; cp -r left files out
  4    for agent: it reached its step limit
  5    for agent: it used up its budget of tokens or time
  70   a bug of sbx
  124  the run took longer than its time-out
  130  interrupted by Ctrl-C (143: ended by SIGTERM, 129: by SIGHUP)
  137  killed: a limit was exceeded (stderr names it), or the kernel died
  141  the reader of the output closed it
A program sets the exit code itself, as under python3 (128+N: ended by the signal N), and so does a
command of --shell."""


class StoppedBySignal(errors.SbxError):
    """A signal ended the command before there was a result."""

    code = "interrupted"

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


class ReaderGone(errors.SbxError):
    """The reader of the output closed it, as `head` does. No message can reach it."""

    code = "reader_gone"


def for_error(error: errors.SbxError) -> int:
    match error:
        case StoppedBySignal():
            return 128 + error.signal
        case ReaderGone():
            return Exit.READER_GONE
        case errors.BadRequest() | errors.NotFound():
            return Exit.USAGE
        case errors.Denied() | errors.Unavailable() | errors.Conflict():
            return Exit.REFUSED
    return Exit.BROKEN


def for_run(run: "Run") -> int:
    from sbx.protocol.runs import Status  # 5 ms, which most commands do not need

    match run.status:
        case Status.OK:
            return Exit.OK
        case Status.TIMEOUT:
            return Exit.TIMEOUT
        case Status.INTERRUPTED:
            return Exit.INTERRUPTED
        case Status.KILLED:
            return Exit.KILLED
    return Exit.FAILED if run.exit_code is None else run.exit_code


def for_agent(reason: "Reason") -> int:
    """Return the exit code for the end of an agent's run."""
    match reason:
        case "done":
            return Exit.OK
        case "max_steps":
            return Exit.MAX_STEPS
        case "budget":
            return Exit.BUDGET
        case "aborted":
            return Exit.INTERRUPTED
        case "error":
            return Exit.FAILED
