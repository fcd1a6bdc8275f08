"""How a run ended, decided from what was seen: the whole table."""

import pytest

from sbx.kernels.frames import ExecuteReply, Exited
from sbx.policy.tables import LimitsPolicy
from sbx.protocol.runs import Cause, Status
from sbx.runtime.run import termination
from sbx.runtime.run.termination import StopReason

TIMEOUT = (Status.TIMEOUT, None)
OK, ERROR = (Status.OK, None), (Status.ERROR, None)
INTERRUPTED = (Status.INTERRUPTED, None)


@pytest.mark.parametrize(
    ("status", "why", "expected"),
    [
        ("ok", None, OK),
        ("error", None, ERROR),
        ("aborted", None, ERROR),
        ("error", StopReason.CALLER, INTERRUPTED),
        ("ok", StopReason.CALLER, OK),
        ("ok", StopReason.DEADLINE, TIMEOUT),
        ("error", StopReason.DEADLINE, TIMEOUT),
        ("error", StopReason.OUTPUT, (Status.KILLED, Cause.OUTPUT)),
    ],
)
def test_a_reply_is_judged_by_what_stopped_it(
    status: str, why: StopReason | None, expected: termination.Ending
) -> None:
    ename = "KeyboardInterrupt" if status == "error" else ""
    reply = ExecuteReply(status=status, ename=ename)  # type: ignore[arg-type]  # a literal
    assert termination.ending_of_reply(reply, why) == expected


def test_an_interrupt_that_the_code_outlived_is_not_how_it_ended() -> None:
    reply = ExecuteReply(status="error", ename="ValueError")
    assert termination.ending_of_reply(reply, StopReason.CALLER) == ERROR


def test_a_refused_process_is_the_cause_where_the_run_did_not_end_well() -> None:
    failed, fine = ExecuteReply(status="error"), ExecuteReply(status="ok")
    assert termination.ending_of_reply(failed, None, pids_max_hits=1) == (Status.ERROR, Cause.PIDS)
    assert termination.ending_of_reply(fine, StopReason.DEADLINE, pids_max_hits=1) == (
        Status.TIMEOUT,
        Cause.PIDS,
    )
    assert termination.ending_of_reply(fine, None, pids_max_hits=1) == OK
    assert termination.ending_of_command(254, None, oom_kills=0, pids_max_hits=1) == (
        Status.ERROR,
        Cause.PIDS,
    )


@pytest.mark.parametrize(
    ("killed_for", "why", "oom", "pids", "expected"),
    [
        (None, None, 0, 0, (Status.KILLED, Cause.CRASHED)),
        (None, None, 0, 3, (Status.KILLED, Cause.PIDS)),
        (None, None, 1, 3, (Status.KILLED, Cause.MEMORY)),
        (Cause.DISK, StopReason.DEADLINE, 1, 0, (Status.KILLED, Cause.DISK)),
        (None, StopReason.DEADLINE, 0, 3, TIMEOUT),
        (None, StopReason.DEADLINE, 1, 0, (Status.KILLED, Cause.MEMORY)),
        (None, StopReason.OUTPUT, 0, 0, (Status.KILLED, Cause.OUTPUT)),
        (None, StopReason.CALLER, 0, 0, INTERRUPTED),
    ],
)
def test_a_death_is_put_down_to_the_limit_that_struck(
    killed_for: Cause | None,
    why: StopReason | None,
    oom: int,
    pids: int,
    expected: termination.Ending,
) -> None:
    assert (
        termination.ending_of_jail(killed_for, why, oom_kills=oom, pids_max_hits=pids) == expected
    )


@pytest.mark.parametrize(
    ("answer", "why", "oom", "expected"),
    [
        (Exited(code=0), None, 0, OK),
        (Exited(code=3), None, 0, ERROR),
        (Exited(signal=9), None, 0, ERROR),
        (Exited(signal=9), None, 1, (Status.KILLED, Cause.MEMORY)),
        (Exited(code=137), None, 1, (Status.KILLED, Cause.MEMORY)),
        (Exited(code=1), None, 1, ERROR),
        (Exited(signal=2), StopReason.DEADLINE, 0, TIMEOUT),
    ],
)
def test_a_command_is_judged_by_its_exit_code_unless_it_was_stopped(
    answer: Exited, why: StopReason | None, oom: int, expected: termination.Ending
) -> None:
    assert (
        termination.ending_of_command(termination.exit_code(answer), why, oom_kills=oom) == expected
    )


@pytest.mark.parametrize("cause", Cause)
def test_every_kill_is_explained(cause: Cause) -> None:
    error = termination.explanation((Status.KILLED, cause), LimitsPolicy())
    assert error is not None
    assert error.value


@pytest.mark.parametrize("ended", [OK, ERROR, INTERRUPTED])
def test_what_the_code_did_itself_is_left_to_its_own_words(ended: termination.Ending) -> None:
    assert termination.explanation(ended, LimitsPolicy()) is None
