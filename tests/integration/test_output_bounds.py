"""Output beyond all bounds: cut, said to be, and nobody else's trouble."""

import asyncio
import json

import pytest

from sbx import AsyncSandbox, Runtime
from sbx.protocol.runs import Cause, Run

MIB = 1 << 20


async def test_100_mb_of_output_end_at_the_limit_and_say_so(box: AsyncSandbox) -> None:
    run = await box.run("line = 'x' * 999\nfor _ in range(100_000): print(line)")
    assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)
    limit = box.policy.limits.output_max
    assert limit - MIB < len(run.stdout) <= limit
    assert run.error is not None
    assert str(limit) in run.error.value
    assert (await box.run("1 + 1")).result == "2"


async def test_a_figure_of_50_mb_makes_way_for_a_note_and_the_run_says_so(
    box: AsyncSandbox,
) -> None:
    run = await box.run("display({'image/png': b'0' * 50_000_000}, raw=True)")
    assert (run.ok, run.truncated) == (True, True)
    assert run.outputs == ({"text/plain": "[image/png of 66666666 bytes is not shown: too large]"},)
    assert not (await box.run("display({'image/png': b'0' * 5000}, raw=True)")).truncated


async def test_json_that_was_shown_is_read_as_values(box: AsyncSandbox) -> None:
    """It stays encoded until then, which nobody sees who reads it."""
    value = {"é\u2028\ufdd0": [{}, 1.5, None, True, 1 << 70], "$float": ["nan", 1e-300]}
    run = await box.run(f"display({{'application/json': {value!r}}}, raw=True)")
    assert run.outputs == ({"application/json": value},)
    assert json.loads(json.dumps(run.outputs)) == [{"application/json": value}]
    assert {**run.outputs[0]}["application/json"] == run.outputs[0]["application/json"] == value


@pytest.mark.full_tier
async def test_json_of_very_many_values_makes_way_for_a_note(box: AsyncSandbox) -> None:
    run = await box.run("display({'application/json': [{}] * 200_000}, raw=True)")
    assert (run.ok, run.truncated) == (True, True)
    assert run.text.endswith(" bytes is not shown: too large]\n")


async def test_a_result_of_100_mb_is_cut_and_the_run_says_so(box: AsyncSandbox) -> None:
    run = await box.run("'y' * 100_000_000")
    assert (run.ok, run.truncated) == (True, True)
    assert run.result is not None
    assert len(run.result) < MIB
    assert "cut: 100000002 characters in all" in run.result


@pytest.mark.full_tier
async def test_a_flood_stalls_no_other_kernel(runtime: Runtime) -> None:
    """Counted, not timed: while one kernel's flood lasts, cells of another begin and end."""
    async with await runtime.create() as flooding, await runtime.create() as quick:
        await asyncio.gather(flooding.start(), quick.start())
        flood = asyncio.create_task(flooding.run("while True: print('x' * 100)"))
        answered: list[Run] = []
        while not flood.done():
            answered.append(await quick.run(f"{len(answered)}"))
        assert (await flood).cause is Cause.OUTPUT
    assert [run.result for run in answered] == [str(number) for number in range(len(answered))]
    assert len(answered) >= 5


@pytest.mark.full_tier
async def test_a_kernel_that_nobody_reads_waits_and_keeps_the_order(box: AsyncSandbox) -> None:
    """What it prints is not gathered anywhere until it is read: a pipe's worth is on its way."""
    events = box.stream("for n in range(20_000): print(n)\n'end'")
    texts = [event.text async for event in events if event.type == "stdout"]
    assert "".join(texts) == "".join(f"{n}\n" for n in range(20_000))
    assert len(texts) < 1000
