"""The last screen of a terminal: what was written, drawn again, bounded whatever it is."""

import asyncio
import time

import pytest

from sbx.protocol.terminals import TerminalScreen
from sbx.runtime.processes.emulator import Emulator
from sbx.runtime.processes.terminal_screen import KEPT, ScreenBuffer
from tests.tiers import rows


def shown(data: bytes, rows: int = 5, columns: int = 20) -> TerminalScreen:
    emulator = Emulator(rows, columns)
    emulator.feed(data)
    return emulator.shown()


SCREENS = {
    "text": b"one\r\ntwo",
    "colours": b"\x1b[31;1mred\x1b[0m \x1b[48;5;200mpink\x1b[0m \x1b[38;2;1;2;3mexact",
    "wide": "中文 e\u0301\r\n".encode(),
    "other screen": b"main\r\n\x1b[?1049h\x1b[2J\x1b[Hvi \x1b[?25l\x1b[2;4r",
    "end of a line": b"x" * 20,
    "line drawing": b"\x1b(0lqk",
    "saved cursor": b"a\x1b7\x1b[3;3H",
    "modes": b"\x1b[?1h\x1b[?1000h\x1b[?2004h\x1b=\x1b[?7l",
    "origin": b"\x1b[2;4r\x1b[?6hx",
}


@pytest.mark.parametrize("data", SCREENS.values(), ids=SCREENS)
def test_what_is_drawn_again_is_the_same_screen(data: bytes) -> None:
    first, second = Emulator(5, 20), Emulator(5, 20)
    first.feed(data)
    second.feed(first.redraw())
    assert second.shown() == first.shown()
    assert second.redraw() == first.redraw()
    for emulator in (first, second):  # and it goes on in the same way
        emulator.feed(b"Z\x1b8\r\nY\x1b[?1049lW")
    assert second.shown() == first.shown()


def test_leaving_the_other_screen_shows_the_main_one() -> None:
    assert shown(b"main\x1b[?1049h\x1b[2Jvi\x1b[?1049l").lines[0] == "main"


def test_a_repeated_letter_and_scrolling_are_understood() -> None:
    assert shown(b"x\x1b[4b").lines[0] == "xxxxx"
    assert shown(b"a\r\nb\r\nc\x1b[1S").lines[:2] == ("b", "c")
    assert shown(b"a\x1b[1T").lines[:2] == ("", "a")


async def test_a_sequence_in_two_pieces_is_one() -> None:
    screen = ScreenBuffer(5, 20)
    screen.add(b"\x1b[3")
    before, _ = await screen.drawn()
    assert before.endswith(b"\x1b[3")
    screen.add(b"1mred \xe4\xb8")
    await screen.drawn()
    screen.add(b"\xad")
    _, now = await screen.drawn()
    assert now.lines[0] == "red 中"


async def test_nothing_is_lost_between_a_screen_and_what_follows() -> None:
    screen = ScreenBuffer(5, 20)
    screen.add(b"before ")
    data, _ = await screen.drawn()
    screen.add(b"after")
    _, whole = await screen.drawn()
    emulator = Emulator(5, 20)
    emulator.feed(data)
    emulator.feed(b"after")
    assert emulator.shown() == whole


async def test_a_flood_keeps_its_end_and_the_modes_it_has_set() -> None:
    screen = ScreenBuffer(5, 20)
    screen.add(b"\x1b[?2004h\x1b[?1049h")
    for number in range(100_000):
        screen.add(b"line %d\r\n" % number)
    assert screen._held <= KEPT
    data, now = await screen.drawn()
    assert now.lines[3] == "line 99999"
    assert b"\x1b[?2004h" in data
    assert b"\x1b[?1049h" in data


async def test_a_size_holds_for_what_comes_after_it() -> None:
    screen = ScreenBuffer(5, 20)
    screen.add(b"x" * 25)
    screen.resize(3, 10)
    screen.add(b"\r\ny")
    _, now = await screen.drawn()
    assert (now.rows, now.columns) == (3, 10)
    assert now.lines[-1] == "y"


HOSTILE = {
    "erasing": b"x" * 90_000 + b"\x1b[2J" * 9000,
    "lines": b"\x1b[m\n" * 30_000,
    "inserting": b"\x1b[9999@" * 18_000,
    "repeating": b"x\x1b[9999b" * 16_000,
    "saving": b"\x1b7" * 60_000,
    "combining": b"e" + "\u0301".encode() * 60_000,
    "a string without an end": b"\x1b]0;" + b"x" * 120_000,
    "too many numbers": b"\x1b[1;2;3;4;5A\x1b[" + b"1;" * 10_000 + b"m",
    "private ones": b"\x1b[?5A\x1b[?3h\x1b[96h\x1b[?1;2;3r\x1b#8",
    "no UTF-8": bytes(range(128, 256)) * 900,
}


@pytest.mark.parametrize("name", rows(HOSTILE, [*HOSTILE][::2]))
async def test_hostile_bytes_cost_seconds_at_most_and_change_no_size(name: str) -> None:
    data = HOSTILE[name]
    screen = ScreenBuffer(200, 500)
    screen.add(data)
    began = time.process_time()
    drawn, now = await screen.drawn()
    assert time.process_time() - began < 10
    assert (now.rows, now.columns) == (200, 500)
    assert len(drawn) < 1 << 20
    assert all(len(line) <= 500 * 8 for line in now.lines)


FLOOD = b"".join(b"\x1b[%d;%dH\x1b[31ma\x1b[L\x1b[100@" % (n % 200, n % 500) for n in range(6000))


def flooded(drawing: asyncio.Lock | None = None) -> ScreenBuffer:
    screen = ScreenBuffer(200, 500, drawing)
    screen.add(FLOOD)
    return screen


async def given_up(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_many_screens_at_once_take_no_thread_that_others_wait_for() -> None:
    drawing: list[asyncio.Task[object]] = [
        asyncio.create_task(flooded().drawn()) for _ in range(40)
    ]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(time.monotonic)
    done = sum(task.done() for task in drawing)
    await given_up(drawing)
    assert done < 20


async def test_a_conversation_waits_for_its_own_screens_first() -> None:
    theirs, ours = asyncio.Lock(), ScreenBuffer(5, 20, asyncio.Lock())
    ours.add(b"\x1b[2Jours")
    drawing: list[asyncio.Task[object]] = [
        asyncio.create_task(flooded(theirs).drawn()) for _ in range(8)
    ]
    await asyncio.sleep(0.05)
    await ours.drawn()
    done = sum(task.done() for task in drawing)
    await given_up(drawing)
    assert done <= 2


async def test_what_was_given_up_is_not_drawn() -> None:
    """Whoever comes and goes again and again makes no queue that others wait in."""
    first = asyncio.create_task(flooded().drawn())
    await asyncio.sleep(0.05)
    gone: list[asyncio.Task[object]] = [asyncio.create_task(flooded().drawn()) for _ in range(30)]
    await asyncio.sleep(0.05)
    await given_up(gone)
    await first
    ours = ScreenBuffer(5, 20)
    ours.add(b"ours")
    async with asyncio.timeout(60):  # thirty of them take longer on any machine
        await ours.drawn()
