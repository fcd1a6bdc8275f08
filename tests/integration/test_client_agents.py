"""Agents by our client: asked, followed through a cut, answered; projects and tools."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from agent_calls import ANN, Desk, at, calls, client, runs
from model_server import Asked

from sbx.agent.messages import Response
from sbx.client import ChatEvent, Client
from sbx.errors import BadRequest, Conflict, Denied, NotFound
from sbx.protocol.agent import AgentRunEnd, AgentRunStart, StepEnd, ToolEnd, ToolPending
from sbx.sync.client import BlockingClient

__all__ = ["at", "client"]


def of(events: list[ChatEvent], kind: type) -> list[ChatEvent]:
    return [event for event in events if isinstance(event.event, kind)]


@pytest.mark.full_tier
async def test_a_chat_is_a_stream_of_events(at: Desk, client: Client) -> None:
    at.model.add(calls(("run_code", {"code": "6 * 7"})), Response("it is 42"))
    events = [event async for event in client.chat("6 times 7?", conversation_id="c1", **ANN)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[0].event, AgentRunStart)
    assert isinstance(events[-1].event, AgentRunEnd)
    assert events[-1].event.content == "it is 42"
    assert len(of(events, ToolEnd)) == 1
    again = [event async for event in client.follow_chat("c1", after=2)]
    assert again == events[2:]
    page = await client.messages("c1", limit=3)
    assert [message["role"] for message in page] == ["user", "assistant", "tool"]
    assert len(await client.messages("c1", cursor=page.next_cursor)) == 1
    (run,) = await client.agent_runs("c1")
    assert (run["run_id"], run["reason"]) == (events[0].run_id, "done")


async def test_a_chat_that_is_cut_off_is_taken_up_again(at: Desk) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(_: Asked) -> Response:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
        return Response("all of it")

    at.model.add(calls(("list_files", {})), waits)
    path = at.served.socket.with_name("cut.sock")
    async with Cutting.between(path, at.served.socket) as cutting, Client(path) as client:
        events: list[ChatEvent] = []
        async with aclosing(client.chat("go", conversation_id="cut", **ANN)) as chat:
            async for event in chat:
                events.append(event)
                if isinstance(event.event, StepEnd) and not gate.is_set():
                    cutting.cut()
                    gate.set()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1].event, AgentRunEnd)
    assert events[-1].event.content == "all of it"
    assert cutting.cuts == 1


async def test_a_person_answers_by_another_client(at: Desk, client: Client) -> None:
    made = await client.create_project("answers", str(at.directory("answers")))
    at.model.add(runs("echo yes > answer.txt"), Response("done"))
    events: list[ChatEvent] = []
    async with Client(at.served.socket) as person:
        chat = client.chat("do it", conversation_id="p1", project_id=made.id, **ANN)
        async with aclosing(chat):
            async for event in chat:
                events.append(event)
                if isinstance(event.event, ToolPending):
                    (waiting,) = await person.approvals()
                    with pytest.raises(BadRequest):
                        await person.decide(waiting["tool_call_id"], True, remember="prefix")
                    answer = await person.decide(waiting["tool_call_id"], True, remember="exact")
                    assert (answer["approved"], answer["remembered"]) == (True, "exact")
                    with pytest.raises(Conflict):
                        await person.decide(waiting["tool_call_id"], False)
        (rule,) = await person.approval_rules(project_id=made.id)
        await person.revoke_rule(rule["id"])
        assert len(await person.approval_rules()) == 0
    assert (Path(made.working_directory) / "answer.txt").read_text() == "yes\n"


async def test_projects_are_made_changed_and_forgotten(at: Desk, client: Client) -> None:
    made = await client.create_project("mine", str(at.directory("mine")))
    assert await client.project(made.id) == made
    changed = await client.change_project(made.id, name="ours")
    assert (changed.name, changed.working_directory) == ("ours", made.working_directory)
    assert changed in (await client.projects()).items
    for directory in ("/etc", str(at.projects.parent)):
        with pytest.raises(Denied):
            await client.create_project("theirs", directory)
    with pytest.raises(Denied) as refused:
        await client.change_project(made.id, sandbox_enabled=False)
    assert refused.value.code == "host_mode_not_allowed"
    await client.delete_project(made.id)
    with pytest.raises(NotFound):
        await client.project(made.id)
    assert (at.projects / "mine").exists()


async def test_tools_are_told_and_called(at: Desk, client: Client) -> None:
    names = [tool["name"] for tool in await client.tools("anthropic")]
    assert "run_code" in names
    session = (await client.ensure_session(**ANN)).session_id
    answer = await client.invoke(
        "run_code", {"code": "1 + 1"}, session_id=session, conversation_id="t1"
    )
    assert (answer["is_error"], "2" in answer["result"]) == (False, True)
    with pytest.raises(BadRequest):
        await client.invoke("run_code", {}, session_id=session, conversation_id="t1")


async def test_the_blocking_client_does_the_same(at: Desk) -> None:
    at.model.add(Response("hello"))

    def use() -> None:
        with BlockingClient(at.served.socket) as client:
            events = list(client.chat("hi", conversation_id="b1", **ANN))
            assert isinstance(events[-1].event, AgentRunEnd)
            assert [event.seq for event in client.follow_chat("b1", after=1)] == [
                event.seq for event in events[1:]
            ]
            assert not client.abort_chat("b1")
            assert len(client.messages("b1")) == 2
            assert len(client.agent_runs("b1")) == 1
            assert len(client.approvals()) == len(client.approval_rules()) == 0
            assert client.tools("mcp")
            made = client.create_project("blocking", str(at.directory("blocking")))
            assert client.project(made.id) == made
            assert client.change_project(made.id, name="b").name == "b"
            assert made.id in [project.id for project in client.projects()]
            client.delete_project(made.id)

    await asyncio.to_thread(use)


class Cutting:
    """A socket before another one, whose connections are cut when told."""

    def __init__(self, to: Path) -> None:
        self.cuts = 0
        self._to = to
        self._open: set[asyncio.StreamWriter] = set()
        self._pumping: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def between(cls, path: Path, to: Path) -> AsyncIterator["Cutting"]:
        cutting = cls(to)
        server = await asyncio.start_unix_server(cutting._serve, str(path))
        try:
            yield cutting
        finally:
            server.close()
            cutting.cut()
            cutting.cuts -= 1
            if cutting._pumping:
                await asyncio.wait(cutting._pumping)
            await server.wait_closed()

    def cut(self) -> None:
        self.cuts += 1
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_unix_connection(str(self._to))
        self._open |= {writer, to_writer}
        for source, target in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._pumping.add(task)
            task.add_done_callback(self._pumping.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                target.write(data)
                await target.drain()
        self._open.discard(target)
        target.transport.abort()
