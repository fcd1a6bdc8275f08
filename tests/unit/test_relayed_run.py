"""A run whose output goes on as it comes: counted, cut at its limit, and not kept."""

import pytest

from sbx.kernels import frames
from sbx.protocol.runs import Cause, RunError, Status
from sbx.runtime.run.execution import ForwardedRun, Published


class Listener:
    """Takes what it is told; raises `error` instead, where there is one."""

    def __init__(self, room: int, error: Exception | None = None) -> None:
        self.received: list[Published] = []
        self.error = error
        self.run = ForwardedRun("run-1", room, self.take)

    async def take(self, answer: Published) -> None:
        if self.error is not None:
            raise self.error
        self.received.append(answer)

    async def hear(self, *contents: object, size: int = 60) -> None:
        for content in contents:
            self.run.add(frames.Frame(content, None, size))  # type: ignore[arg-type]
            assert self.run.pass_on is not None
            await self.run.pass_on()


def printed(text: str) -> frames.Stream:
    return frames.Stream("stdout", text)


async def test_what_comes_goes_on_and_is_not_kept() -> None:
    one = Listener(1000)
    said = [printed("a"), frames.ClearOutput(True), frames.CommMsgFrame("c"), frames.CommClose("c")]
    await one.hear(*said)
    assert one.received == said
    run = one.run.finish(Status.OK)
    assert (run.stdout, run.outputs, run.truncated) == ("", (), False)


async def test_a_stream_is_cut_at_the_limit_and_nothing_follows() -> None:
    one = Listener(100)
    await one.hear(printed("x" * 60), printed("y" * 60), printed("z"), frames.CommMsgFrame("c"))
    assert one.received == [printed("x" * 60), printed("y" * 40)]
    assert one.run.over


async def test_what_cannot_be_cut_is_not_told_beyond_the_limit() -> None:
    one = Listener(50)
    await one.hear(frames.DisplayData({}))
    assert (one.received, one.run.over) == ([], True)


async def test_the_guest_s_word_that_the_limit_is_reached_ends_it() -> None:
    one = Listener(1000)
    await one.hear(frames.OutputLimit(5))
    assert (one.received, one.run.over) == ([], True)


async def test_an_error_is_the_run_s_too() -> None:
    one = Listener(1000)
    await one.hear(frames.ErrorFrame("E", "why", ["a", "b"]))
    assert one.run.finish(Status.ERROR).error == RunError("E", "why", "a\nb")


async def test_a_run_that_is_halted_tells_nothing_more() -> None:
    one = Listener(1000)
    one.run.halted = RunError("KernelStopped", "", "")
    await one.hear(printed("a"))
    assert one.received == []


async def test_who_listens_may_find_it_malformed_and_no_other_error_gets_out() -> None:
    with pytest.raises(frames.MalformedFrame):
        await Listener(1000, frames.MalformedFrame("no")).hear(printed("a"))
    await Listener(1000, ZeroDivisionError()).hear(printed("a"))


async def test_a_run_in_which_the_kernel_ended_says_why() -> None:
    one, other, unfinished = (Listener(1000).run for _ in range(3))
    why = RunError("MemoryLimit", "too much", "")
    one.finish(Status.KILLED, cause=Cause.MEMORY, error=why, state_lost=True)
    other.finish(Status.TIMEOUT, error=why)
    assert [run.fatal for run in (one, other, unfinished)] == [why, None, None]
