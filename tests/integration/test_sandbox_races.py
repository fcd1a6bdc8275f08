"""Two things at once in the life of a kept sandbox: each has one outcome, and says which."""

import asyncio
import random
from collections.abc import Awaitable, Callable
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
    state_events,
)

from sbx.errors import Conflict, NotFound, SbxError
from sbx.protocol.runs import RunError, Status
from sbx.service.lifecycle import State
from sbx.service.models import SessionIdentity
from tests.fake_clock import FakeClock

HANG = "import time; print('on', flush=True); time.sleep(60)"


async def test_extend_and_the_reaper_agree(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock) as service:
        made = await service.sandboxes.create(ME, ttl_s=100)
        clock.advance(99.5)
        _, view = await asyncio.gather(
            service.reaper.round(), service.sandboxes.extend(ME, made.id, 100)
        )
        assert view.expires_at == made.created_at + 200
        clock.advance(1)
        await service.reaper.round()
        assert (await run(service, made.id, "1")).ok
        clock.advance(99.5)
        ends = await asyncio.gather(
            service.sandboxes.extend(ME, made.id, 100),
            service.reaper.round(),
            return_exceptions=True,
        )
        assert isinstance(ends[0], Conflict)
        assert (await service.sandboxes.get(ME, made.id)).state is State.EXPIRED


@pytest.mark.full_tier
async def test_two_first_calls_at_once_start_one_kernel(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        runs = await asyncio.gather(
            *(run(service, made.id, f"n{i} = {i}; import os; print(os.getpid())") for i in range(5))
        )
        assert all(one.ok for one in runs)
        assert (await run(service, made.id, "print(n0 + n1 + n2 + n3 + n4)")).stdout == "10\n"
        assert [kind for kind, _ in await state_events(service, made.id)].count("started") == 1


@pytest.mark.core
async def test_delete_during_a_run_ends_it_and_removes_the_files(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        handle = await begin(service, made.id, HANG)
        await printed(handle)
        ends = await asyncio.gather(
            *(service.sandboxes.delete(ME, made.id) for _ in range(5)), return_exceptions=True
        )
        assert sorted(type(end).__name__ for end in ends) == ["NoneType"] + ["NotFound"] * 4
        ended = await handle.result()
        assert ended.error is not None
        assert (ended.status, ended.error.name) == (Status.INTERRUPTED, "SandboxDeleted")
        assert not directories(service)
        with pytest.raises(NotFound):
            await service.sandboxes.delete(ME, made.id)
        with pytest.raises(NotFound):
            await service.sandboxes.delete(OTHER, made.id)
        with pytest.raises(NotFound):
            await begin(service, made.id, "1")
        assert (await state_events(service, made.id))[-1] == ("deleted", "requested")


async def test_runs_that_wait_are_ended_once_by_however_many(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        living = next(iter(service.sandboxes.every()))
        handles = [await begin(service, made.id, HANG) for _ in range(6)]
        await printed(handles[0])
        assert living.active is not None
        talk = living.active.conversation("default")
        state_events = RunError("Test", "ended by a test", "")
        ends = await asyncio.gather(
            handles[-1].interrupt(),
            talk.halt(state_events),
            service.sandboxes.delete_conversation(ME, made.id, "default"),
            talk.halt(state_events),
            service.sandboxes.delete(ME, made.id),
            handles[-2].interrupt(),
            return_exceptions=True,
        )
        assert not [end for end in ends if isinstance(end, BaseException)]
        for handle in handles:
            assert (await handle.result()).status is Status.INTERRUPTED
        assert not directories(service)


@pytest.mark.full_tier
async def test_what_fails_at_its_end_is_deleted_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "1")
        living = next(iter(service.sandboxes.every()))
        assert living.active is not None
        halt = living.active.halt

        async def failing(reason: RunError) -> None:
            await halt(reason)
            raise KeyError("stdout")

        living.active.halt = failing  # type: ignore[method-assign]
        await service.sandboxes.delete(ME, made.id)
        assert "did not end cleanly" in caplog.text
        assert not service.sandboxes.every()
        assert not directories(service)


async def test_stop_and_delete_during_a_start(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", fast_path=False) as service:
        made = await service.sandboxes.create(ME)
        living = next(iter(service.sandboxes.every()))
        handle = await begin(service, made.id, "open('early', 'w')")
        await eventually(lambda: living.state is State.STARTING)
        await service.sandboxes.stop(ME, made.id)
        ended = await handle.result()
        assert ended.error is not None
        assert (ended.status, ended.error.name) == (Status.INTERRUPTED, "SandboxStopped")
        assert (await service.sandboxes.get(ME, made.id)).state is State.IDLE
        resuming = asyncio.create_task(service.sandboxes.resume(ME, made.id))
        await eventually(lambda: living.state is State.STARTING)
        await service.sandboxes.stop(ME, made.id)
        with pytest.raises(Conflict, match="stopped"):
            await resuming
        resuming = asyncio.create_task(service.sandboxes.resume(ME, made.id))
        await eventually(lambda: living.state is State.STARTING)
        await service.sandboxes.delete(ME, made.id)
        with pytest.raises((Conflict, NotFound)):
            await resuming


@pytest.mark.full_tier
async def test_a_sandbox_that_is_opened_again_at_once_keeps_its_group(tmp_path: Path) -> None:
    """What was removed of the sandbox that is closed has the same name as what is made."""
    async with open_service(tmp_path / "data", fast_path=False) as service:
        made = await service.sandboxes.create(ME)
        living = next(iter(service.sandboxes.every()))
        for _ in range(40):
            resuming = asyncio.create_task(service.sandboxes.resume(ME, made.id))
            await eventually(lambda: living.state is State.STARTING)
            await service.sandboxes.stop(ME, made.id)
            (end,) = await asyncio.gather(resuming, return_exceptions=True)
            assert isinstance(end, Conflict), end
        await service.sandboxes.resume(ME, made.id)


async def test_fifty_creates_for_one_session_make_one(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        who = SessionIdentity("sb-session-u-a", "u", "a")
        ends = await asyncio.gather(
            *(service.sandboxes.create(ME, session=who) for _ in range(50)), return_exceptions=True
        )
        made = [end for end in ends if not isinstance(end, BaseException)]
        assert len(made) == 1
        assert {getattr(end, "code", "made") for end in ends} == {"made", "session_exists"}
        assert (await service.sandboxes.get(ME, "sb-session-u-a")).id == made[0].id
        assert len((service.workspaces.list(ME, managed=True)).items) == 1
        assert (await service.sandboxes.create(OTHER, session=who)).id != made[0].id
        await service.sandboxes.delete(ME, "sb-session-u-a")
        assert (await service.sandboxes.create(ME, session=who)).id != made[0].id


_ALLOWED = {"stopped", "closed", "sandbox_expired", "not_found"}


@pytest.mark.parametrize("seed", range(3))
async def test_everything_at_once_ends_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    """Sixty calls in any order on three sandboxes: each ends, in one of the ways that are told."""
    clock, order = FakeClock(), random.Random(seed)
    async with open_service(tmp_path / "data", clock, idle_timeout=5, kernels_max=2) as service:
        ids = [(await service.sandboxes.create(ME, ttl_s=20)).id for _ in range(3)]

        async def later() -> None:
            clock.advance(order.choice([1, 4]))
            await service.reaper.round()

        acts: list[Callable[[str], Awaitable[object]]] = [
            lambda id: run(service, id, "open('f', 'a').write('x')"),
            lambda id: run(service, id, "import time; time.sleep(0.2)", conversation="other"),
            lambda id: run(service, id, "1"),
            lambda id: service.sandboxes.stop(ME, id),
            lambda id: service.sandboxes.resume(ME, id),
            lambda id: service.sandboxes.extend(ME, id, 1),
            lambda id: service.sandboxes.delete_conversation(ME, id, "other"),
            lambda id: later(),
        ]

        async def some(act: Callable[[str], Awaitable[object]], id: str) -> object:
            await asyncio.sleep(order.random())
            return await act(id)

        calls = [some(order.choice(acts), order.choice(ids)) for _ in range(60)]
        calls.append(some(lambda id: service.sandboxes.delete(ME, id), ids[0]))
        async with asyncio.timeout(90):
            ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                assert isinstance(end, SbxError), repr(end)
                assert end.code in {*_ALLOWED, "too_many_kernels"}, repr(end)
        for living in service.sandboxes.every():
            assert (living.users, living.starts) == (0, 0)
        for living in service.sandboxes.every():
            await service.sandboxes.delete(ME, living.id)
        assert not directories(service)
        assert not service.sandboxes.every()
