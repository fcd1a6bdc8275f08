"""The table of states says all there is to say, and the state is derived as it says."""

from typing import Any

import pytest

from sbx.errors import Conflict, NotFound
from sbx.service.lifecycle import TABLE, Act, State, after, refusal, state_of


def test_every_state_can_be_reached_from_idle() -> None:
    seen, new = set(), {State.IDLE}
    while new:
        seen |= new
        new = {to for state in new for to in TABLE[state].values()} - seen
    assert seen == set(State)


@pytest.mark.parametrize("state", [one for one in State if one is not State.DELETED])
def test_everything_alive_can_expire_be_deleted_and_survive_a_restart(state: State) -> None:
    assert after(state, Act.EXPIRE) is State.EXPIRED
    assert after(state, Act.DELETE) is State.DELETED
    assert after(state, Act.RESTART) in (State.IDLE, State.EXPIRED)


@pytest.mark.parametrize("state", [State.EXPIRED, State.DELETED])
@pytest.mark.parametrize("act", [Act.USE, Act.START, Act.READY, Act.EXTEND])
def test_what_has_ended_is_neither_used_nor_extended(state: State, act: Act) -> None:
    assert after(state, act) is None


def test_nothing_leads_back_from_an_end() -> None:
    assert set(TABLE[State.EXPIRED].values()) == {State.EXPIRED, State.DELETED}
    assert set(TABLE[State.DELETED].values()) == {State.DELETED}


def test_no_state_but_starting_becomes_ready_or_failed() -> None:
    for state, acts in TABLE.items():
        if state not in (State.STARTING, State.READY):
            assert State.READY not in acts.values()
        if state not in (State.STARTING, State.FAILED):
            assert State.FAILED not in acts.values()


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, State.IDLE),
        ({"failed": True}, State.FAILED),
        ({"starts": 1, "failed": True}, State.STARTING),
        ({"kernels": 1, "starts": 1}, State.READY),
        ({"kernels": 1, "expired": True}, State.EXPIRED),
        ({"expired": True, "deleted": True}, State.DELETED),
    ],
)
def test_the_first_fact_that_is_true_counts(facts: dict[str, Any], state: State) -> None:
    assert state_of(**facts) is state


def test_a_refusal_says_what_to_do_about_it() -> None:
    expired = refusal("sandbox-1", State.EXPIRED, 5.0)
    assert isinstance(expired, Conflict)
    assert expired.code == "sandbox_expired"
    assert expired.details == {"sandbox_id": "sandbox-1", "expires_at": 5.0}
    assert isinstance(refusal("sandbox-1", State.DELETED), NotFound)
