"""A run while it goes on: events for whoever follows, one result at the end, bounded in between."""

import asyncio
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from sbx.errors import Closed
from sbx.kernels import frames
from sbx.protocol.events import encode, run_to_json
from sbx.protocol.runs import (
    Cause,
    Clear,
    Display,
    Error,
    Event,
    InputRequest,
    Result,
    Run,
    RunEnd,
    RunError,
    RunStart,
    Status,
    Stderr,
    Stdout,
)
from sbx.runtime.run.active_run import ActiveRun, SharedRoom

ROOM = 10_000


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def frame(content: Any, size: int = 10) -> frames.Frame:
    return frames.Frame(content, None, size)


def printed(text: str, name: Any = "stdout") -> frames.Frame:
    return frame(frames.Stream(name, text), len(text.encode()))


def shown(text: str, display_id: str | None = None) -> frames.Frame:
    transient = {"display_id": display_id} if display_id else {}
    return frame(frames.DisplayData({"text/plain": raw(text)}, raw({}), transient))


def updated(text: str, display_id: str) -> frames.Frame:
    data = {"text/plain": raw(text)}
    return frame(frames.UpdateDisplayData(data, raw({}), {"display_id": display_id}))


def resulting(text: str) -> frames.Frame:
    return frame(frames.ExecuteResult({"text/plain": raw(text)}, 1))


def ran(*sent: frames.Frame, room: int = ROOM) -> Run:
    async def collect() -> Run:
        live = ActiveRun("run-1", room)
        for one in sent:
            live.add(one)
        return live.finish(Status.OK)

    return asyncio.run(collect())


async def followed(live: ActiveRun) -> list[Event]:
    return [event async for event in live.events()]


def test_streams_are_kept_apart_and_text_keeps_their_order() -> None:
    run = ran(printed("a"), printed("!\n", "stderr"), printed("b\n"))
    assert (run.stdout, run.stderr, run.text) == ("ab\n", "!\n", "a!\nb\n")


def test_what_is_shown_stands_on_lines_of_its_own_in_text() -> None:
    run = ran(printed("before"), shown("picture"), printed("after\n"), resulting("42"))
    assert run.text == "before\npicture\nafter\n42\n"
    assert run.outputs == ({"text/plain": "picture"}, {"text/plain": "42"})
    assert run.result == "42"


def test_update_changes_what_was_shown_in_its_place() -> None:
    run = ran(shown("0 %", "bar"), shown("other"), updated("100 %", "bar"))
    assert run.outputs == ({"text/plain": "100 %"}, {"text/plain": "other"})


def test_update_of_what_was_never_shown_shows_nothing() -> None:
    assert ran(shown("x"), updated("y", "elsewhere")).outputs == ({"text/plain": "x"},)


def test_clear_takes_away_what_a_person_would_not_see_any_more() -> None:
    run = ran(printed("1\n"), shown("a"), frame(frames.ClearOutput(wait=False)), printed("2\n"))
    assert (run.text, run.outputs) == ("2\n", ())
    assert run.stdout == "1\n2\n"


def test_clear_that_waits_does_so_until_something_new_comes() -> None:
    waiting = frame(frames.ClearOutput(wait=True))
    assert ran(shown("old"), waiting).outputs == ({"text/plain": "old"},)
    assert ran(shown("old"), waiting, shown("new")).outputs == ({"text/plain": "new"},)


def test_a_result_without_plain_text_has_none() -> None:
    run = ran(frame(frames.ExecuteResult({"image/png": raw("…")}, 1)))
    assert (run.result, run.outputs, run.text) == (None, ({"image/png": "…"},), "\n")


async def test_events_tell_everything_in_its_order() -> None:
    live = ActiveRun("run-1", ROOM)
    live.add(printed("out"))
    live.add(printed("err", "stderr"))
    live.add(shown("a", "id"))
    live.add(updated("b", "id"))
    live.add(frame(frames.ClearOutput(wait=True)))
    live.add(frame(frames.InputRequestFrame("name? ", password=True)))
    live.add(resulting("42"))
    live.add(frame(frames.ErrorFrame("E", "why", ["line 1", "line 2"])))
    run = live.finish(Status.ERROR)
    assert await followed(live) == [
        RunStart("run-1"),
        Stdout("out"),
        Stderr("err"),
        Display({"text/plain": "a"}, {}, "id"),
        Display({"text/plain": "b"}, {}, "id", update=True),
        Clear(wait=True),
        InputRequest("name? ", password=True),
        Result({"text/plain": "42"}, {}, 1),
        Error(RunError("E", "why", "line 1\nline 2")),
        RunEnd(run),
    ]


async def test_a_late_listener_gets_every_event_from_the_first_on() -> None:
    live = ActiveRun("run-1", ROOM)
    early = asyncio.create_task(followed(live))
    live.add(printed("a"))
    await asyncio.sleep(0)
    late = asyncio.create_task(followed(live))
    await asyncio.sleep(0)
    live.add(printed("b"))
    live.finish(Status.OK)
    assert await early == await late == await followed(live)


async def test_a_listener_is_woken_by_each_event() -> None:
    live = ActiveRun("run-1", ROOM)
    events = live.events()
    assert isinstance(await anext(events), RunStart)
    coming = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not coming.done()
    live.add(printed("x"))
    assert await coming == Stdout("x")
    live.finish(Status.OK)


async def test_a_run_that_could_not_start_raises_for_who_waits_and_who_follows() -> None:
    live = ActiveRun("run-1", ROOM)
    following = asyncio.create_task(followed(live))
    await asyncio.sleep(0)
    live.fail(Closed("gone"))
    live.fail(Closed("a second time changes nothing"))
    for waiter in (live.result(), following, followed(live)):
        with pytest.raises(Closed, match="gone"):
            await waiter


async def test_cancelling_a_waiter_leaves_the_run_to_others() -> None:
    live = ActiveRun("run-1", ROOM)
    first, second = (asyncio.ensure_future(live.result()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    run = live.finish(Status.OK)
    assert await second is run


def test_output_beyond_the_limit_is_cut_at_a_character() -> None:
    run = ran(printed("é" * 100), room=51)
    assert run.stdout == "é" * 25
    assert run.truncated


def test_output_up_to_the_limit_is_kept_whole() -> None:
    run = ran(printed("x" * 100), room=100)
    assert (run.stdout, run.truncated) == ("x" * 100, False)


def test_nothing_is_kept_after_the_limit() -> None:
    run = ran(printed("x" * 100), printed("late"), shown("late"), room=50)
    assert (run.stdout, run.outputs) == ("x" * 50, ())


def test_empty_frames_count_so_that_they_cannot_pile_up() -> None:
    async def flooded() -> int:
        live = ActiveRun("run-1", 1000)
        for count in range(1000):
            if live.over:
                return count
            live.add(frame(frames.Stream("stdout", ""), size=60))
        return 1000

    assert asyncio.run(flooded()) < 20


async def test_the_guest_s_own_word_that_the_limit_is_reached_ends_it() -> None:
    live = ActiveRun("run-1", ROOM)
    live.add(frame(frames.OutputLimit(5)))
    assert live.over
    assert live.finish(Status.KILLED).truncated


def test_a_bundle_that_is_none_is_refused() -> None:
    for hostile in (
        frames.DisplayData({str(number): raw("") for number in range(65)}),
        frames.DisplayData({"text/plain": raw("x")}, metadata=raw(["no", "object"])),
        frames.ExecuteResult({"a": msgspec.Raw(b"[" * 100 + b"]" * 100)}, None),
    ):
        with pytest.raises(frames.MalformedFrame):
            ran(frame(hostile))


async def test_a_reply_s_error_stands_in_where_no_error_was_shown() -> None:
    live = ActiveRun("run-1", ROOM)
    live.replied(frames.ExecuteReply("error", 4, ename="E", evalue="v", traceback=["t"]))
    run = live.finish(Status.ERROR)
    assert (run.error, run.execution_count) == (RunError("E", "v", "t"), 4)


async def test_our_reason_for_an_end_keeps_the_code_s_traceback() -> None:
    live = ActiveRun("run-1", ROOM)
    live.add(frame(frames.ErrorFrame("KeyboardInterrupt", "", ["where it was"])))
    run = live.finish(Status.TIMEOUT, error=RunError("Timeout", "too long", ""))
    assert run.error == RunError("Timeout", "too long", "where it was")


@pytest.mark.parametrize(
    "shown_in_part",
    [
        frames.ExecuteResult({"text/plain": raw("…")}, 1, cut=True),
        frames.DisplayData({"text/plain": raw("…")}, cut=True),
        frames.UpdateDisplayData({"text/plain": raw("…")}, cut=True),
    ],
)
def test_what_was_cut_inside_makes_the_run_truncated(shown_in_part: Any) -> None:
    assert ran(frame(shown_in_part)).truncated
    assert not ran(resulting("whole"), shown("whole")).truncated


async def test_events_have_numbers_by_which_a_follower_comes_back() -> None:
    live = ActiveRun("run-1", ROOM)
    live.add(printed("a"))
    live.add(printed("b"))
    missed = asyncio.create_task(_numbered(live, after=2))
    await asyncio.sleep(0)
    run = live.finish(Status.OK)
    assert await missed == [(3, Stdout("b")), (4, RunEnd(run))]
    assert await _numbered(live, after=-1) == [
        (1, RunStart("run-1")),
        (2, Stdout("a")),
        (3, Stdout("b")),
        (4, RunEnd(run)),
    ]
    assert await _numbered(live, after=4) == await _numbered(live, after=1 << 70) == []


async def test_a_follower_who_comes_too_late_is_told_why_the_run_could_not_start() -> None:
    live = ActiveRun("run-1", ROOM)
    live.fail(Closed("gone"))
    with pytest.raises(Closed):
        await _numbered(live, after=7)


def test_runs_share_room_and_one_within_its_share_goes_on() -> None:
    async def collect() -> tuple[bool, bool, int]:
        shared = SharedRoom(limit=3000, share=1500)
        greedy, modest = ActiveRun("run-1", ROOM), ActiveRun("run-2", ROOM)
        greedy.shared = modest.shared = shared
        for _ in range(3):
            greedy.add(printed("x" * 900))
        modest.add(printed("y"))
        overs = greedy.over, modest.over
        run = greedy.finish(Status.KILLED, cause=Cause.OUTPUT)
        assert run.error is not None
        assert "together" in run.error.value
        for live in (greedy, modest):
            live.give_room_back()
            live.give_room_back()
        return *overs, shared.used

    assert asyncio.run(collect()) == (True, False, 0)


async def test_what_a_run_holds_is_about_what_it_was_sent() -> None:
    live = ActiveRun("run-1", 10 * ROOM)
    for _ in range(100):
        live.add(printed("x" * 100))
    live.finish(Status.OK)
    assert 30_000 < live.size < 90_000


def hostile(item: bytes) -> bytes:
    """A frame that shows as many of these in a list as it may."""
    shown = b",".join([item] * 25_000)
    return b'{"type":"display_data","content":{"data":{"a/b":[%b]}}}' % shown


@pytest.mark.full_tier
@pytest.mark.parametrize("item", [b"{}", b"[]", b"1.5", b'{"":0}', b'"\xef\xb7\x90"', b'"$float"'])
async def test_json_that_no_caller_reads_costs_what_was_sent(item: bytes) -> None:
    """It was 24 times as much: every value was made."""
    live = ActiveRun("run-1", 64 << 20)
    live.shared = SharedRoom(512 << 20, 4 << 20)
    body = hostile(item)
    tracemalloc.start()
    try:
        for _ in range(4):
            live.add(frames.KERNEL.decode(body))
        run = live.finish(Status.OK)
        copied = encode(run_to_json(run, encoded=True))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.outputs) == 4
    assert held - len(copied) < 3 * 4 * len(body)
    assert held - len(copied) < 3 * live.shared.used
    assert held - len(copied) < 3 * live.size


async def test_small_parts_count_as_what_they_cost() -> None:
    """A part of six bytes is an entry of a dict."""
    live = ActiveRun("run-1", 64 << 20)
    live.shared = SharedRoom(512 << 20, 4 << 20)
    parts = b",".join(b'"%d":0' % number for number in range(64))
    shown = b'{"data":{%b},"metadata":{%b}}' % (parts, parts)
    tracemalloc.start()
    try:
        for _ in range(500):
            live.add(frames.KERNEL.decode(b'{"type":"display_data","content":%b}' % shown))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * live.shared.used


async def test_values_use_up_the_output_of_a_run() -> None:
    live = ActiveRun("run-1", 1 << 20)
    shown = {"data": {"a/b": [0] * 70_000}}
    live.add(frames.KERNEL.decode(frames.encode("display_data", shown)[4:]))
    assert live.over


async def _numbered(live: ActiveRun, after: int) -> list[tuple[int, Event]]:
    return [numbered async for numbered in live.log.follow(after)]
