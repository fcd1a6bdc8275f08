"""A jail's end comes soon, whatever was running in it and under which limits."""

import asyncio

import pytest

from sbx import Runtime

BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.full_tier
@pytest.mark.needs("cpu", "tasks")
async def test_fork_bomb_under_a_small_cpu_quota_is_gone_soon_after_its_deadline(
    runtime: Runtime,
) -> None:
    """Processes that were killed waited for their share of a CPU before they could end: 128 of
    them at a tenth of one took longer than anybody was ready to wait."""
    limits = {"cpu_quota": "10%", "tasks_max": 128}
    async with await runtime.create(narrower={"limits": limits}) as box:
        receipt = await box.start()
        async with asyncio.timeout(60):
            run = await box.run(BOMB, timeout=2)
        assert (run.status, run.state_lost) == ("timeout", True)
        assert (await box.start()).limits == receipt.limits
