"""The checker of the torture run: records in, findings out."""

from pathlib import Path
from typing import Any

import pytest

from bench.torture.growth import Growth, growth, slope
from bench.torture.ledger import CUT, LATE, NEVER_SENT, SURVEY, Act, Ledger, Life, Sample, Struck
from bench.torture.oracle import Finding, findings, summary
from bench.torture.plan import ENDING, PASSING, plan


def act(kind: str, at: float, status: int | None = 200, **more: Any) -> Act:
    """An act that takes half a second, of client 1 on "box"."""
    return Act(
        kind,
        **{"target": "box", "client": 1, "began": at, "ended": at + 0.5, **more, "status": status},
    )


def found(*acts: Act) -> list[Finding]:
    return findings(Ledger(acts=list(acts)))


def rules(*acts: Act) -> dict[str, int]:
    return summary(found(*acts))


RUN = {"id": "exec-1", "success": True, "output": "k\n"}
ROW = {"success": True, "output": "k\n"}


# -- the promise of a reply ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (200, "", "done"),
        (204, "", "done"),
        (404, "not_found", "not_done"),
        (409, "closed", "not_done"),
        (409, "outcome_unknown", "unknown"),
        (429, "queue_full", "not_done"),
        (500, "internal_error", "unknown"),
        (503, "not_recording", "not_done"),
        (504, "timeout", "unknown"),
        (507, "no_space", "not_done"),
        (None, NEVER_SENT, "not_done"),
        (None, CUT, "unknown"),
        (None, LATE, "unknown"),
    ],
)
def test_reply_promises_an_outcome(status: int | None, code: str, outcome: str) -> None:
    assert act("run", 0, status, code=code).outcome == outcome


def test_status_500_is_a_finding_with_its_code() -> None:
    assert found(act("run", 1, 500, code="broker_silent")) == [
        Finding("server_error", "run", "500 broker_silent", 1)
    ]


def test_client_that_waits_for_its_deadline_is_a_finding() -> None:
    assert found(act("file.read", 1, None, code=LATE, ended=61.0)) == [
        Finding("deadline", "file.read box", "no reply within 60 s", 1)
    ]


def test_correct_request_is_never_refused_as_incorrect() -> None:
    assert rules(act("run", 1, 401, code="unauthorized")) == {"request_refused": 1}


@pytest.mark.parametrize("kind", ["credential.revoke", "sandbox.delete"])
def test_full_disk_prevents_no_revocation_and_no_deletion(kind: str) -> None:
    assert rules(act(kind, 1, 507, code="no_space")) == {"revocation_refused": 1}


def test_survey_that_gets_no_reply_is_a_finding() -> None:
    assert rules(act("file.read", 1, 503, client=SURVEY)) == {"not_healed": 1}
    assert rules(act("run", 1, seen={**RUN, "success": False}, client=SURVEY)) == {"not_healed": 1}


# -- files -----------------------------------------------------------------------------------------


def write(at: float, seen: str, status: int | None = 200, code: str = "") -> Act:
    return act("file.write", at, status, target="box/f", seen=seen, code=code)


def delete(at: float, status: int | None = 200, code: str = "") -> Act:
    return act("file.delete", at, status, target="box/f", code=code)


def read(at: float, seen: str | None) -> Act:
    return act("file.read", at, 404 if seen is None else 200, target="box/f", seen=seen)


def test_written_file_has_its_content() -> None:
    assert found(write(1, "a"), write(2, "b"), read(3, "b")) == []


def test_written_file_that_is_gone_is_lost() -> None:
    assert found(write(1, "a"), read(2, None)) == [
        Finding("lost", "file box/f", "(absent) in place of a", 2)
    ]


def test_written_file_with_its_old_content_is_lost() -> None:
    assert found(write(1, "a"), write(2, "b"), read(3, "a")) == [
        Finding("lost", "file box/f", "a in place of b", 3)
    ]


@pytest.mark.parametrize("seen", ["a", "b"])
def test_write_without_a_reply_may_have_happened(seen: str) -> None:
    assert found(write(1, "a"), write(2, "b", None, CUT), read(3, seen)) == []


def test_write_without_a_reply_leaves_no_third_content() -> None:
    assert rules(write(1, "a"), write(2, "b", None, CUT), read(3, None)) == {"lost": 1}


def test_refused_write_changes_nothing() -> None:
    refused = write(2, "b", 507, "no_space")
    assert found(write(1, "a"), refused, read(3, "a")) == []
    assert found(write(1, "a"), refused, read(3, "b")) == [
        Finding("refused_but_done", "file box/f", "b in place of a", 3)
    ]


def test_refused_deletion_leaves_the_file() -> None:
    assert rules(write(1, "a"), delete(2, 507), read(3, None)) == {"refused_but_done": 1}
    assert rules(write(1, "a"), delete(2), read(3, None)) == {}
    assert rules(write(1, "a"), delete(2), read(3, "a")) == {"lost": 1}


def test_later_survey_does_not_repeat_a_finding() -> None:
    assert len(found(write(1, "a"), read(2, None), write(3, "a"), read(4, None))) == 1


# -- sandboxes -------------------------------------------------------------------------------------


def create(at: float, status: int | None = 201, key: str = "k", code: str = "") -> Act:
    seen = "box" if status == 201 else None
    return act("sandbox.create", at, status, target="?", key=key, seen=seen, code=code)


def test_sandbox_that_was_acknowledged_is_there() -> None:
    assert rules(create(1), act("sandbox.get", 2)) == {}
    assert rules(create(1), act("sandbox.get", 2, 404)) == {"lost": 1}


def test_deleted_sandbox_stays_deleted() -> None:
    deleted = act("sandbox.delete", 2, 204)
    assert rules(create(1), deleted, act("sandbox.get", 3, 404)) == {}
    assert rules(create(1), deleted, act("sandbox.get", 3)) == {"lost": 1}


def test_sandbox_whose_deletion_was_refused_is_there() -> None:
    refused = act("sandbox.delete", 2, 503)
    assert rules(create(1), refused, act("sandbox.get", 3, 404)) == {"refused_but_done": 1}


def test_each_lost_reply_explains_one_sandbox() -> None:
    listed = act("sandboxes", 5, seen=["box", "other"])
    assert rules(create(1), create(2, None, "l", CUT), listed) == {}
    assert rules(create(1), create(2, 507, "l"), listed) == {"unreported": 1}
    retried = (create(0, None, "k", CUT), create(1))
    assert rules(*retried, listed) == {"unreported": 1}


# -- runs ------------------------------------------------------------------------------------------


def run(at: float, status: int | None = 200, seen: Any = RUN, code: str = "") -> Act:
    return act("run", at, status, key="k", seen=seen if status == 200 else None, code=code)


def counted(at: float, **seen: int) -> Act:
    return act("counters", at, seen=seen)


def test_run_that_succeeded_was_executed_once() -> None:
    assert rules(run(1), counted(2, k=1)) == {}
    assert rules(run(1), counted(2)) == {"lost": 1}
    assert rules(run(1), act("counters", 2, 404)) == {"lost": 1}
    assert found(run(1), counted(2, k=2)) == [Finding("executed_twice", "box k", "2 times", 2)]


def test_idempotent_run_is_executed_once_however_often_it_is_sent() -> None:
    attempts = (run(1, None, code=CUT), run(2, 500), run(3))
    assert rules(*attempts[:1], *attempts[2:], counted(4, k=1)) == {}
    assert rules(*attempts[:1], *attempts[2:], counted(4, k=2)) == {"executed_twice": 1}


def test_refused_run_is_not_executed() -> None:
    assert rules(run(1, 507, code="no_space"), counted(2)) == {}
    assert rules(run(1, 507, code="no_space"), counted(2, k=1)) == {"refused_but_done": 1}


def test_run_without_a_reply_is_executed_or_not() -> None:
    assert rules(run(1, None, code=CUT), counted(2)) == rules(run(1, None, code=CUT)) == {}
    assert rules(run(1, None, code=CUT), counted(2, k=1)) == {}


def test_run_that_failed_may_have_counted_or_not() -> None:
    failed = run(1, seen={**RUN, "success": False})
    assert rules(failed, counted(2)) == rules(failed, counted(2, k=1)) == {}


def test_run_is_in_the_history_unless_its_reply_denies_it() -> None:
    assert rules(run(1), act("history", 2, seen={"exec-1": ROW})) == {}
    assert rules(run(1), act("history", 2, seen={})) == {"unrecorded": 1}
    unrecorded = run(1, seen={**RUN, "recorded": False})
    assert rules(unrecorded, act("history", 2, seen={})) == {}


def test_history_has_the_result_of_the_reply() -> None:
    other = {"exec-1": {"success": False, "output": ""}}
    assert rules(run(1), act("history", 2, seen=other)) == {"record_differs": 1}


def test_run_that_was_cut_off_is_in_the_history_at_the_end() -> None:
    cut = act("run", 1, None, key="k", code=CUT, seen={"id": "exec-1", "success": None})
    assert rules(cut, act("history", 2, seen={})) == {}
    assert rules(cut, act("history", 2, seen={}, client=SURVEY)) == {"unrecorded": 1}
    interrupted = {"exec-1": {"success": False, "output": ""}}
    assert rules(cut, act("history", 2, seen=interrupted, client=SURVEY)) == {}


def test_run_that_was_cut_off_while_the_store_was_locked_may_be_unrecorded() -> None:
    cut = act("run", 1, None, key="k", code=CUT, seen={"id": "exec-1", "success": None})
    acts = [cut, act("history", 9, seen={}, client=SURVEY)]
    locked, later = Struck("store_locked", 0.5, 1.2), Struck("store_locked", 3, 4)
    assert findings(Ledger(acts=acts, faults=[locked])) == []
    assert summary(findings(Ledger(acts=acts, faults=[later]))) == {"unrecorded": 1}


def test_repeated_request_gets_the_same_reply() -> None:
    assert rules(run(1), run(2)) == {}
    assert rules(run(1), run(2, seen={**RUN, "id": "exec-2"})) == {"replay_differs": 1}


# -- keys and tokens -------------------------------------------------------------------------------


def credential(verb: str, at: float, status: int | None, *, recorded: bool = True) -> Act:
    return act(f"credential.{verb}", at, status, target="key-1", seen=recorded)


def test_revoked_key_is_refused_from_the_reply_on() -> None:
    revoked = credential("revoke", 1, 204)
    assert rules(revoked, credential("use", 2, 401)) == {}
    assert rules(revoked, credential("use", 2, 503)) == {}
    assert rules(revoked, credential("use", 1.2, 200)) == {}  # the reply was not there yet
    assert found(revoked, credential("use", 2, 200)) == [
        Finding("revoked_works", "key-1", "200", 2)
    ]


def test_revocation_that_is_not_recorded_holds_while_the_process_lives() -> None:
    revoked = credential("revoke", 1, 200, recorded=False)
    lives = [Life(7, 0, 1, 5, -9, cause="kill")]
    for at, rule in ((2, {"revoked_works": 1}), (6, {})):
        acts = [revoked, credential("use", at, 200)]
        assert summary(findings(Ledger(acts=acts, lives=lives))) == rule


def test_valid_key_is_accepted() -> None:
    assert rules(credential("use", 1, 200)) == {}
    assert rules(credential("use", 1, 401)) == {"valid_refused": 1}
    assert rules(credential("revoke", 1, None), credential("use", 2, 401)) == {}


# -- terminals and chats ---------------------------------------------------------------------------


def terminal(verb: str, at: float, status: int | None, seen: Any) -> Act:
    return act(f"terminal.{verb}", at, status, seen=seen)


def test_closed_terminal_is_gone() -> None:
    acts = (terminal("open", 1, 201, "t"), terminal("close", 2, 204, "t"))
    assert rules(*acts, terminal("list", 3, 200, [])) == {}
    assert rules(*acts, terminal("list", 3, 200, ["t"])) == {"lost": 1}


def test_terminal_that_was_refused_is_not_open() -> None:
    refused = terminal("open", 1, 507, None)
    assert rules(refused, terminal("list", 2, 200, ["t"])) == {"unreported": 1}
    unknown = terminal("open", 1, None, None)
    assert rules(unknown, terminal("list", 2, 200, ["t"])) == {}


def test_answer_of_an_agent_is_in_its_messages() -> None:
    chat = act("chat", 1, key="k", seen={"success": True, "answer": "answer-k"})
    assert rules(chat, act("messages", 2, seen=["RUN", "answer-k"])) == {}
    assert rules(chat, act("messages", 2, seen=["RUN"])) == {"lost": 1}


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "text"),
    [
        pytest.param(Life(7, 0, 1, 9, -9, cause="kill"), None, id="killed"),
        pytest.param(Life(7, 0, 1, 9, 0, cause="terminate"), None, id="terminated"),
        pytest.param(Life(7, 0, 1, 9, 70, cause="broker_kill"), None, id="broker died"),
        pytest.param(Life(7, 0, None, 9, 3, excuse="disk_full"), None, id="no start, disk full"),
        pytest.param(
            Life(7, 0, 1, 9, 1, cause="terminate"), "exit code 1 after SIGTERM", id="bad end"
        ),
        pytest.param(
            Life(7, 0, 1, 9, -9, cause="broker_silent", forced=True),
            "it did not end after broker_silent",
            id="silent broker unnoticed",
        ),
        pytest.param(Life(7, 0, 1, 9, 1), "it ended by itself: exit code 1", id="by itself"),
        pytest.param(Life(7, 0, None, 9, 1), "it did not start: exit code 1", id="no start"),
    ],
)
def test_end_of_a_process_has_a_reason(life: Life, text: str | None) -> None:
    expected = [] if text is None else [Finding("process_end", "process 7", text, 9)]
    assert findings(Ledger(lives=[life])) == expected


def test_leftovers_are_findings() -> None:
    assert findings(Ledger(left=["process 9: bwrap"])) == [
        Finding("left_behind", "process 9: bwrap", "it is still there")
    ]


def test_ledger_is_written_as_a_line_for_each_record(tmp_path: Path) -> None:
    ledger = Ledger(
        acts=[act("run", 1)],
        faults=[Struck("kill", 1, 2)],
        samples=[Sample(7, 1.0, 100, 10)],
        left=["mount /x"],
    )
    ledger.write(tmp_path / "ledger")
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert len(lines) == 4
    assert lines[1] == '{"record": "struck", "kind": "kill", "began": 1, "ended": 2, "note": ""}'


# -- the plan of the faults ------------------------------------------------------------------------


def test_same_seed_gives_the_same_faults() -> None:
    assert plan(1, 120) == plan(1, 120)
    assert plan(1, 120) != plan(2, 120)


@pytest.mark.parametrize("seed", range(5))
def test_two_minutes_have_every_fault_and_never_three_at_once(seed: int) -> None:
    faults = plan(seed, 120)
    assert {fault.kind for fault in faults} == {*ENDING, *PASSING}
    spans = [(fault.at, fault.at + fault.for_s) for fault in faults]
    assert all(sum(a <= at < b for a, b in spans) <= 2 for at, _ in spans)
    assert max(end for _, end in spans) <= 120


def test_middle_third_of_a_long_run_has_no_fault_that_ends_the_service() -> None:
    middle = [fault for fault in plan(1, 900) if 300 <= fault.at < 600]
    assert {fault.kind for fault in middle} == {*PASSING}


# -- growth ----------------------------------------------------------------------------------------


def test_slope_is_not_moved_by_a_peak() -> None:
    line = [(float(x), 2.0 * x) for x in range(20)]
    assert slope(line) == 2.0
    line[7] = (7.0, 1000.0)
    assert slope(line) == pytest.approx(2.0)
    assert slope(line[:1]) is None


def test_growth_leaves_out_the_first_minute_and_short_lives() -> None:
    warm_up = [Sample(1, float(at), 1024 * at, 10 + at) for at in range(0, 60, 10)]
    steady = [Sample(1, float(at), 100 * 1024, 90) for at in range(60, 200, 10)]
    short = [Sample(2, 300.0, 2048, 5), Sample(2, 310.0, 4096, 7)]
    assert growth([*warm_up, *steady, *short], least_s=120) == [
        Growth(1, 190.0, 0.0, 0.0, 100.0, 90),
        Growth(2, 10.0, None, None, 4.0, 7),
    ]
