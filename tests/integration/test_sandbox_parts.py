"""What belongs to kept sandboxes: owners, conversations, workspaces, events, pages."""

import asyncio
from pathlib import Path

import pytest
from persistent_sandboxes import (
    ME,
    OTHER,
    begin,
    directories,
    eventually,
    open_service,
    printed,
    run,
)

from sbx.errors import BadRequest, Conflict, NotFound
from sbx.service.caller import Caller
from sbx.service.lifecycle import State
from sbx.service.models import SessionIdentity

HANG = "import time; print('on', flush=True); time.sleep(60)"


async def test_callers_see_what_is_theirs(tmp_path: Path) -> None:
    token = Caller("me", "token", user_id="u", agent_id="a", conversation_id="c")
    reader = Caller("me", "token", user_id="u", scopes=frozenset({"files:read"}))
    async with open_service(tmp_path / "data") as service:
        plain = await service.sandboxes.create(ME)
        who = SessionIdentity("sb-session-u-a", "u", "a")
        session = await service.sandboxes.create(ME, session=who)
        for caller in (OTHER, token, reader):
            with pytest.raises(NotFound):
                await service.sandboxes.get(caller, plain.id)
        assert [one.id for one in (await service.sandboxes.list(token)).items] == [session.id]
        assert len((await service.sandboxes.list(ME)).items) == 2
        assert not (await service.sandboxes.list(OTHER, all_owners=True)).items
        boss = Caller("boss", "peer", operator=True)
        assert len((await service.sandboxes.list(boss, all_owners=True)).items) == 2
        async with service.sandboxes.using(token, session.id, scope="execute") as use:
            assert use.conversation("c").name == "c"
            with pytest.raises(NotFound):
                use.conversation("d")
        for act in (service.sandboxes.stop, service.sandboxes.delete):
            with pytest.raises(NotFound):
                await act(token, session.id)
        with pytest.raises(NotFound):
            await service.sandboxes.delete(reader, session.id)
        with pytest.raises(NotFound):
            async with service.sandboxes.using(reader, session.id, scope="execute"):
                pass
        with pytest.raises(NotFound):
            async with service.sandboxes.using(
                token, session.id, scope="files:read", conversation="default"
            ):
                pass
        with pytest.raises(NotFound):
            await service.sandboxes.create(token)


@pytest.mark.full_tier
@pytest.mark.core
async def test_conversations_are_kept_apart_and_deleted_for_good(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        for name in ("one", "two 😀\\"):
            await run(service, made.id, f"open('f', 'w').write({name!r})", conversation=name)
        found = await service.sandboxes.conversations(ME, made.id)
        assert [(one.name, one.status, one.files) for one in found] == [
            ("one", "ready", 1),
            ("two 😀\\", "ready", 1),
        ]
        handle = await begin(service, made.id, HANG, conversation="one")
        await printed(handle)
        await service.sandboxes.delete_conversation(ME, made.id, "one")
        ended = await handle.result()
        assert ended.error is not None
        assert ended.error.name == "ConversationDeleted"
        await service.sandboxes.delete_conversation(ME, made.id, "one")
        assert [one.name for one in await service.sandboxes.conversations(ME, made.id)] == [
            "two 😀\\"
        ]
        fresh = await run(
            service, made.id, "import os; print(os.path.exists('f'))", conversation="one"
        )
        assert (fresh.stdout, fresh.state_lost) == ("False\n", False)
        with pytest.raises(BadRequest):
            await run(service, made.id, "1", conversation="a/b")


@pytest.mark.full_tier
async def test_a_workspace_outlives_its_sandboxes(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        workspace = await service.workspaces.create(ME, size_limit_mb=5)
        first = await service.sandboxes.create(ME, workspace_id=workspace.id)
        assert first.policy.limits.workspace_max == 5 << 20
        await run(service, first.id, "open('f', 'w').write('kept')")
        with pytest.raises(Conflict) as refused:
            await service.workspaces.delete(ME, workspace.id)
        assert refused.value.details == {"active_sandbox_ids": [first.id]}
        await service.sandboxes.delete(ME, first.id)
        second = await service.sandboxes.create(ME, workspace_id=workspace.id)
        assert (await run(service, second.id, "print(open('f').read())")).stdout == "kept\n"
        with pytest.raises(NotFound):
            await service.sandboxes.create(OTHER, workspace_id=workspace.id)
        own = await service.sandboxes.create(ME)
        with pytest.raises(Conflict) as managed:
            await service.workspaces.delete(ME, own.workspace_id)
        assert managed.value.details == {"managed_by_sandbox_id": own.id}
        await service.sandboxes.delete(ME, second.id)
    async with open_service(tmp_path / "data") as service:
        third = await service.sandboxes.create(ME, workspace_id=workspace.id)
        assert (await run(service, third.id, "print(open('f').read())")).stdout == "kept\n"
        await service.sandboxes.delete(ME, third.id)
        await service.workspaces.delete(ME, workspace.id)
        with pytest.raises(NotFound):
            await service.sandboxes.create(ME, workspace_id=workspace.id)
        left = await service.sandboxes.list(ME)
        assert len(directories(service)) <= len(left.items)


async def test_events_are_followed_to_the_tombstone(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME, ttl_s=10)
        seen: list[str] = []

        async def follow() -> None:
            async for event in service.events.follow(ME, made.id):
                seen.append(event.type)  # noqa: PERF401  # it is looked at meanwhile

        following = asyncio.create_task(follow())
        await eventually(lambda: seen == ["created"])
        await service.sandboxes.extend(ME, made.id, 5)
        await eventually(lambda: len(seen) == 2)
        await service.sandboxes.delete(ME, made.id)
        async with asyncio.timeout(60):
            await following
        assert seen == ["created", "extended", "deleted"]
        again = [event.type async for event in service.events.follow(ME, made.id)]
        assert again == seen


@pytest.mark.full_tier
@pytest.mark.core
async def test_two_sandboxes_share_a_workspace_at_the_same_time(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        workspace = await service.workspaces.create(ME)
        one, two = [await service.sandboxes.create(ME, workspace_id=workspace.id) for _ in range(2)]
        await run(service, one.id, "open('f', 'w').write('1')")
        assert (await run(service, two.id, "open('f', 'a').write('2')")).ok
        assert (await run(service, one.id, "print(open('f').read())")).stdout == "12\n"
        await service.sandboxes.delete(ME, one.id)
        assert (await run(service, two.id, "print(open('f').read())")).stdout == "12\n"
        await service.sandboxes.delete_conversation(ME, two.id, "default")
        again = await run(service, two.id, "import os; print(os.path.exists('f'))")
        assert again.stdout == "False\n"


async def test_a_sandbox_whose_policy_was_taken_away_says_so(tmp_path: Path) -> None:
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "own.toml").write_text('schema = 1\nextends = "default"\n')
    data = tmp_path / "data"
    async with open_service(data, policy_dirs=(policies,)) as service:
        made = await service.sandboxes.create(ME, policy="own")
    (policies / "own.toml").unlink()
    async with open_service(data, policy_dirs=(policies,)) as service:
        view = await service.sandboxes.get(ME, made.id)
        assert (view.state, view.policy_name) == (State.FAILED, "own")
        assert view.failure is not None
        assert view.failure["code"] == "policy_not_found"
        with pytest.raises(NotFound, match="own"):
            await run(service, made.id, "1")
        await service.sandboxes.delete(ME, made.id)
