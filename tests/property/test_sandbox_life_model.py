"""The life of sandboxes, in any order of create, run, stop, extend, expire, delete and crash.

A real service with a clock that stands still, against a model that knows only the table of states
and which files were written. The service lives for the whole module; a crash ends its broker by
SIGKILL, and another service opens what it left.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sbx.errors import Conflict, NotFound, SbxError
from sbx.protocol.runs import Run, Status
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.lifecycle import TABLE, Act, State
from sbx.service.run import RunHandle, RunRequest
from sbx.service.service import Service
from tests.fake_clock import FakeClock
from tests.tiers import examples

T = TypeVar("T")
IDLE_S = 300.0
HANG = "import time; print('on', flush=True); time.sleep(60)"


class World:
    """A service and the loop that it lives in, over crashes."""

    def __init__(self, data: Path) -> None:
        self.clock = FakeClock()
        self._runner = asyncio.Runner()
        self._settings = Settings(
            data_dir=data, gc_interval=0, memory_reserve=0, idle_timeout=IDLE_S, kernels_max=6
        )
        self.service = self.do(lambda: Service(self._settings, self.clock).start())

    def do(self, act: Callable[[], Awaitable[T]]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await act()

        return self._runner.run(bounded())

    def crash(self) -> None:
        broker = self.service.runtime._broker
        assert broker is not None
        assert broker._process is not None
        os.kill(broker._process.pid, signal.SIGKILL)
        self.do(self.service.close)
        self.service = self.do(lambda: Service(self._settings, self.clock).start())

    def close(self) -> None:
        self.do(self.service.close)
        self._runner.close()


@dataclass(eq=False)
class Modelled:
    """What the model knows of a sandbox. `files` were written and must be there."""

    id: str
    expires_at: float | None
    state: State = State.IDLE
    used_at: float = 0.0
    files: set[str] = field(default_factory=set)
    handle: RunHandle | None = None

    def do(self, act: Act) -> bool:
        """Whether the table lets it; then it is done."""
        after = TABLE[self.state].get(act)
        self.state = after or self.state
        return after is not None


class Life(RuleBasedStateMachine):
    """Rules that the table refuses are tried as well: they must be refused, and change nothing."""

    world: ClassVar[World]
    owners: ClassVar[int] = 0
    boxes: Bundle[Modelled] = Bundle("boxes")

    def __init__(self) -> None:
        super().__init__()
        Life.owners += 1
        self.me = Caller(f"owner-{Life.owners}", "key")
        self.known: list[Modelled] = []

    @property
    def service(self) -> Service:
        return self.world.service

    @property
    def now(self) -> float:
        return self.world.clock.now()

    def attempt(self, act: Callable[[], Awaitable[Any]]) -> SbxError | None:
        try:
            self.world.do(act)
        except SbxError as error:
            return error
        return None

    def refused(self, box: Modelled, error: SbxError | None) -> None:
        if box.state is State.DELETED:
            assert isinstance(error, NotFound), error
        else:
            assert isinstance(error, Conflict), error
            assert error.code == "sandbox_expired"

    def ended(self, box: Modelled, name: str | None) -> None:
        """The run that went on there is over, and says why."""
        if box.handle is not None:
            run = self.world.do(box.handle.result)
            box.handle = None
            if name is not None:
                assert run.status is Status.INTERRUPTED
                assert run.error is not None
                assert run.error.name == name

    # -- rules ---------------------------------------------------------------------------------

    @rule(target=boxes, ttl=st.sampled_from([None, 0, 100, 200, 1000]))
    def create(self, ttl: int | None) -> Modelled:
        view = self.world.do(lambda: self.service.sandboxes.create(self.me, ttl_s=ttl))
        assert view.state is State.IDLE
        assert view.expires_at == (self.now + ttl if ttl else None)
        box = Modelled(view.id, view.expires_at)
        self.known.append(box)
        return box

    @rule(box=boxes)
    def run(self, box: Modelled) -> None:
        if box.handle is not None:
            assert self.world.do(box.handle.interrupt)
            self.ended(box, None)
        name = f"f{len(box.files)}"
        code = f"open({name!r}, 'w').close(); import os; print(*os.listdir())"
        run, error = self.ran(box, code)
        if not box.do(Act.START):
            self.refused(box, error)
            return
        assert run is not None, error
        assert run.ok, run
        box.do(Act.READY)
        box.used_at = self.now
        box.files.add(name)
        assert set(run.stdout.split()) - {"uploads"} == box.files

    def ran(self, box: Modelled, code: str) -> tuple[Run | None, SbxError | None]:
        async def act() -> Run:
            ask = RunRequest("python", code)
            handle = await self.service.runs.start(self.me, box.id, "default", ask)
            return await handle.result()

        try:
            return self.world.do(act), None
        except SbxError as error:
            return None, error

    @rule(box=boxes)
    def leave_running(self, box: Modelled) -> None:
        if box.handle is not None:
            return

        async def act() -> RunHandle:
            ask = RunRequest("python", HANG)
            handle = await self.service.runs.start(self.me, box.id, "default", ask)
            async for _, event in handle.events():
                if event.type == "stdout":
                    break
            return handle

        try:
            box.handle = self.world.do(act)
        except SbxError as error:
            assert not box.do(Act.START)
            self.refused(box, error)
            return
        assert box.do(Act.START)
        box.do(Act.READY)
        box.used_at = self.now

    @rule(box=boxes)
    def stop(self, box: Modelled) -> None:
        error = self.attempt(lambda: self.service.sandboxes.stop(self.me, box.id))
        if box.state is State.DELETED:
            assert isinstance(error, NotFound)
            return
        assert error is None
        box.do(Act.STOP)
        self.ended(box, "SandboxStopped")

    @rule(box=boxes, by=st.sampled_from([1, 500]))
    def extend(self, box: Modelled, by: int) -> None:
        error = self.attempt(lambda: self.service.sandboxes.extend(self.me, box.id, by))
        if not box.do(Act.EXTEND):
            self.refused(box, error)
        elif box.expires_at is None:
            assert error is not None
            assert error.code == "sandbox_ttl_infinite"
        else:
            assert error is None
            box.expires_at = max(box.expires_at, self.now) + by

    @rule(seconds=st.sampled_from([1, 99, 301]))
    def wait(self, seconds: int) -> None:
        self.world.clock.advance(seconds)
        self.world.do(self.service.reaper.round)
        for box in self.known:
            if box.state is State.DELETED:
                continue
            if box.expires_at is not None and box.expires_at <= self.now:
                box.do(Act.EXPIRE)
                self.ended(box, "SandboxExpired")
            elif box.used_at + IDLE_S <= self.now and box.handle is None:
                box.do(Act.STOP)

    @rule()
    def collect(self) -> None:
        self.world.do(self.service.reaper.collect)
        for box in self.known:
            if box.state is State.EXPIRED:
                box.do(Act.DELETE)

    @rule(box=boxes)
    def delete_twice(self, box: Modelled) -> None:
        error = self.attempt(lambda: self.service.sandboxes.delete(self.me, box.id))
        assert isinstance(error, NotFound) if box.state is State.DELETED else error is None
        error = self.attempt(lambda: self.service.sandboxes.delete(self.me, box.id))
        assert isinstance(error, NotFound)
        box.do(Act.DELETE)
        self.ended(box, "SandboxDeleted")

    @rule()
    def crash(self) -> None:
        for box in self.known:
            box.handle = None
        self.world.crash()
        for box in self.known:
            box.do(Act.RESTART)

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_states_are_those_of_the_model(self) -> None:
        page = self.world.do(lambda: self.service.sandboxes.list(self.me, limit=500))
        found = {view.id: view.state for view in page.items}
        assert found == {box.id: box.state for box in self.known if box.state is not State.DELETED}

    def teardown(self) -> None:
        for box in self.known:
            if box.state is not State.DELETED:
                self.world.do(lambda box=box: self.service.sandboxes.delete(self.me, box.id))  # type: ignore[misc]
        left = set(self.service.runtime.data.sandboxes()) - self.service.runtime.unowned_directories
        assert not left, "files of deleted sandboxes are still there"


@pytest.fixture
def world() -> Iterator[World]:
    data = Path(tempfile.mkdtemp(prefix="life-"))
    data.chmod(0o711)
    world = World(data / "data")
    yield world
    world.close()
    shutil.rmtree(data)


def test_sandboxes_live_as_the_table_says(world: World) -> None:
    Life.world = world
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples(8),
            stateful_step_count=15,
            suppress_health_check=list(HealthCheck),
        ),
    )
