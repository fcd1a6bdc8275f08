"""Kept sandboxes of a real service get a ready kernel at their first run and keep its workspace."""

import asyncio
import os
from pathlib import Path

import pytest
from kept import ME, a_house, begin, eventually, printed, run

from sbx.errors import BadRequest, Unavailable
from sbx.kernels.pool.warm_pool import Pool
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.service.lifecycle import State
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service
from sbx.store import workspaces

pytestmark = pytest.mark.needs("namespaces")


async def ready(house: Service) -> PrewarmedSandbox:
    """The home that the next new sandbox gets, with its kernel."""
    await house.runtime.warm(count=1, new=True)
    berth = pool(house)._berths[0]
    assert isinstance(berth.home, PrewarmedSandbox)
    return berth.home


def pool(house: Service) -> Pool:
    assert house.runtime._starter is not None
    (found,) = house.runtime._starter._pools.values()
    return found


def living(house: Service, sandbox_id: str) -> ServiceSandbox:
    (found,) = (one for one in house.sandboxes.every() if one.id == sandbox_id)
    return found


@pytest.mark.core
async def test_first_run_moves_the_sandbox_into_a_home_that_is_its_own_from_then_on(
    tmp_path: Path,
) -> None:
    async with a_house(tmp_path / "data") as house:
        home = await ready(house)
        made = await house.sandboxes.create(ME)
        assert (await house.sandboxes.get(ME, made.id)).state is State.IDLE
        assert house.runtime.starts.served == {}
        first = await run(house, made.id, "open('kept', 'w').write('1'); here = 1")
        assert first.status == "ok"
        assert house.runtime.starts.served == {"pool": 1}
        one = living(house, made.id)
        assert one.workspace.directory == home.directory
        assert home.directory not in house.runtime.homes
        await house.sandboxes.stop(ME, made.id)
        assert (await run(house, made.id, "open('kept').read()")).result == "'1'"
        uid = one.workspace.uid
        assert (uid is not None) is (os.geteuid() == 0)
    async with a_house(tmp_path / "data") as house:
        assert (await run(house, made.id, "open('kept').read()")).result == "'1'"
        assert living(house, made.id).workspace.uid == uid
        await house.sandboxes.delete(ME, made.id)
        await eventually(lambda: home.directory not in house.runtime.data.sandboxes())


async def test_any_first_conversation_gets_it_and_the_next_one_its_own(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data") as house:
        await ready(house)
        made = await house.sandboxes.create(ME)
        told = "import os; open('mine', 'w').close(); sorted(os.listdir())"
        one, other = await asyncio.gather(
            *(run(house, made.id, told, conversation=name) for name in ("a", "b"))
        )
        assert one.result == other.result == "['mine', 'uploads']"
        rest = [await run(house, made.id, "1", conversation=name) for name in ("a", "b")]
        assert [each.state_lost for each in rest] == [False, False]
        known = await living(house, made.id).hooks.conversations()
        assert len({row.directory for row in known.values()}) == 2


async def test_sandbox_with_files_stays_where_they_are(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data") as house:
        home = await ready(house)
        made = await house.sandboxes.create(ME)
        async with house.sandboxes.using(ME, made.id, scope="files:write", starts=False) as use:
            await use.conversation().files.write("first", b"1")
        assert (await run(house, made.id, "open('first').read()")).result == "'1'"
        assert living(house, made.id).workspace.directory != home.directory


async def test_collection_leaves_homes_alone_that_nobody_owns_yet(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data") as house:
        home = await ready(house)
        await house.reaper.collect()
        made = await house.sandboxes.create(ME)
        assert (await run(house, made.id, "open('kept', 'w').write('1')")).result == "1"
        assert living(house, made.id).workspace.directory == home.directory
        await house.reaper.collect()
        assert (await run(house, made.id, "open('kept').read()")).result == "'1'"


async def test_home_with_the_uid_of_somebody_s_files_is_not_moved_into(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root every sandbox has the uid of the runtime")
    async with a_house(tmp_path / "data") as house:
        first = await house.sandboxes.create(ME)
        await run(house, first.id, "1")
        home = await ready(house)
        workspace = living(house, first.id).workspace.id
        await house.store.write(
            lambda on: on.execute(
                "UPDATE workspaces SET uid = ? WHERE id = ?", (home.host.uid, workspace)
            )
        )
        made = await house.sandboxes.create(ME)
        assert (await run(house, made.id, "1 + 1")).result == "2"
        one = living(house, made.id).workspace
        assert (one.directory, one.uid) != (home.directory, home.host.uid)
        await eventually(lambda: home.directory not in house.runtime.homes)
        assert home.directory not in house.runtime.data.sandboxes()


async def test_refused_move_leaves_neither_kernel_nor_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise OSError("the disk is full")

    async with a_house(tmp_path / "data") as house:
        home = await ready(house)
        made = await house.sandboxes.create(ME)
        with monkeypatch.context() as patch:
            patch.setattr(workspaces, "move_in", fail)
            with pytest.raises(Exception, match="the disk is full"):
                await run(house, made.id, "1")
        assert home.directory not in house.runtime.homes
        assert home.directory not in house.runtime.data.sandboxes()
        assert (await run(house, made.id, "1 + 1")).result == "2"


async def test_runtime_that_dies_leaves_a_home_that_the_next_one_sweeps(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data") as house:
        home = await ready(house)
        (tmp_path / "data" / "sandboxes" / home.directory).rename(tmp_path / "aside")
        left = tmp_path / "aside"
    left.rename(tmp_path / "data" / "sandboxes" / home.directory)
    async with a_house(tmp_path / "data") as house:
        assert home.directory not in house.runtime.data.sandboxes()


async def test_kernel_that_may_not_be_started_does_not_wait_in_its_home(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data", kernels_per_owner=1) as house:
        first = await house.sandboxes.create(ME)
        handle = await begin(
            house, first.id, "import time; print('on', flush=True); time.sleep(60)"
        )
        await printed(handle)
        await house.runtime.warm(count=1, new=True)
        kernel = pool(house)._berths[0].kernel
        second = await house.sandboxes.create(ME)
        with pytest.raises(Unavailable, match="kernels"):
            await run(house, second.id, "1")
        assert kernel.jail.gone
        await house.sandboxes.delete(ME, first.id)
        assert (await run(house, second.id, "1 + 1")).result == "2"


async def test_kernels_that_nothing_was_started_in_do_not_add_up_beyond_the_limits(
    tmp_path: Path,
) -> None:
    async with a_house(tmp_path / "data", kernels_max=1) as house:
        await ready(house)
        kernel = pool(house)._berths[0].kernel
        made = await house.sandboxes.create(ME)
        with pytest.raises(BadRequest):
            async with house.sandboxes.using(
                ME, made.id, scope="execute", conversation="default"
            ) as use:
                await use.conversation().run("1", timeout=-1)
        assert kernel.jail.gone
        assert living(house, made.id).kernels == 0
        assert (await run(house, made.id, "1 + 1")).result == "2"


async def test_stop_beside_a_use_ends_a_kernel_that_was_not_used_yet(tmp_path: Path) -> None:
    async with a_house(tmp_path / "data") as house:
        await ready(house)
        kernel = pool(house)._berths[0].kernel
        made = await house.sandboxes.create(ME)
        use = house.sandboxes.using(ME, made.id, scope="execute", conversation="default")
        async with use:
            await house.sandboxes.stop(ME, made.id)
            assert kernel.jail.gone
