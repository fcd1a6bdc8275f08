"""How many sandboxes and kernels there may be, and who makes room."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from persistent_sandboxes import ME, OTHER, begin, open_service, printed, run, state_events

from sbx.errors import NotFound, Unavailable
from sbx.service.caller import Caller
from sbx.service.lifecycle import State
from sbx.service.sandbox import ServiceSandbox

HANG = "import time; print('on', flush=True); time.sleep(60)"


@pytest.mark.full_tier
async def test_past_a_limit_of_kernels_the_least_recently_used_idle_one_goes(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path / "data", kernels_max=2) as service:
        made = [await service.sandboxes.create(ME) for _ in range(3)]
        for one in made:
            await run(service, one.id, "x = 1")
        states = [(await service.sandboxes.get(ME, one.id)).state for one in made]
        assert states == [State.IDLE, State.READY, State.READY]
        assert ("stopped", "kernels_max") in await state_events(service, made[0].id)
        handles = [await begin(service, one.id, HANG) for one in made[1:]]
        for handle in handles:
            await printed(handle)
        with pytest.raises(Unavailable) as full:
            await run(service, made[0].id, "1")
        assert full.value.code == "too_many_kernels"
        assert full.value.details["limit"] == 2
        assert (await service.sandboxes.get(ME, made[0].id)).state is State.IDLE  # it did not fail
        await handles[0].interrupt()
        await handles[0].result()
        assert (await run(service, made[0].id, "1")).state_lost


@pytest.mark.full_tier
async def test_short_memory_ends_idle_kernels_before_the_host_swaps(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = [await service.sandboxes.create(ME) for _ in range(2)]
        for one in made:
            await run(service, one.id, "x = 1")
        available = [(1, 100), (50, 100)]
        service.reaper._available = lambda: available.pop(0) if len(available) > 1 else available[0]
        service.reaper._reserve = lambda total: total // 10  # type: ignore[method-assign]
        await service.reaper.round()
        states = [(await service.sandboxes.get(ME, one.id)).state for one in made]
        assert states == [State.IDLE, State.READY]
        assert ("stopped", "memory_pressure") in await state_events(service, made[0].id)


async def test_past_a_limit_of_sandboxes_there_is_nothing_half_done(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", sandboxes_max=3, sandboxes_per_owner=2) as service:
        ends = await asyncio.gather(
            *(service.sandboxes.create(ME) for _ in range(5)), return_exceptions=True
        )
        codes = sorted(getattr(end, "code", "made") for end in ends)
        assert codes == ["made", "made", *["too_many_sandboxes"] * 3]
        await service.sandboxes.create(OTHER)
        with pytest.raises(Unavailable) as full:
            await service.sandboxes.create(Caller("third", "key"))
        assert full.value.details["limit"] == 3
        await service.sandboxes.delete(ME, (await service.sandboxes.list(ME)).items[0].id)
        await service.sandboxes.create(Caller("third", "key"))


async def test_a_sandbox_counts_once_while_it_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one counted twice until its caller ran again: of many at once, some were refused below
    the limit."""
    async with open_service(tmp_path / "data", sandboxes_per_owner=2) as service:
        index = service.sandboxes.index
        add = index.add

        def added(sandbox: ServiceSandbox) -> None:
            add(sandbox)
            index._check_room(ME.owner)

        monkeypatch.setattr(index, "add", added)
        await service.sandboxes.create(ME)


async def test_past_a_limit_of_workspaces_an_owner_makes_none(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", workspaces_per_owner=3) as service:
        await service.sandboxes.create(ME)  # whose own does not count
        ends = await asyncio.gather(
            *(service.workspaces.create(ME) for _ in range(6)), return_exceptions=True
        )
        codes = sorted(getattr(end, "code", "made") for end in ends)
        assert codes == ["made"] * 3 + ["too_many_workspaces"] * 3
        with pytest.raises(Unavailable) as full:
            await service.workspaces.create(ME)
        assert full.value.details["limit"] == 3
        await service.workspaces.create(OTHER)
        await service.workspaces.delete(ME, (service.workspaces.list(ME)).items[0].id)
        await service.workspaces.create(ME)


# -- open files ------------------------------------------------------------------------------------


def open_here() -> int:
    return len(os.listdir("/proc/self/fd"))


async def pieces(text: str) -> AsyncIterator[bytes]:
    for letter in text:
        await asyncio.sleep(0.001)
        yield letter.encode()


@pytest.mark.full_tier
async def test_whoever_touches_many_conversations_leaves_descriptors_for_others(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        service.sandboxes.open_limit.most = 5
        async with service.sandboxes.using(ME, made.id, scope="files:write") as use:
            await use.conversation("c0").files.write("kept", "0")
            before = open_here()
            for number in range(1, 60):
                await use.conversation(f"c{number}").files.write("kept", str(number))
            assert open_here() <= before + 5 * 4
            for number in range(60):
                talk = use.conversation(f"c{number}")
                assert await talk.files.read("kept") == str(number)
                await talk.uploads.put_bytes("up", b"u")
            assert open_here() <= before + 5 * 4
            assert len(service.sandboxes.open_limit) <= 5
        await service.sandboxes.delete_conversation(ME, made.id, "c59")
        await service.sandboxes.stop(ME, made.id)
        assert len(service.sandboxes.open_limit) == 0


async def test_files_that_are_in_use_are_not_put_away(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        service.sandboxes.open_limit.most = 1
        await run(service, made.id, "open('mine', 'w').write('m')", conversation="alive")
        async with service.sandboxes.using(ME, made.id, scope="files:write") as use:

            async def once(number: int) -> None:
                talk = use.conversation(f"c{number}")
                text = f"{number:04}" * 5
                assert await talk.files.write_stream("slow", pieces(text)) == 20
                async with await talk.files.open_stream("slow") as stream:
                    await use.conversation(f"c{number + 1}").files.list()
                    assert b"".join([one async for one in stream.chunks()]) == text.encode()
                assert (await talk.uploads.put_stream("u", pieces("abc"))).size == 3
                assert await talk.uploads.read_bytes("u") == b"abc"

            await asyncio.gather(*(once(number) for number in range(20)))
            assert await use.conversation("alive").files.read("mine") == "m"
            await run(service, made.id, "import os; os._exit(1)", conversation="alive")
            async with asyncio.timeout(60):  # the jail of the kernel ends a moment after its run
                while len(service.sandboxes.open_limit) != 1:
                    await use.conversation("other").files.list()
        again = await run(service, made.id, "open('mine').read()", conversation="alive")
        assert (again.result, again.state_lost) == ("'m'", True)


async def test_what_only_looks_makes_no_conversation(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        workspace = await service.workspaces.create(ME)
        made = await service.sandboxes.create(ME, workspace_id=workspace.id)
        async with service.sandboxes.using(ME, made.id, scope="files:read") as use:
            for _ in range(2):
                with pytest.raises(NotFound, match="conversation 'new' does not exist"):
                    await use.existing("new")
            assert await (await use.existing("default")).uploads.list() == ()
            await use.conversation("new").files.write("a", "b")
            assert await (await use.existing("new")).files.read("a") == "b"
        other = await service.sandboxes.create(ME, workspace_id=workspace.id)
        async with service.sandboxes.using(ME, other.id, scope="files:read") as use:
            assert await (await use.existing("new")).files.read("a") == "b"
        names = [one.name for one in await service.sandboxes.conversations(ME, made.id)]
        assert names == ["default", "new"]
