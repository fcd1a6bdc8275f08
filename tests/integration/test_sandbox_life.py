"""The life of kept sandboxes, in a real service with a clock that stands still."""

import asyncio
from pathlib import Path

import pytest
from persistent_sandboxes import (
    ME,
    begin,
    directories,
    eventually,
    open_service,
    printed,
    run,
    state_events,
)

from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.protocol.runs import Status
from sbx.runtime.settings import Settings
from sbx.service.lifecycle import State
from sbx.service.service import Service
from tests.fake_clock import FakeClock

HANG = "import time; print('on', flush=True); time.sleep(60)"


@pytest.mark.full_tier
@pytest.mark.core
async def test_files_outlive_a_stop_and_a_restart(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        assert made.state is State.IDLE
        await run(service, made.id, "open('kept', 'w').write('1'); here = 1")
        assert (await service.sandboxes.get(ME, made.id)).state is State.READY
        await service.sandboxes.stop(ME, made.id)
        stopped = await service.sandboxes.get(ME, made.id)
        assert (stopped.state, stopped.stopped) == (State.IDLE, True)
        again = await run(service, made.id, "print(open('kept').read()); here = 2")
        assert (again.stdout, again.state_lost) == ("1\n", False)
        assert not (await service.sandboxes.get(ME, made.id)).stopped
    async with open_service(tmp_path / "data") as service:
        assert (await service.sandboxes.get(ME, made.id)).state is State.IDLE
        later = await run(service, made.id, "print(open('kept').read())")
        assert (later.stdout, later.state_lost) == ("1\n", True)


@pytest.mark.core
async def test_an_idle_sandbox_is_closed_and_its_next_run_says_so(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, idle_timeout=100) as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "x = 1")
        assert (await service.sandboxes.get(ME, made.id)).idle_expires_at == clock.now() + 100
        clock.advance(60)
        await service.sandboxes.keepalive(ME, made.id)
        clock.advance(60)
        await service.reaper.round()
        assert (await service.sandboxes.get(ME, made.id)).state is State.READY
        clock.advance(41)
        await service.reaper.round()
        view = await service.sandboxes.get(ME, made.id)
        assert (view.state, view.stopped, view.idle_expires_at) == (State.IDLE, False, None)
        assert ("stopped", "idle_timeout") in await state_events(service, made.id)
        assert (await run(service, made.id, "1")).state_lost


@pytest.mark.full_tier
async def test_a_run_keeps_the_idle_time_out_away(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, idle_timeout=100) as service:
        made = await service.sandboxes.create(ME)
        handle = await begin(service, made.id, HANG)
        await printed(handle)
        clock.advance(1000)
        await service.reaper.round()
        assert (await service.sandboxes.get(ME, made.id)).state is State.READY
        await handle.interrupt()
        assert (await handle.result()).status is Status.INTERRUPTED


@pytest.mark.full_tier
async def test_a_use_without_a_run_keeps_the_idle_time_out_away(tmp_path: Path) -> None:
    """A long upload or download: its sandbox was not closed under it."""
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, idle_timeout=100) as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "x = 1")
        async with service.sandboxes.using(ME, made.id, scope="files:write") as use:
            clock.advance(1000)
            await service.reaper.round()
            assert (await service.sandboxes.get(ME, made.id)).state is State.READY
            await use.active.files.write("late", "1")
        assert not (await run(service, made.id, "x")).state_lost


async def test_expiry_ends_the_run_tells_why_and_refuses_from_then_on(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, files_grace=50) as service:
        made = await service.sandboxes.create(ME, ttl_s=100)
        handle = await begin(service, made.id, HANG)
        waiting = await begin(service, made.id, "print('never')")
        await printed(handle)
        clock.advance(100)
        with pytest.raises(Conflict) as refused:  # at once, whether or not the reaper was there
            await begin(service, made.id, "1")
        assert refused.value.code == "sandbox_expired"
        assert refused.value.details["sandbox_id"] == made.id
        await service.reaper.round()
        for one in (handle, waiting):
            run_ = await one.result()
            assert (run_.status, run_.error and run_.error.name) == (
                Status.INTERRUPTED,
                "SandboxExpired",
            )
        view = await service.sandboxes.get(ME, made.id)
        assert (view.state, view.idle_expires_at) == (State.EXPIRED, None)
        with pytest.raises(Conflict, match="expired"):
            await service.sandboxes.extend(ME, made.id, 10)
        with pytest.raises(Conflict, match="expired"):
            await service.sandboxes.keepalive(ME, made.id)
        await service.sandboxes.stop(ME, made.id)  # there is nothing to stop, and no error
        with pytest.raises(Conflict, match="expired"):
            async with service.sandboxes.using(ME, made.id, scope="files:read"):
                pass
        (living,) = service.sandboxes.every()
        await eventually(lambda: living.users == 0)  # a use that is refused is none

        await service.reaper.collect()
        with pytest.raises(NotFound):
            await service.sandboxes.get(ME, made.id)
        assert len(directories(service)) == 1
        clock.advance(51)
        await service.reaper.collect()
        assert not directories(service)
        story = await state_events(service, made.id)
        assert story[-2:] == [("expired", None), ("deleted", "expired")]


async def test_what_never_expires_cannot_be_extended(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock) as service:
        for ttl in (None, 0, -5):
            made = await service.sandboxes.create(ME, ttl_s=ttl)
            assert made.expires_at is None
        with pytest.raises(Conflict) as refused:
            await service.sandboxes.extend(ME, made.id, 5)
        assert refused.value.code == "sandbox_ttl_infinite"
        with pytest.raises(BadRequest):
            await service.sandboxes.extend(ME, made.id, 0)
        clock.advance(1e10)
        await service.reaper.round()
        assert (await service.sandboxes.get(ME, made.id)).state is State.IDLE


@pytest.mark.full_tier
async def test_a_wrong_request_makes_nothing(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        for wrong in (
            {"policy": "nowhere"},
            {"policy": "../default"},
            {"narrower": {"limits": {"memory_max": "900GiB"}}},
            {"env": {"A=B": "c"}},
        ):
            with pytest.raises(BadRequest):
                await service.sandboxes.create(ME, **wrong)
        with pytest.raises(NotFound):
            await service.sandboxes.create(ME, workspace_id="ws-nowhere")
        assert not (await service.sandboxes.list(ME)).items
        alias = await service.sandboxes.create(ME, policy="python-default", env={"A": "b"})
        assert (alias.policy_name, alias.env) == ("python-default", {"A": "b"})
        assert (await run(service, alias.id, "import os; print(os.environ['A'])")).stdout == "b\n"


@pytest.mark.full_tier
async def test_a_start_that_fails_shows_and_the_next_one_mends(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", fast_path=False, start_timeout=0.001) as service:
        made = await service.sandboxes.create(ME)
        with pytest.raises(Unavailable) as late:
            await run(service, made.id, "1")
        assert late.value.code == "session_not_ready"
        view = await service.sandboxes.get(ME, made.id)
        assert view.state is State.FAILED
        assert view.failure is not None
        assert ("failed", view.failure["code"]) in await state_events(service, made.id)
        service.runtime._starter._deadline_s = 30.0  # type: ignore[union-attr]
        assert (await run(service, made.id, "1")).ok
        assert (await service.sandboxes.get(ME, made.id)).state is State.READY


@pytest.mark.full_tier
async def test_a_service_that_closes_ends_its_runs_and_says_so(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        handle = await begin(service, made.id, HANG)
        await printed(handle)
        following = asyncio.create_task(handle.result())
    ended = await following
    assert ended.error is not None
    assert (ended.status, ended.error.name) == (Status.INTERRUPTED, "ServiceEnded")
    async with open_service(tmp_path / "data") as service:
        row = await service.runs.history.entry(ME, made.id, handle.run_id)
        assert (row.status, row.run and row.run.error) == ("interrupted", ended.error)


@pytest.mark.full_tier
async def test_what_is_due_happens_by_itself(tmp_path: Path) -> None:
    clock = FakeClock()
    settings = Settings(
        data_dir=tmp_path / "data",
        gc_interval=300,
        memory_reserve=0,
        files_grace=0,
        tombstones_kept=1000,
    )
    async with Service(settings, clock) as service:
        await service.access.make_token(ME.owner, user_id="ada", ttl_s=10)
        made = await service.sandboxes.create(ME, ttl_s=10)
        (living,) = service.sandboxes.every()
        clock.advance(10)
        await eventually(lambda: living.over)
        assert (await service.sandboxes.get(ME, made.id)).state is State.EXPIRED
        clock.advance(290)
        await eventually(lambda: not service.sandboxes.every())
        await service.sandboxes.delete(ME, made.id)  # it is remembered for a while
        clock.advance(1001)
        await eventually(lambda: not service.reaper.collecting)
        await service.reaper.collect()
        with pytest.raises(NotFound):
            await service.sandboxes.delete(ME, made.id)
        assert not await service.access.tokens(None)


@pytest.mark.full_tier
async def test_a_collection_tells_what_it_did(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, idle_timeout=5) as service:
        await service.sandboxes.create(ME, ttl_s=3)
        used = await service.sandboxes.create(ME)
        await run(service, used.id, "1")
        clock.advance(6)
        reports, again = await asyncio.gather(
            service.reaper.collect(), service.reaper.collect(), return_exceptions=True
        )
        assert isinstance(again, Conflict)
        assert again.code == "gc_running"
        assert isinstance(reports, list)
        assert [(one.task_name, one.cleaned_count, one.errors) for one in reports] == [
            ("idle_session", 1, ()),
            ("expired_sandbox", 1, ()),
            ("orphan_workspace", 0, ()),
            ("orphan_container", 0, ()),
        ]
        only = await service.reaper.collect(["orphan_workspace"])
        assert [one.task_name for one in only] == ["orphan_workspace"]
