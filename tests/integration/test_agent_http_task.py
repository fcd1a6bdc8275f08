"""A whole task of an agent over HTTP, from the upload to the moment when nothing is left of it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from agent_calls import Desk, calls, desk, kinds, messages, one, say
from model_server import Asked
from places import short_directory
from sessions_calls import API, C1, code_of, ensure, put, url

from sbx.agent.messages import Response, TokenUsage

CSV = b"city,people\nKumquat,3\nLoquat,39\n"
TOGETHER = 12
WRONG = "import csv\nrows = list(csv.DictReader(open('uploads/temparea/towns.csv')))\n"
FIGURE = (
    "import matplotlib.pyplot as plt\n"
    "plt.bar([r['city'] for r in rows], [int(r['people']) for r in rows])\nplt.show()"
)


@pytest_asyncio.fixture(scope="module")
async def at() -> AsyncIterator[Desk]:
    with short_directory() as directory:
        async with desk(directory) as at:
            yield at


def mends(asked: Asked) -> Response:
    """What a model does that reads."""
    assert "KeyError: 'inhabitants'" in asked.messages[-1]["content"]
    return calls(("run_code", {"code": "print(sum(int(r['people']) for r in rows))"}))


def draws(asked: Asked) -> Response:
    assert "42" in asked.messages[-1]["content"]
    result = {"path": "result.txt", "content": "42 people\n"}
    return calls(("run_code", {"code": FIGURE}), ("write_file", result), text="Now the figure.")


async def test_a_task_from_the_upload_to_its_answer_and_then_nothing_is_left(at: Desk) -> None:
    failing = {"code": f"{WRONG}print(sum(int(r['inhabitants']) for r in rows))"}
    at.model.add(
        lambda asked: calls(("run_code", failing)) if "towns.csv" in asked.text else Response("?"),
        mends,
        draws,
        Response("There are 42 people; see result.txt.", usage=TokenUsage(70, 30)),
    )
    async with at.served.client() as client:
        session = (await ensure(client, "ann", "helper")).json()["session_id"]
        assert (await put(client, session, "towns.csv", CSV)).status_code == 201
        events = await say(client, "c1", message="How many people?", sandbox_session_id=session)
        assert kinds(events) == [
            "run_start",
            *("tool_start", "tool_end", "step_end") * 2,
            *("tool_start", "tool_start", "tool_end", "tool_end", "step_end"),
            *("step_end", "run_end"),
        ]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert len({(event["run_id"], event["conversation_id"]) for event in events}) == 1
        assert events[0]["sandbox_session_id"] == session
        end = events[-1]
        assert (end["reason"], end["content"]) == ("done", "There are 42 people; see result.txt.")
        assert end["usage"] == {"input_tokens": 70, "output_tokens": 30}
        ends = [event["is_error"] for event in events if event["type"] == "tool_end"]
        assert ends == [True, False, False, False]

        box = f"/v1/sandboxes/{session}/conversations/c1/files"
        found = await client.get(box, params={"path": "result.txt"})
        assert found.text == "42 people\n"
        said = await messages(client, "c1")
        roles = ["user", *("assistant", "tool") * 3, "tool", "assistant"]
        assert [message["role"] for message in said] == roles
        assert any(picture["media_type"] == "image/png" for picture in pictures(said))
        listed = (await client.get(f"/v1/sandboxes/{session}/history")).json()
        assert listed["total"] == 3  # the agent's runs are runs like all others

        reply = await client.delete(url(session, "/conversations/c1"))
        assert reply.status_code == 204
        assert code_of(await client.get(f"{API}/conversations/c1/messages"))[0] == 404
        assert (await client.get(url(session, "/files"), params=C1)).status_code == 404
    assert left(at, "Kumquat") == []
    assert rows(at) == {"chats": 0, "messages": 0, "agent_runs": 0, "approvals": 0}


async def test_many_conversations_at_once_see_each_their_own_only(at: Desk) -> None:
    """Each is told to write its marker; what it reads back, and is told, is that and no other."""
    markers = [f"marker-{number:03}" for number in range(TOGETHER)]

    def works(asked: Asked) -> Response:
        (mine,) = (marker for marker in markers if marker in asked.text)
        if asked.messages[-1]["role"] == "tool":
            return Response(f"{mine} is done")
        code = f"open('mine.txt', 'a').write('{mine}'); print(open('mine.txt').read())"
        return calls(("run_code", {"code": code}))

    at.model.add(*[works] * (2 * TOGETHER))
    async with at.served.client() as client:
        talks = (say(client, marker, message=f"write {marker}") for marker in markers)
        answer = await asyncio.gather(*talks)
        for marker, events in zip(markers, answer, strict=True):
            assert one(events, "tool_end")["result"].split()[-1] == marker
            assert events[-1]["content"] == f"{marker} is done"
            assert {event["conversation_id"] for event in events} == {marker}


def pictures(said: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [picture for message in said for picture in message.get("images", ())]


def left(at: Desk, word: str) -> list[Path]:
    """The files of sandboxes that hold a word."""
    top = at.served.service.data_dir / "sandboxes"
    files = [path for path in top.rglob("*") if path.is_file()]
    return [path for path in files if word.encode() in path.read_bytes()]


def rows(at: Desk) -> dict[str, int]:
    """How many rows there are of what belongs to conversations with agents."""
    with sqlite3.connect(at.served.service.store.path) as on:
        tables = ("chats", "messages", "agent_runs", "approvals")
        counted = {
            table: on.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables
        }
    on.close()
    return counted
