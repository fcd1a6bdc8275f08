"""What a kernel prints, as the messages that clients keep."""

import asyncio
from collections.abc import Mapping
from typing import Any

from sbx.jupyter.channels import FULL, StreamBatcher
from sbx.jupyter.serialize import JupyterMessage
from tests.made_tasks import made_tasks

CELL: Mapping[str, Any] = {"msg_id": "cell"}
IDLE = JupyterMessage("status", {"execution_state": "idle"})


class Sent:
    """What was sent, and `some` once there is any."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str, str]] = []
        self.some = asyncio.Event()

    async def __call__(self, message: JupyterMessage, parent: Mapping[str, Any]) -> None:
        said = message.content
        self.parts.append((message.kind, said.get("text", ""), parent.get("msg_id", "")))
        self.some.set()


def text(text: str, name: str = "stdout") -> JupyterMessage:
    return JupyterMessage("stream", {"name": name, "text": text})


async def test_a_line_and_its_newline_are_one_message() -> None:
    gathering = StreamBatcher(sent := Sent())
    for piece in ("one", "\n", "two", "\n"):
        await gathering.publish(text(piece), CELL)
    assert sent.parts == []
    await gathering.publish(IDLE, CELL)
    assert sent.parts == [("stream", "one\ntwo\n", "cell"), ("status", "", "cell")]


async def test_text_after_which_nothing_comes_is_sent_soon() -> None:
    gathering = StreamBatcher(sent := Sent())
    await gathering.publish(text("busy"), CELL)
    await sent.some.wait()
    assert sent.parts == [("stream", "busy", "cell")]
    await gathering.publish(text("more"), CELL)
    await gathering.flush()
    assert sent.parts[1:] == [("stream", "more", "cell")]


async def test_streams_and_cells_are_kept_apart_in_their_order() -> None:
    gathering = StreamBatcher(sent := Sent())
    other = {"msg_id": "other"}
    for piece, name, parent in (
        ("a", "stdout", CELL),
        ("b", "stderr", CELL),
        ("c", "stdout", CELL),
        ("d", "stdout", other),
    ):
        await gathering.publish(text(piece, name), parent)
    await gathering.flush()
    assert [(said, whose) for _, said, whose in sent.parts] == [
        *(("a", "cell"), ("b", "cell"), ("c", "cell")),
        ("d", "other"),
    ]


async def test_much_text_does_not_wait() -> None:
    gathering = StreamBatcher(sent := Sent())
    await gathering.publish(text("x" * (FULL - 1)), CELL)
    assert sent.parts == []
    await gathering.publish(text("y"), CELL)
    assert [len(said) for _, said, _ in sent.parts] == [FULL]


async def test_nothing_is_sent_after_the_end() -> None:
    with made_tasks() as made:
        gathering = StreamBatcher(sent := Sent())
        await gathering.publish(text("late"), CELL)
        await gathering.close()
    assert sent.parts == []
    assert [task for task in made if not task.done()] == []


async def test_who_cannot_be_sent_to_holds_up_the_text_that_follows() -> None:
    """Text that waited too long is on its way, and what fills the room behind it gets in line."""
    began, free, in_turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
    sent = Sent()

    async def slow(message: JupyterMessage, parent: Mapping[str, Any]) -> None:
        async with in_turn:
            began.set()
            await free.wait()
            await sent(message, parent)

    gathering = StreamBatcher(slow)
    await gathering.publish(text("first"), CELL)
    await began.wait()
    behind = asyncio.create_task(gathering.publish(text("x" * FULL), CELL))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not behind.done()
    free.set()
    await behind
    assert [said[:5] for _, said, _ in sent.parts] == ["first", "xxxxx"]
