"""What the store remembers of agents, over reopening: chats, messages, runs, projects; and that all
of it goes with what it belongs to."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from persistent_sandboxes import ME, open_service

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.calls import AgentToolCalls
from sbx.agent.history import Kept, StoredHistory, repair_history
from sbx.agent.messages import Image, Message, ToolCall
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import denied
from sbx.errors import Conflict, NotFound, TooLarge
from sbx.protocol.agent import AgentEvent, ToolStart
from sbx.protocol.approvals import Approval, ApprovalDecision, ApprovalScope, StoredApprovalRule
from sbx.service.service import Service
from sbx.service.session_rules import SessionRules
from sbx.service.sessions import SessionAsk, Sessions
from sbx.store import Store, agent_runs, chats, projects
from sbx.store.agent_runs import AgentRunRow
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages
from sbx.store.projects import ProjectRow
from tests.fake_clock import FakeClock
from tests.fake_sandbox import FakeSandbox

CHAT = ChatRow("chat-1", "me", "talk", "ann", "coder", 1.0, 1.0)
PROJECT = ProjectRow("project-1", "me", "site", "/srv/site", True, 1.0)
RUN = AgentRunRow("arun-1", "chat-1", "replay", 10, started_at=5.0)
NO = ApprovalDecision(False, "me", 2.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sbx.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    async with await Store.open(path) as store:
        yield store


def messages_of(store: Store, **limits: int) -> Messages:
    return Messages(store, FakeClock(100.0), **limits)


async def history_of(store: Store, chat: ChatRow = CHAT) -> StoredHistory:
    return StoredHistory(messages_of(store), (await chats.ensure(store, chat)).id)


# -- chats -----------------------------------------------------------------------------------------


async def test_a_conversation_has_one_chat_whoever_comes_first(store: Store) -> None:
    several = [structs.replace(CHAT, id=f"chat-{number}") for number in range(5)]
    found = await asyncio.gather(*(chats.ensure(store, one) for one in several))
    assert len({chat.id for chat in found}) == 1
    assert await chats.named(store, "me", "talk") == found[:1]
    assert await chats.named(store, "you", "talk") == []
    assert (
        await chats.ensure(store, structs.replace(CHAT, id="chat-you", owner="you"))
    ).id == "chat-you"


async def test_a_chat_that_goes_on_keeps_its_beginning(store: Store) -> None:
    await store.write(lambda on: projects.add(on, PROJECT))
    begun = structs.replace(CHAT, project_id="project-1")
    await chats.ensure(store, begun)
    later = structs.replace(
        CHAT, id="chat-2", created_at=9.0, last_used_at=9.0
    )  # says nothing of projects
    assert await chats.ensure(store, later) == structs.replace(begun, last_used_at=9.0)
    assert await chats.named(store, "me", "talk") == [structs.replace(begun, last_used_at=9.0)]
    assert [one.id for one in await chats.list_for_owner(store, "me")] == ["chat-1"]


async def test_the_conversation_of_another_project_is_a_conflict(store: Store) -> None:
    await store.write(lambda on: projects.add(on, PROJECT))
    await chats.ensure(store, CHAT)
    with pytest.raises(Conflict) as refused:
        await chats.ensure(store, structs.replace(CHAT, project_id="project-1"))
    assert refused.value.code == "conversation_of_another"
    assert await chats.named(store, "me", "talk") == [CHAT]


@pytest.mark.parametrize("other", [{"user_id": "bob"}, {"agent_id": "writer"}])
async def test_each_user_and_agent_has_its_own_conversation_ids(
    store: Store, other: dict[str, str]
) -> None:
    """The first user of a conversation id once kept every other user out of it."""
    theirs = structs.replace(CHAT, id="talk-other", **other)
    await chats.ensure(store, CHAT)
    assert await chats.ensure(store, theirs) == theirs
    assert len(await chats.named(store, "me", "talk")) == 2
    assert await chats.named(store, "me", "talk", **other) == [theirs]
    assert await chats.delete(store, theirs.id)
    assert await chats.named(store, "me", "talk") == [CHAT]


async def test_a_chat_needs_its_project(store: Store) -> None:
    await store.write(lambda on: projects.add(on, structs.replace(PROJECT, owner="you")))
    for project_id in ("project-0", "project-1"):
        with pytest.raises(NotFound):
            await chats.ensure(store, structs.replace(CHAT, project_id=project_id))


# -- messages --------------------------------------------------------------------------------------


async def test_messages_are_there_in_their_order_when_opened_again(path: Path) -> None:
    said = [
        Message("user", "draw \ud800 it, plötzlich"),
        Message("assistant", "", (ToolCall("call-1", "run_code", "{no json"),)),
        Message("tool", "ok", (), "call-1", "run_code", True, (Image("image/png", "aGk="),)),
    ]
    async with await Store.open(path) as store:
        history = await history_of(store)
        await history.append(said[:1])
        await history.append(said[1:])
        await history.append([Message("summary", "it was drawn")], covers=2)
    async with await Store.open(path) as store:
        kept = await (await history_of(store)).messages()
    assert kept == [
        *(Kept(number, message, 100.0) for number, message in enumerate(said, 1)),
        Kept(4, Message("summary", "it was drawn"), 100.0, covers=2),
    ]


async def test_a_history_is_given_by_parts(store: Store) -> None:
    history = await history_of(store)
    await history.append([Message("user", str(number)) for number in range(1, 8)])

    async def seqs(after: int, limit: int | None) -> list[int]:
        return [one.seq for one in await history.messages(after, limit)]

    assert await seqs(0, 3) == [1, 2, 3]
    assert await seqs(3, 3) == [4, 5, 6]
    assert await seqs(6, 3) == [7]
    assert await seqs(7, None) == []
    assert await seqs(2, None) == [3, 4, 5, 6, 7]
    assert await seqs(0, 0) == []


async def test_pages_say_whether_more_follows(store: Store) -> None:
    messages, chat = messages_of(store), await chats.ensure(store, CHAT)
    assert await messages.page(chat.id) == ([], False)
    await messages.append(chat.id, [{"role": "user", "content": str(n)} for n in range(4)])
    rows, more = await messages.page(chat.id, limit=3)
    assert ([row.seq for row in rows], more) == ([1, 2, 3], True)
    rows, more = await messages.page(chat.id, after=3, limit=3)
    assert ([row.seq for row in rows], more) == ([4], False)
    rows, more = await messages.page(chat.id, limit=4)
    assert (len(rows), more) == (4, False)


@pytest.mark.full_tier
async def test_a_page_of_long_messages_ends_early_and_a_history_is_whole(store: Store) -> None:
    history = await history_of(store)
    for _ in range(5):
        await history.append([Message("user", "x" * (3 << 20))])
    rows, more = await messages_of(store).page("chat-1")
    assert (len(rows), more) == (3, True)
    assert [one.seq for one in await history.messages()] == [1, 2, 3, 4, 5]


async def test_all_messages_of_one_call_or_none(store: Store) -> None:
    messages, chat = messages_of(store, message_max=1000), await chats.ensure(store, CHAT)
    small, large = ({"role": "user", "content": "x" * size} for size in (10, 1000))
    for wrong in ([small, large], [small, {"role": "user", "content": "ä" * 300}]):
        with pytest.raises(TooLarge):
            await messages.append(chat.id, wrong)
    assert await messages.page(chat.id) == ([], False)


async def test_appending_at_once_gives_each_its_place(store: Store) -> None:
    history = await history_of(store)
    await asyncio.gather(*(history.append([Message("user", "a")] * 3) for _ in range(10)))
    assert [one.seq for one in await history.messages()] == list(range(1, 31))


async def test_a_message_of_100_mb_is_refused(store: Store) -> None:
    history = await history_of(store)
    with pytest.raises(TooLarge) as refused:
        await history.append([Message("tool", "x" * 100_000_000, tool_call_id="call-1")])
    assert refused.value.details == {"limit": 16 << 20}
    assert await history.messages() == []


async def test_a_history_has_an_end(store: Store) -> None:
    messages, chat = messages_of(store, chat_max=1000), await chats.ensure(store, CHAT)
    said = {"role": "user", "content": "x" * 300}
    await messages.append(chat.id, [said, said])
    with pytest.raises(TooLarge) as refused:
        await messages.append(chat.id, [said, said])
    assert refused.value.code == "history_full"
    assert len((await messages.page(chat.id))[0]) == 2


async def test_a_run_that_outlives_its_chat_writes_nothing_into_the_next(store: Store) -> None:
    history = await history_of(store)
    await history.append([Message("user", "hello")])
    assert await chats.delete(store, CHAT.id)
    assert not await chats.delete(store, CHAT.id)
    again = await history_of(store, structs.replace(CHAT, id="chat-2"))
    with pytest.raises(NotFound):
        await history.append([Message("assistant", "hello!")])
    assert await history.messages() == await again.messages() == []


async def test_a_stored_history_is_mended_like_any_other(store: Store) -> None:
    history = await history_of(store)
    call = ToolCall("call-1", "execute_command", "{}")
    await history.append([Message("user", "make it")])
    await history.append([Message("assistant", "", (call,))])
    result = denied(ApprovalDecision(False, "restart", 1.0))
    kept = await repair_history(history, {"call-1": result})
    message = Message("tool", result.text, (), "call-1", "execute_command", is_error=True)
    assert kept[-1].message == structs.replace(message, error=result.error)
    assert await repair_history(history) == kept


# -- runs of agents --------------------------------------------------------------------------------


async def test_one_run_at_a_time_in_a_chat(store: Store) -> None:
    await chats.ensure(store, CHAT)
    several = [structs.replace(RUN, id=f"arun-{number}") for number in range(4)]
    begun = await asyncio.gather(
        *(agent_runs.begin(store, one) for one in several), return_exceptions=True
    )
    refused = [one for one in begun if one is not None]
    assert len(refused) == 3
    assert {getattr(one, "code", None) for one in refused} == {"run_in_progress"}
    (running,) = await agent_runs.list_for_chat(store, "chat-1")
    await agent_runs.end(store, running.id, reason="done", at=7.0, usage={"input_tokens": 3})
    await agent_runs.end(store, running.id, reason="error", at=8.0)  # the first end counts
    await agent_runs.begin(store, structs.replace(RUN, id="arun-9", started_at=9.0))
    second, first = await agent_runs.list_for_chat(store, "chat-1")
    assert (first.status, first.reason, first.ended_at) == ("ended", "done", 7.0)
    assert first.usage == {"input_tokens": 3}
    assert (second.id, second.status) == ("arun-9", "running")
    assert await agent_runs.list_for_chat(store, "chat-1", before=second.seq) == [first]


async def test_a_run_needs_its_chat(store: Store) -> None:
    with pytest.raises(NotFound):
        await agent_runs.begin(store, RUN)


async def test_a_run_that_the_service_took_along_says_so(path: Path) -> None:
    async with await Store.open(path) as store:
        for number in range(2):
            chat = structs.replace(CHAT, id=f"chat-{number}", conversation_id=f"talk-{number}")
            await chats.ensure(store, chat)
            await agent_runs.begin(
                store, structs.replace(RUN, id=f"arun-{number}", chat_id=chat.id)
            )
        await agent_runs.end(store, "arun-0", reason="error", at=6.0, error={"code": "x"})
    async with await Store.open(path) as store:
        assert await agent_runs.mark_interrupted(store, 8.0) == 1
        assert await agent_runs.mark_interrupted(store, 9.0) == 0
        (ended,) = await agent_runs.list_for_chat(store, "chat-0")
        (died,) = await agent_runs.list_for_chat(store, "chat-1")
        assert (ended.status, ended.error) == ("ended", {"code": "x"})
        assert (died.status, died.reason, died.ended_at) == ("interrupted", None, 8.0)
        await agent_runs.begin(store, structs.replace(RUN, id="arun-2"))


# -- projects --------------------------------------------------------------------------------------


async def test_projects_are_their_owners(store: Store) -> None:
    for number in range(3):
        row = structs.replace(PROJECT, id=f"project-{number}")
        await store.write(lambda on, row=row: projects.add(on, row))  # type: ignore[misc]
    assert await projects.get(store, "me", "project-1") == PROJECT
    assert await projects.get(store, "you", "project-1") is None
    page = await projects.list_for_owner(store, "me", None, 2)
    assert [one.id for one in page] == ["project-0", "project-1"]
    assert [one.id for one in await projects.list_for_owner(store, "me", "project-1", 2)] == [
        "project-2"
    ]
    changed = structs.replace(PROJECT, name="shop", sandbox_enabled=False)
    yours = structs.replace(changed, owner="you", working_directory="/srv/other")
    assert not await store.write(lambda on: projects.change(on, yours))
    assert await store.write(lambda on: projects.change(on, changed))
    assert await projects.get(store, "me", "project-1") == changed
    assert not await store.write(lambda on: projects.delete(on, "you", "project-1"))
    assert await store.write(lambda on: projects.delete(on, "me", "project-1"))
    assert await projects.get(store, "me", "project-1") is None


# -- a call that waits ---------------------------------------------------------------------------


async def test_a_call_is_in_the_store_before_anybody_is_told_that_it_waits(
    store: Store, path: Path
) -> None:
    await chats.ensure(store, structs.replace(CHAT, conversation_id="default"))
    approvals = Approvals(ApprovalStore(store), FakeClock())
    answers: list[asyncio.Task[Approval]] = []

    def emit(event: AgentEvent) -> None:
        """Who is told at this very moment finds it on the disk, and may answer."""
        if isinstance(event, ToolStart):
            assert event.approval_required
            with closing(sqlite3.connect(path)) as other:
                found = other.execute("SELECT tool_call_id, expires_at, decided_by FROM approvals")
                state_events = (event.tool_call_id, event.expires_at, None)
                assert state_events in found.fetchall()
            yes = event.tool_args["command"] == "echo 1"
            answer = approvals.decide(ApprovalScope("me"), event.tool_call_id, yes)
            answers.append(asyncio.create_task(answer))

    calls = AgentToolCalls(
        FakeSandbox(),
        Tools(),
        emit=emit,
        run_id="arun-1",
        permissions=Permissions("project"),
        approvals=approvals,
        place=AgentContext("me", "default"),
    )
    asked = [
        ToolCall(f"call-{number}", "execute_command", f'{{"command": "echo {number}"}}')
        for number in range(3)
    ]
    async with asyncio.timeout(60):
        results = await calls.make_all(asked)
        await asyncio.gather(*answers)
    assert [result.is_error for result in results] == [True, False, True]
    assert "me said no" in results[0].text


# -- what goes with what ---------------------------------------------------------------------------


async def fill(store: Store, chat: ChatRow) -> None:
    """A chat with one row of everything that belongs to it."""
    chat = await chats.ensure(store, chat)
    await messages_of(store).append(chat.id, [{"role": "user", "content": "secret"}])
    await agent_runs.begin(store, structs.replace(RUN, id=f"arun-{chat.id}", chat_id=chat.id))
    approvals = ApprovalStore(store)
    call = f"call-{chat.id}"
    where = (chat.owner, chat.conversation_id)
    await approvals.add(Approval(call, "execute_command", {}, *where, "run", 1.0, 9.0))
    rule = StoredApprovalRule(
        f"rule-{chat.id}", chat.owner, "execute_command", "exact", "ls", "me", 1.0
    )
    await approvals.settle(call, replace(NO, approved=True), rule)


async def left(store: Store) -> set[str]:
    """The chats that any row tells of; everything that belongs to a chat is there, or nothing."""
    found = [
        {row[0] for row in await store.rows(sql)}
        for sql in (
            "SELECT id FROM chats",
            *(
                f"SELECT DISTINCT chat_id FROM {table}"
                for table in ("messages", "agent_runs", "approvals", "approval_rules")
            ),
        )
    ]
    assert all(one == found[0] for one in found), found
    return found[0]


async def test_with_a_chat_goes_all_that_was_said_and_asked(store: Store) -> None:
    await fill(store, CHAT)
    await fill(store, structs.replace(CHAT, id="chat-2", conversation_id="other"))
    assert await left(store) == {"chat-1", "chat-2"}
    await chats.delete(store, CHAT.id)
    assert await left(store) == {"chat-2"}


async def test_with_a_project_go_its_chats_and_rules(store: Store) -> None:
    await store.write(lambda on: projects.add(on, PROJECT))
    await fill(store, structs.replace(CHAT, project_id="project-1"))
    await fill(store, structs.replace(CHAT, id="chat-2", conversation_id="other"))
    assert await store.write(lambda on: projects.delete(on, "me", "project-1"))
    assert await left(store) == {"chat-2"}


async def session(service: Service, user: str = "ann") -> str:
    view, _ = await Sessions(service, SessionRules()).ensure(ME, SessionAsk(user, "coder"))
    return view.id


@pytest.mark.full_tier
async def test_chats_go_with_their_conversation_or_session_when_they_are_deleted(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path) as service:
        ann, bob = await session(service), await session(service, "bob")
        for number, (user, where) in enumerate((("ann", ann), ("ann", ann), ("bob", bob))):
            chat = structs.replace(CHAT, id=f"chat-{number}", conversation_id=f"talk-{number}")
            await fill(service.store, structs.replace(chat, user_id=user, sandbox_id=where))
        async with service.sandboxes.using(ME, ann, scope="files:write", starts=False) as use:
            await use.conversation("talk-1").files.write("a.txt", "a")
        await service.sandboxes.delete_conversation(ME, bob, "talk-0")  # not bob's
        assert await left(service.store) == {"chat-0", "chat-1", "chat-2"}
        await service.sandboxes.delete_conversation(ME, ann, "talk-0")  # without any file
        assert await left(service.store) == {"chat-1", "chat-2"}
        await service.sandboxes.delete_conversation(ME, ann, "talk-1")  # with files
        assert await left(service.store) == {"chat-2"}
        await fill(service.store, structs.replace(CHAT, sandbox_id=ann))
        await service.sandboxes.delete(ME, ann)
        assert await left(service.store) == {"chat-2"}


async def test_chats_of_an_expired_session_are_found_by_whoever_comes_back(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path, clock, tombstones_kept=100_000, files_grace=0) as service:
        first = await session(service)
        for number in range(2):
            chat = structs.replace(CHAT, id=f"chat-{number}", conversation_id=f"talk-{number}")
            await fill(service.store, structs.replace(chat, sandbox_id=first))
        clock.advance(7200)
        second = await session(service)
        assert second != first
        await service.sandboxes.delete(ME, first)  # again: the chats are the successor's by now
        assert await left(service.store) == {"chat-0", "chat-1"}
        await service.sandboxes.delete_conversation(ME, second, "talk-0")
        assert await left(service.store) == {"chat-1"}
        clock.advance(7200)
        await service.reaper.collect()  # ends the second, as expired
        assert await left(service.store) == {"chat-1"}
        await service.sandboxes.delete(ME, second)  # asked for after all
        assert await left(service.store) == set()


@pytest.mark.full_tier
async def test_chats_of_an_expired_session_end_with_its_tombstone(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path, clock, tombstones_kept=1000, files_grace=0) as service:
        await fill(service.store, structs.replace(CHAT, sandbox_id=await session(service)))
        clock.advance(7200)
        await service.reaper.collect()
        assert await left(service.store) == {"chat-1"}
        clock.advance(1001)
        await service.reaper.collect()
        assert await left(service.store) == set()


@pytest.mark.full_tier
async def test_a_service_that_starts_marks_the_runs_of_the_one_before(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        await chats.ensure(service.store, CHAT)
        await agent_runs.begin(service.store, RUN)
    async with open_service(tmp_path) as service:
        (run,) = await agent_runs.list_for_chat(service.store, "chat-1")
        assert run.status == "interrupted"
