"""What a caller may and sees."""

from typing import Literal

import pytest

from sbx.api.agent_v1.dependencies import approval_scope
from sbx.errors import Denied
from sbx.protocol.approvals import ApprovalScope
from sbx.service.auth import SCOPES
from sbx.service.caller import Caller


def token(**bounds: str | None) -> Caller:
    return Caller("me", "token", scopes=frozenset({"files:read"}), **bounds)  # type: ignore[arg-type]


def test_a_caller_without_bounds_may_and_sees_everything_of_its_owner() -> None:
    caller = Caller("me", "key")
    assert all(caller.may(scope) for scope in SCOPES)
    assert caller.sees(None, None)
    assert caller.sees("u", "a", "c")
    assert caller.whole_sandbox


def test_a_scope_gives_no_other() -> None:
    assert [scope for scope in SCOPES if token().may(scope)] == ["files:read"]
    assert not Caller("me", "token", scopes=frozenset()).may("files:read")


@pytest.mark.parametrize(
    ("bounds", "user", "agent", "conversation", "seen"),
    [
        ({"user_id": "u"}, "u", "a", "c", True),
        ({"user_id": "u"}, "v", "a", "c", False),
        ({"user_id": "u"}, None, None, None, False),  # a sandbox that belongs to no user
        ({"user_id": "u", "agent_id": "a"}, "u", "a", None, True),
        ({"user_id": "u", "agent_id": "a"}, "u", "b", None, False),
        ({"user_id": "u", "agent_id": "a"}, "u", None, None, False),
        ({"user_id": "u", "conversation_id": "c"}, "u", "a", "c", True),
        ({"user_id": "u", "conversation_id": "c"}, "u", "a", "d", False),
        ({"user_id": "u", "conversation_id": "c"}, "u", "a", None, True),
        ({"user_id": "u"}, "U", "a", "c", False),
    ],
)
def test_a_token_sees_what_lies_within_its_bounds(
    bounds: dict[str, str],
    user: str | None,
    agent: str | None,
    conversation: str | None,
    seen: bool,
) -> None:
    assert token(**bounds).sees(user, agent, conversation) is seen


def test_a_token_for_one_conversation_does_not_reach_the_whole_sandbox() -> None:
    assert not token(user_id="u", conversation_id="c").whole_sandbox
    assert token(user_id="u").whole_sandbox


def test_tokens_of_one_owner_have_spaces_of_their_own() -> None:
    callers = [
        Caller("me", "key"),
        token(user_id="u"),
        token(user_id="u", agent_id="a"),
        token(user_id="u", conversation_id="a"),
        token(user_id="v"),
        Caller("me", "token", user_id="v"),
        Caller("me", "token", user_id="v", scopes=frozenset({"execute"})),
    ]
    assert len({caller.space for caller in callers}) == len(callers)
    assert Caller("me", "peer").space != Caller("me", "key").space


def test_an_owner_named_like_a_space_has_its_own() -> None:
    """An owner with the name of a token's space once got the replies of that token."""
    token = Caller("me", "token", user_id="u", agent_id="a")
    names = [token.space, '["me", "u", "a", null, null]', Caller("me", "key").space]
    kinds: list[Literal["key", "peer"]] = ["key", "peer"]
    spaces = {Caller(name, kind).space for name in names for kind in kinds}
    assert len(spaces | {token.space}) == 7


def test_the_key_or_token_is_told_and_gives_no_right() -> None:
    first = Caller("me", "key", via_id="key-1")
    second = Caller("me", "key", via_id="key-2")
    assert [one.who for one in (first, second)] == ["me key-1", "me key-2"]
    assert first == second
    assert hash(first) == hash(second)
    assert first.space == second.space
    assert Caller("uid:7", "peer").who == "uid:7"


def test_a_token_decides_within_all_of_its_bounds() -> None:
    bounds = {"user_id": "u", "agent_id": "a", "conversation_id": "c"}
    executing = Caller("me", "token", scopes=frozenset({"execute"}), **bounds)  # type: ignore[arg-type]
    assert approval_scope(executing) == ApprovalScope("me", "u", "a", "c")
    assert approval_scope(Caller("me", "key")) == ApprovalScope("me")
    with pytest.raises(Denied) as raised:
        approval_scope(token(**bounds))
    assert raised.value.code == "forbidden"
