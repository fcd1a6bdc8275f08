"""Kept sandboxes of a real service get a ready kernel at their first run and keep its workspace."""

import asyncio
import os
from pathlib import Path

import pytest
from persistent_sandboxes import ME, begin, eventually, open_service, printed, run

from sbx.errors import BadRequest, Unavailable
from sbx.kernels.pool.warm_pool import Pool
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.service.lifecycle import State
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service
from sbx.store import workspaces

pytestmark = pytest.mark.needs("namespaces")


async def ready(service: Service) -> PrewarmedSandbox:
    """The prewarmed sandbox that the next new sandbox gets, with its kernel."""
    await service.runtime.warm(count=1, new=True)
    prewarmed = pool(service)._prewarmed[0]
    assert isinstance(prewarmed.slot, PrewarmedSandbox)
    return prewarmed.slot


def pool(service: Service) -> Pool:
    assert service.runtime._starter is not None
    (found,) = service.runtime._starter._pools.values()
    return found


def living(service: Service, sandbox_id: str) -> ServiceSandbox:
    (found,) = (one for one in service.sandboxes.every() if one.id == sandbox_id)
    return found


@pytest.mark.full_tier
@pytest.mark.core
async def test_first_run_moves_the_sandbox_into_a_home_that_is_its_own_from_then_on(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path / "data") as service:
        prewarmed = await ready(service)
        made = await service.sandboxes.create(ME)
        assert (await service.sandboxes.get(ME, made.id)).state is State.IDLE
        assert service.runtime.starts.served == {}
        first = await run(service, made.id, "open('kept', 'w').write('1'); here = 1")
        assert first.status == "ok"
        assert service.runtime.starts.served == {"pool": 1}
        one = living(service, made.id)
        assert one.workspace.directory == prewarmed.directory
        assert prewarmed.directory not in service.runtime.unowned_directories
        await service.sandboxes.stop(ME, made.id)
        assert (await run(service, made.id, "open('kept').read()")).result == "'1'"
        uid = one.workspace.uid
        assert (uid is not None) is (os.geteuid() == 0)
    async with open_service(tmp_path / "data") as service:
        assert (await run(service, made.id, "open('kept').read()")).result == "'1'"
        assert living(service, made.id).workspace.uid == uid
        await service.sandboxes.delete(ME, made.id)
        await eventually(lambda: prewarmed.directory not in service.runtime.data.sandboxes())


@pytest.mark.full_tier
async def test_any_first_conversation_gets_it_and_the_next_one_its_own(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        await ready(service)
        made = await service.sandboxes.create(ME)
        state_events = "import os; open('mine', 'w').close(); sorted(os.listdir())"
        one, other = await asyncio.gather(
            *(run(service, made.id, state_events, conversation=name) for name in ("a", "b"))
        )
        assert one.result == other.result == "['mine', 'uploads']"
        rest = [await run(service, made.id, "1", conversation=name) for name in ("a", "b")]
        assert [each.state_lost for each in rest] == [False, False]
        known = await living(service, made.id).hooks.conversations()
        assert len({row.directory for row in known.values()}) == 2


@pytest.mark.full_tier
async def test_sandbox_with_files_stays_where_they_are(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        prewarmed = await ready(service)
        made = await service.sandboxes.create(ME)
        async with service.sandboxes.using(ME, made.id, scope="files:write", starts=False) as use:
            await use.conversation().files.write("first", b"1")
        assert (await run(service, made.id, "open('first').read()")).result == "'1'"
        assert living(service, made.id).workspace.directory != prewarmed.directory


@pytest.mark.full_tier
async def test_collection_leaves_homes_alone_that_nobody_owns_yet(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        prewarmed = await ready(service)
        await service.reaper.collect()
        made = await service.sandboxes.create(ME)
        assert (await run(service, made.id, "open('kept', 'w').write('1')")).result == "1"
        assert living(service, made.id).workspace.directory == prewarmed.directory
        await service.reaper.collect()
        assert (await run(service, made.id, "open('kept').read()")).result == "'1'"


async def test_home_with_the_uid_of_somebody_s_files_is_not_moved_into(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root every sandbox has the uid of the runtime")
    async with open_service(tmp_path / "data") as service:
        first = await service.sandboxes.create(ME)
        await run(service, first.id, "1")
        prewarmed = await ready(service)
        workspace = living(service, first.id).workspace.id
        await service.store.write(
            lambda on: on.execute(
                "UPDATE workspaces SET uid = ? WHERE id = ?", (prewarmed.host.uid, workspace)
            )
        )
        made = await service.sandboxes.create(ME)
        assert (await run(service, made.id, "1 + 1")).result == "2"
        one = living(service, made.id).workspace
        assert (one.directory, one.uid) != (prewarmed.directory, prewarmed.host.uid)
        await eventually(lambda: prewarmed.directory not in service.runtime.unowned_directories)
        assert prewarmed.directory not in service.runtime.data.sandboxes()


async def test_refused_move_leaves_neither_kernel_nor_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise OSError("the disk is full")

    async with open_service(tmp_path / "data") as service:
        prewarmed = await ready(service)
        made = await service.sandboxes.create(ME)
        with monkeypatch.context() as patch:
            patch.setattr(workspaces, "move_in", fail)
            with pytest.raises(Exception, match="the disk is full"):
                await run(service, made.id, "1")
        assert prewarmed.directory not in service.runtime.unowned_directories
        assert prewarmed.directory not in service.runtime.data.sandboxes()
        assert (await run(service, made.id, "1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_runtime_that_dies_leaves_a_home_that_the_next_one_sweeps(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        prewarmed = await ready(service)
        (tmp_path / "data" / "sandboxes" / prewarmed.directory).rename(tmp_path / "aside")
        left = tmp_path / "aside"
    left.rename(tmp_path / "data" / "sandboxes" / prewarmed.directory)
    async with open_service(tmp_path / "data") as service:
        assert prewarmed.directory not in service.runtime.data.sandboxes()


async def test_kernel_that_may_not_be_started_does_not_wait_in_its_home(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", kernels_per_owner=1) as service:
        first = await service.sandboxes.create(ME)
        handle = await begin(
            service, first.id, "import time; print('on', flush=True); time.sleep(60)"
        )
        await printed(handle)
        await service.runtime.warm(count=1, new=True)
        kernel = pool(service)._prewarmed[0].kernel
        second = await service.sandboxes.create(ME)
        with pytest.raises(Unavailable, match="kernels"):
            await run(service, second.id, "1")
        assert kernel.jail.gone
        await service.sandboxes.delete(ME, first.id)
        assert (await run(service, second.id, "1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_kernels_that_nothing_was_started_in_do_not_add_up_beyond_the_limits(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path / "data", kernels_max=1) as service:
        await ready(service)
        kernel = pool(service)._prewarmed[0].kernel
        made = await service.sandboxes.create(ME)
        with pytest.raises(BadRequest):
            async with service.sandboxes.using(
                ME, made.id, scope="execute", conversation="default"
            ) as use:
                await use.conversation().run("1", timeout=-1)
        assert kernel.jail.gone
        assert living(service, made.id).kernels == 0
        assert (await run(service, made.id, "1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_stop_beside_a_use_ends_a_kernel_that_was_not_used_yet(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        await ready(service)
        kernel = pool(service)._prewarmed[0].kernel
        made = await service.sandboxes.create(ME)
        use = service.sandboxes.using(ME, made.id, scope="execute", conversation="default")
        async with use:
            await service.sandboxes.stop(ME, made.id)
            assert kernel.jail.gone
