"""The class host_executables of `sbx doctor --attack`: held, and seen to get through without."""

from sbx import Runtime
from sbx.policy import load
from sbx.runtime.attacks.attack import End
from sbx.runtime.attacks.host_executables import HOST_EXECUTABLES, plant
from sbx.workspace import quarantine


async def test_every_planted_name_is_held_and_nothing_is_left() -> None:
    async with Runtime() as runtime:
        outcomes = await plant(runtime, load("default"))
        assert quarantine.items(runtime.settings.protection.quarantines) == []
    assert {one.name: one.judge(outcomes[one.name]) for one in HOST_EXECUTABLES} == {
        one.name: End.HELD for one in HOST_EXECUTABLES
    }


async def test_without_the_guard_every_name_gets_through() -> None:
    async with Runtime() as runtime:
        policy = load("default").model_copy(update={"host_executables": "allow"})
        outcomes = await plant(runtime, policy)
    escaped = {one.name for one in HOST_EXECUTABLES if one.judge(outcomes[one.name]) is End.ESCAPED}
    assert escaped == {one.name for one in HOST_EXECUTABLES}
