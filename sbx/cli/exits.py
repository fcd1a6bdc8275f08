"""The exit codes of every command. No other module writes such a number."""

from enum import IntEnum

from sbx import errors
from sbx.protocol.agent import Reason
from sbx.protocol.runs import Run, Status


class Exit(IntEnum):
    """What a shell or a program learns without reading a word."""

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
  0    it went well
  1    the code raised; for doctor --attack: an attack escaped; for agent: it failed
  2    the call was wrong: an option, a file, a policy
  3    refused: the policy says no, this machine cannot, or no service answers; cp -r left files out
  4    for agent: it took as many steps as it may, without an end
  5    for agent: its budget of tokens or of time was spent
  70   a bug of sbx
  124  the run took longer than its time-out
  130  interrupted by Ctrl-C (143: ended by SIGTERM, 129: by SIGHUP)
  137  killed: a limit was crossed, stderr names it; or the kernel died
  141  whoever read the output stopped reading
Code that ends with sys.exit(N), and a command of --shell, give their own."""


class Stopped(errors.SbxError):
    """A signal ended the command before there was a result."""

    code = "interrupted"

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


class ReaderGone(errors.SbxError):
    """Whoever read our output closed it, as `head` does. Nothing is left to be said to anybody."""

    code = "reader_gone"


def for_error(error: errors.SbxError) -> int:
    match error:
        case Stopped():
            return 128 + error.signal
        case ReaderGone():
            return Exit.READER_GONE
        case errors.BadRequest() | errors.NotFound():
            return Exit.USAGE
        case errors.Denied() | errors.Unavailable() | errors.Conflict():
            return Exit.REFUSED
    return Exit.BROKEN


def for_run(run: Run) -> int:
    match run.status:
        case Status.OK:
            return Exit.OK
        case Status.TIMEOUT:
            return Exit.TIMEOUT
        case Status.INTERRUPTED:
            return Exit.INTERRUPTED
        case Status.KILLED:
            return Exit.KILLED
    if run.exit_code is not None:
        return run.exit_code
    if run.error is not None and run.error.name == "SystemExit":
        return by_system_exit(run.error.value)
    return Exit.FAILED


def for_agent(reason: Reason) -> int:
    """How an agent's run ended."""
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


def by_system_exit(value: str) -> int:
    """The code of `sys.exit(value)`: none is 0, and a text is one that Python prints and ends 1."""
    try:
        return int(value or 0) & 0xFF
    except ValueError:
        return Exit.FAILED
