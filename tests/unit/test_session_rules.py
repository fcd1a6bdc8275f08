"""The rules of sessions: ids, limits that may only narrow, status."""

from typing import Any

import pytest

from sbx.errors import BadRequest
from sbx.policy import load, narrow
from sbx.service.ids import check_id, session_id
from sbx.service.lifecycle import State
from sbx.service.models import SandboxView
from sbx.service.session_rules import FileRules, SessionRules
from sbx.service.sessions import (
    SessionStatus,
    reason_of,
    status_of,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    "good",
    ["u", "a b", "ü", "...", "a..b", "x" * 128, "💥" * 128, "a\\b", "\u202egpj.exe", "a'\"&?#%2F"],
)
def test_an_id_may_be_any_text(good: str) -> None:
    assert check_id("user_id", good) == good


@pytest.mark.parametrize(
    "bad", ["", "x" * 129, ".", "..", "a/b", "/", "a\0b", "a\nb", "a\x7fb", "a\x85b", "a\udc80b"]
)
def test_an_id_that_cannot_be_one_is_refused_by_its_name(bad: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_id("agent_id", bad)
    assert refused.value.details["field"] == "agent_id"
    assert refused.value.code == "validation_error"


def test_everyone_computes_the_same_id() -> None:
    assert session_id("u1", "a1") == "sb-session-u1-a1"
    assert session_id("a-b", "c") == session_id("a", "b-c")  # which is why pairs are stored


def test_a_request_may_narrow_every_limit_of_uploads() -> None:
    rules = FileRules().narrowed(
        {
            "max_file_size": 512,
            "max_file_size_unit": "KB",
            "max_file_count": 3,
            "allowed_file_types": ["CSV", ".json", "csv"],
        }
    )
    assert rules == FileRules(512, "KB", 3, ("csv", "json"))
    assert rules.max_bytes == 512 * 1024
    assert FileRules.from_json(rules.to_json()) == rules
    assert FileRules().narrowed({}) == FileRules()
    assert FileRules().narrowed({"max_file_size": 100, "max_file_size_unit": "MB"}).size == 100


@pytest.mark.parametrize(
    ("field", "asked", "limit"),
    [
        ("max_file_size", {"max_file_size": 101}, 100 * MIB),
        ("max_file_size", {"max_file_size": 1, "max_file_size_unit": "GB"}, 100 * MIB),
        ("max_file_size", {"max_file_size": 102_401, "max_file_size_unit": "KB"}, 100 * MIB),
        ("max_file_count", {"max_file_count": 51}, 50),
        ("allowed_file_types", {"allowed_file_types": ["csv", "exe"]}, list(FileRules().types)),
    ],
)
def test_a_request_that_widens_a_limit_is_refused(
    field: str, asked: dict[str, Any], limit: Any
) -> None:
    with pytest.raises(BadRequest) as refused:
        FileRules().narrowed(asked)
    assert refused.value.code == "limit_widened"
    assert refused.value.details == {"field": field, "limit": limit}


def test_a_ttl_may_be_shorter_and_not_longer() -> None:
    rules = SessionRules(ttl_s=100)
    assert (rules.ttl(None), rules.ttl(100), rules.ttl(1)) == (100, 100, 1)
    with pytest.raises(BadRequest) as refused:
        rules.ttl(101)
    assert refused.value.details == {"field": "ttl", "limit": 100}


def test_an_upload_keeps_to_the_session_and_to_its_policy() -> None:
    policy = load("default")
    asked = {"uploads": {"max_file_size": 10, "total_max": 20, "allowed_types": ["csv", "py"]}}
    limits = FileRules(1, "MB", 5, ("csv", "txt")).within(narrow(policy, asked))
    assert (limits.max_file_size, limits.max_file_count, limits.max_total_bytes) == (10, 5, 20)
    assert limits.allowed_types == frozenset({"csv"})
    assert FileRules().within(policy).max_file_size == 100 * MIB


def view(state: State, **more: Any) -> SandboxView:
    return SandboxView(
        id="sandbox-1",
        owner="o",
        state=state,
        policy_name="default",
        policy=load("default"),
        workspace_id="ws-1",
        created_at=0,
        expires_at=None,
        idle_expires_at=None,
        **more,
    )


@pytest.mark.parametrize(
    ("state", "stopped", "warming", "status"),
    [
        (State.IDLE, False, False, SessionStatus.RUNNING),
        (State.IDLE, False, True, SessionStatus.PENDING),
        (State.IDLE, True, False, SessionStatus.STOPPED),
        (State.IDLE, True, True, SessionStatus.STOPPED),
        (State.STARTING, False, False, SessionStatus.PENDING),
        (State.READY, False, True, SessionStatus.RUNNING),
        (State.FAILED, False, False, SessionStatus.ERROR),
        (State.EXPIRED, False, False, SessionStatus.ERROR),
    ],
)
def test_states_of_sandboxes_are_told_as_status_of_sessions(
    state: State, stopped: bool, warming: bool, status: SessionStatus
) -> None:
    assert status_of(view(state, stopped=stopped), warming=warming) is status


def test_an_error_says_why() -> None:
    assert reason_of(view(State.READY)) is None
    assert reason_of(view(State.EXPIRED)) == "expired: its time to live is over"
    failed = view(State.FAILED, failure={"code": "no_memory", "message": "no memory"})
    assert reason_of(failed) == "failed: no memory"
