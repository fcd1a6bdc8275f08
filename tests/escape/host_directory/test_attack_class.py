"""The class host_executables of `sbx doctor --attack`: held, and seen to get through without."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacking import one_path

from sbx import Runtime
from sbx.doctor.attacks.attack import Outcome
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES, plant
from sbx.policy import load
from sbx.workspace import quarantine


@pytest.fixture
async def runtime(
    started_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Runtime]:
    """With a quarantine of its own: races leave thousands of items in the other one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    async with Runtime() as runtime:
        yield runtime


# Both put the guard up in a way of their own, and the CI tier tries both.
@pytest.mark.parametrize("started_by", ["fork", "cold"], indirect=True, scope="module")
async def test_every_planted_name_is_held_and_nothing_is_left(runtime: Runtime) -> None:
    outcomes = await plant(runtime, load("default"))
    assert quarantine.items(runtime.settings.protection.quarantines) == []
    assert {one.name: one.judge(outcomes[one.name]) for one in HOST_EXECUTABLES} == {
        one.name: Outcome.HELD for one in HOST_EXECUTABLES
    }


@one_path("fork")  # a control
async def test_without_the_guard_every_name_gets_through(runtime: Runtime) -> None:
    policy = load("default").model_copy(update={"host_executables": "allow"})
    outcomes = await plant(runtime, policy)
    escaped = {
        one.name for one in HOST_EXECUTABLES if one.judge(outcomes[one.name]) is Outcome.ESCAPED
    }
    assert escaped == {one.name for one in HOST_EXECUTABLES}
