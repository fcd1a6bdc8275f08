"""What approvals promise, whether they are kept in memory or in a store on disk."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from sbx.agent.approvals import AgentContext, Approvals, Pending
from sbx.errors import BadRequest, Conflict, Denied, NotFound, SbxError
from sbx.protocol.approvals import ApprovalScope
from sbx.store import Store, chats, database, projects
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from sbx.store.pending import PendingWrites
from sbx.store.projects import ProjectRow
from tests.fake_clock import FakeClock

ME, YOU = ApprovalScope("me"), ApprovalScope("you")
HERE = AgentContext("me", "talk", "ann", "coder")
THERE = AgentContext("me", "chat", "bob", "coder")
SITE = AgentContext("me", "site-1", "ann", "coder", "project-1")
SITE_TOO = AgentContext("me", "site-2", "bob", "coder", "project-1")
YOURS = AgentContext("you", "talk", "ann", "coder")


@dataclass
class Desk:
    approvals: Approvals
    clock: FakeClock
    asked: int = 0

    async def ask(
        self,
        place: AgentContext = HERE,
        command: str = "make test",
        tool: str = "execute_command",
        run: str = "run-1",
    ) -> Pending:
        self.asked += 1
        return await self.approvals.ask(
            place,
            run_id=run,
            tool_call_id=f"call-{self.asked}",
            tool_name=tool,
            tool_args={"command": command} if tool == "execute_command" else {"code": command},
        )

    async def allowed(
        self, place: AgentContext, command: str, tool: str = "execute_command"
    ) -> bool:
        return await self.approvals.remembers(place, tool, command)


@pytest.fixture(params=["memory", "store"])
async def records(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ApprovalStore]:
    if request.param == "memory":
        yield ApprovalStore()
        return
    async with await Store.open(tmp_path / "sbx.db") as store:
        project = ProjectRow("project-1", "me", "site", "/srv/site", True, 1.0)
        await store.write(lambda on: projects.add(on, project))
        for number, place in enumerate((HERE, THERE, SITE, SITE_TOO, YOURS)):
            await chats.ensure(store, chat(f"chat-{number}", place))
        yield ApprovalStore(store)


@pytest.fixture
def desk(records: ApprovalStore) -> Desk:
    clock = FakeClock()
    return Desk(Approvals(records, clock), clock)


def chat(chat_id: str, place: AgentContext) -> ChatRow:
    assert place.user_id is not None
    assert place.agent_id is not None
    return ChatRow(
        id=chat_id,
        owner=place.owner,
        conversation_id=place.conversation_id,
        user_id=place.user_id,
        agent_id=place.agent_id,
        created_at=1.0,
        last_used_at=1.0,
        project_id=place.project_id,
    )


async def test_it_is_there_to_be_decided_as_soon_as_it_was_asked(desk: Desk) -> None:
    pending = await desk.ask()
    (found,), cursor = await desk.approvals.pending(ME)
    assert cursor is None
    assert found == pending.approval
    assert found.to_json() == {
        "tool_call_id": "call-1",
        "tool_name": "execute_command",
        "tool_args": {"command": "make test"},
        "conversation_id": "talk",
        "created_at": desk.clock.now(),
        "expires_at": desk.clock.now() + 600,
        "remember_as": ["exact", "prefix"],
    }
    decided = await desk.approvals.decide(ME, "call-1", True)
    assert decided.decision == await pending.decision()
    assert await desk.approvals.pending(ME) == ([], None)


async def test_of_many_who_decide_at_once_one_wins_and_the_others_are_told_who(desk: Desk) -> None:
    pending = await desk.ask()
    answers = await asyncio.gather(
        *(
            desk.approvals.decide(ME, "call-1", number % 2 == 0, by=f"person-{number}")
            for number in range(8)
        ),
        return_exceptions=True,
    )
    won = [one for one in answers if not isinstance(one, BaseException)]
    assert len(won) == 1
    decision = await pending.decision()
    assert won[0].decision == decision
    for late in answers:
        if isinstance(late, BaseException):
            assert isinstance(late, Conflict)
            assert late.code == "already_decided"
            assert late.details == {
                "approved": decision.approved,
                "by": decision.by,
                "at": decision.at,
                "decided_at": decision.at,
                "remembered": None,
            }


async def test_a_yes_that_comes_too_late_is_no_yes_although_nobody_waited(desk: Desk) -> None:
    pending = await desk.ask()
    desk.clock.advance(600)
    assert await desk.approvals.pending(ME) == ([], None)
    with pytest.raises(Conflict) as late:
        await desk.approvals.decide(ME, "call-1", True)
    assert (late.value.code, late.value.details["by"]) == ("already_decided", "timeout")
    assert (await pending.decision()).by == "timeout"


async def test_abort_denies_what_its_run_waits_for_and_nothing_else(desk: Desk) -> None:
    mine = [await desk.ask(), await desk.ask(THERE)]
    other = await desk.ask(run="run-2")
    denied = await desk.approvals.abort("run-1")
    assert [one.tool_call_id for one in denied] == ["call-1", "call-2"]
    assert {(await one.decision()).by for one in mine} == {"abort"}
    await desk.approvals.decide(ME, "call-3", True)
    assert (await other.decision()).approved
    assert await desk.approvals.abort("run-1") == []


async def test_a_call_is_asked_about_once(desk: Desk) -> None:
    """A late answer to the first question would answer the second."""
    first = await desk.ask()
    for _ in range(2):
        desk.asked = 0
        with pytest.raises(Conflict):
            await desk.ask()
        if (await desk.approvals.pending(ME))[0]:
            await desk.approvals.decide(ME, "call-1", True)
    assert (await first.decision()).approved


async def test_a_dry_run_is_shown_to_whoever_lists(desk: Desk) -> None:
    answer = {"exit_code": 0, "output": "ok", "changes": []}
    await desk.approvals.ask(
        HERE,
        run_id="run-1",
        tool_call_id="call-1",
        tool_name="execute_command",
        tool_args={"command": "touch a"},
        dry_run=answer,
    )
    (found,), _ = await desk.approvals.pending(ME)
    assert found.to_json()["dry_run"] == answer


# -- who sees what ---------------------------------------------------------------------------------


async def test_another_owner_sees_and_decides_nothing(desk: Desk) -> None:
    await desk.ask(HERE)
    assert await desk.approvals.pending(YOU) == ([], None)
    with pytest.raises(NotFound) as unknown:
        await desk.approvals.decide(YOU, "call-1", True)
    with pytest.raises(NotFound) as none:
        await desk.approvals.decide(YOU, "call-0", True)
    assert unknown.value.code == none.value.code == "approval_not_found"
    assert len((await desk.approvals.pending(ME))[0]) == 1


@pytest.mark.parametrize(
    ("bounds", "seen"),
    [
        ({}, ["call-1", "call-2", "call-3"]),
        ({"user_id": "ann"}, ["call-1", "call-3"]),
        ({"user_id": "ann", "agent_id": "coder", "conversation_id": "talk"}, ["call-1"]),
        ({"agent_id": "writer"}, []),
        ({"user_id": "bob", "conversation_id": "talk"}, []),
    ],
)
async def test_a_token_sees_and_decides_within_its_bounds_only(
    desk: Desk, bounds: dict[str, str], seen: list[str]
) -> None:
    for place in (HERE, THERE, SITE):
        await desk.ask(place)
    token = ApprovalScope("me", **bounds)
    found, _ = await desk.approvals.pending(token)
    assert [one.tool_call_id for one in found] == seen
    for call in ("call-1", "call-2", "call-3"):
        if call in seen:
            await desk.approvals.decide(token, call, False)
        else:
            with pytest.raises(NotFound):
                await desk.approvals.decide(token, call, False)


async def test_pending_ones_come_in_pages_in_their_order(desk: Desk) -> None:
    for _ in range(5):
        await desk.ask()
    pages, cursor = [], None
    while True:
        found, cursor = await desk.approvals.pending(ME, limit=2, cursor=cursor)
        pages.append([one.tool_call_id for one in found])
        if cursor is None:
            break
    assert pages == [["call-1", "call-2"], ["call-3", "call-4"], ["call-5"]]


@pytest.mark.parametrize("cursor", ["", "-1", "²", "9" * 30])
async def test_a_cursor_that_was_never_given_out_is_refused(desk: Desk, cursor: str) -> None:
    with pytest.raises(BadRequest):
        await desk.approvals.pending(ME, cursor=cursor)


# -- what is remembered ----------------------------------------------------------------------------


async def test_an_exact_rule_allows_that_command_there_and_nothing_else(desk: Desk) -> None:
    await desk.ask(HERE, "make test")
    assert not await desk.allowed(HERE, "make test")
    decided = await desk.approvals.decide(ME, "call-1", True, remember="exact")
    assert decided.decision is not None
    assert decided.decision.remembered == "exact"
    assert await desk.allowed(HERE, "make test")
    assert not await desk.allowed(HERE, "make test -n")
    assert not await desk.allowed(THERE, "make test")
    assert not await desk.allowed(YOURS, "make test")
    assert not await desk.allowed(HERE, "make test", tool="run_code")


@pytest.mark.parametrize("place", [replace(HERE, user_id="bob"), replace(HERE, agent_id="other")])
async def test_a_rule_does_not_count_in_a_conversation_of_the_same_name(
    desk: Desk, records: ApprovalStore, place: AgentContext
) -> None:
    """Each user and agent of an owner may have one."""
    if not records._in_memory:
        await chats.ensure(records._store, chat("chat-alike", place))
    await desk.ask(HERE, "make test")
    await desk.approvals.decide(ME, "call-1", True, remember="exact")
    assert await desk.allowed(HERE, "make test")
    assert not await desk.allowed(place, "make test")


async def test_a_prefix_allows_simple_commands_that_begin_with_its_words(desk: Desk) -> None:
    await desk.ask(HERE, "git status")
    await desk.approvals.decide(ME, "call-1", True, remember="prefix", prefix="git status")
    assert await desk.allowed(HERE, "git status --short")
    assert not await desk.allowed(HERE, "git statusx")
    assert not await desk.allowed(HERE, "git status; rm -rf .")


async def test_a_rule_made_in_a_project_holds_in_all_its_conversations(desk: Desk) -> None:
    await desk.ask(SITE, "make test")
    await desk.approvals.decide(ME, "call-1", True, remember="exact")
    assert await desk.allowed(SITE, "make test")
    assert await desk.allowed(SITE_TOO, "make test")
    assert not await desk.allowed(HERE, "make test")
    (rule,), _ = await desk.approvals.rules(ME, project_id="project-1")
    assert (rule.project_id, rule.conversation_id) == ("project-1", None)


@pytest.mark.parametrize(
    ("approved", "remember", "prefix", "code"),
    [
        (True, "prefix", None, "prefix_missing"),
        (True, "prefix", "  ", "prefix_missing"),
        (True, "prefix", "git; rm", "invalid_prefix"),
        (True, "exact", "git", "validation_error"),
        (True, None, "git", "validation_error"),
        (False, "exact", None, "validation_error"),
    ],
)
async def test_a_wrong_answer_is_refused_and_decides_nothing(
    desk: Desk, approved: bool, remember: str | None, prefix: str | None, code: str
) -> None:
    await desk.ask()
    with pytest.raises(BadRequest) as refused:
        await desk.approvals.decide(ME, "call-1", approved, remember=remember, prefix=prefix)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert await desk.approvals.rules(ME) == ([], None)
    await desk.approvals.decide(ME, "call-1", True)


@pytest.mark.parametrize("place", [HERE, SITE])
async def test_a_reach_with_bounds_approves_a_call_and_makes_no_rule(
    desk: Desk, place: AgentContext
) -> None:
    """A token for one conversation wrote a rule for the whole project, which it could not see, and
    which still held when the token was revoked."""
    await desk.ask(place, "touch one")
    token = ApprovalScope("me", "ann", "coder", place.conversation_id)
    assert (await desk.approvals.get(ME, "call-1")).remember_as == ("exact", "prefix")
    assert (await desk.approvals.get(token, "call-1")).remember_as == ()
    with pytest.raises(Denied) as refused:
        await desk.approvals.decide(token, "call-1", True, remember="prefix", prefix="touch")
    assert refused.value.code == "rule_not_permitted"
    assert await desk.approvals.rules(ME) == ([], None)
    decided = await desk.approvals.decide(token, "call-1", True, by="me tok-1")
    assert decided.decision is not None
    assert decided.decision.by == "me tok-1"
    assert not await desk.allowed(place, "touch one")


async def test_a_command_too_long_to_remember_can_be_approved_for_once(desk: Desk) -> None:
    pending = await desk.ask(HERE, "echo " + "x" * 20_000)
    assert pending.approval.remember_as == ("prefix",)
    with pytest.raises(BadRequest) as refused:
        await desk.approvals.decide(ME, "call-1", True, remember="exact")
    assert refused.value.code == "not_remembered"
    await desk.approvals.decide(ME, "call-1", True)


async def test_only_the_rule_of_the_answer_that_counts_is_kept_and_once(desk: Desk) -> None:
    for _ in range(2):
        await desk.ask(HERE, "git log")
    prefixes = ["git log", "git diff", "git show"]
    answers = await asyncio.gather(
        *(
            desk.approvals.decide(ME, "call-1", True, remember="prefix", prefix=prefix)
            for prefix in prefixes
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(one, SbxError) for one in answers) == 2
    (rule,), _ = await desk.approvals.rules(ME)
    assert rule.text in prefixes
    await desk.approvals.decide(ME, "call-2", True, remember="prefix", prefix=rule.text)
    assert await desk.approvals.rules(ME) == ([rule], None)


async def test_rules_are_listed_in_pages_and_revoked(desk: Desk) -> None:
    for number in range(3):
        await desk.ask(HERE, f"make {number}")
        await desk.approvals.decide(ME, f"call-{number + 1}", True, remember="exact")
    first, cursor = await desk.approvals.rules(ME, conversation_id="talk", limit=2)
    assert [rule.text for rule in first] == ["make 0", "make 1"]
    (last,), end = await desk.approvals.rules(ME, limit=2, cursor=cursor)
    assert (last.text, end) == ("make 2", None)
    assert last.to_json() == {
        "id": last.id,
        "tool_name": "execute_command",
        "kind": "exact",
        "text": "make 2",
        "by": "me",
        "created_at": desk.clock.now(),
        "conversation_id": "talk",
    }
    await desk.approvals.revoke(ME, last.id)
    assert not await desk.allowed(HERE, "make 2")
    assert await desk.allowed(HERE, "make 1")
    with pytest.raises(NotFound):
        await desk.approvals.revoke(ME, last.id)


async def test_rules_beyond_ones_bounds_are_not_there(desk: Desk) -> None:
    for number, place in enumerate((HERE, THERE, SITE), 1):
        await desk.ask(place, "make test")
        await desk.approvals.decide(ME, f"call-{number}", True, remember="exact")
    (here, there, site), _ = await desk.approvals.rules(ME)
    ann = ApprovalScope("me", user_id="ann")
    talk = ApprovalScope("me", conversation_id="talk")
    assert (await desk.approvals.rules(ann))[0] == [here]
    assert (await desk.approvals.rules(talk))[0] == [here]
    assert not (await desk.approvals.rules(talk, conversation_id="chat"))[0]
    assert not (await desk.approvals.rules(YOU))[0]
    for reach, rule in ((ann, there), (ann, site), (talk, there), (YOU, here)):
        with pytest.raises(NotFound):
            await desk.approvals.revoke(reach, rule.id)
    await desk.approvals.revoke(ann, here.id)


# -- a restart -------------------------------------------------------------------------------------


async def test_what_was_pending_at_a_restart_is_denied_and_says_why(
    desk: Desk, records: ApprovalStore
) -> None:
    await desk.ask()
    await desk.ask()
    await desk.approvals.decide(ME, "call-2", True)
    again = Approvals(records, desk.clock)
    (denied,) = await again.recover()
    assert denied.tool_call_id == "call-1"
    assert denied.decision is not None
    assert "restarted" in denied.decision.why
    with pytest.raises(Conflict) as late:
        await again.decide(ME, "call-1", True)
    assert late.value.details["by"] == "restart"
    assert await again.pending(ME) == ([], None)
    assert await again.recover() == []


async def test_a_rule_is_revoked_at_once_though_the_store_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revocation failed, and the rule continued to allow commands."""
    monkeypatch.setattr(database, "_BUSY_S", 0.1)
    async with await Store.open(tmp_path / "sbx.db") as store:
        await chats.ensure(store, chat("chat-1", HERE))
        pending = PendingWrites(store)
        desk = Desk(Approvals(ApprovalStore(store, pending), FakeClock()), FakeClock())
        asked = await desk.ask()
        await desk.approvals.decide(ME, asked.approval.tool_call_id, True, remember="exact")
        (rule,), _ = await desk.approvals.rules(ME)
        assert await desk.allowed(HERE, "make test")
        with closing(sqlite3.connect(tmp_path / "sbx.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert not await desk.approvals.revoke(ME, rule.id)
            assert not await desk.allowed(HERE, "make test")
            assert await desk.approvals.rules(ME) == ([], None)
            with pytest.raises(NotFound):
                await desk.approvals.revoke(ME, rule.id)
        await pending.close()
        assert await store.row("SELECT 1 FROM approval_rules") is None
