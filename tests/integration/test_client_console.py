"""What a person observes and manages, by our client, with and without asyncio."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, at, client
from console_service import Console, console

from sbx.agent.messages import Response
from sbx.client import Client, RemoteSandbox
from sbx.errors import BadRequest, Conflict, Denied, NotFound
from sbx.sync.client import BlockingClient

__all__ = ["at", "client", "console"]


@pytest_asyncio.fixture(scope="module")
async def box(console: Console) -> AsyncIterator[RemoteSandbox]:
    async with Client(console.served.socket) as client, await client.create() as box:
        await box.run("import math\nprice = 41")
        yield box


# -- conversations with agents --------------------------------------------------------------------


async def test_conversations_are_listed_renamed_and_deleted(at: Desk, client: Client) -> None:
    at.model.add(Response("hello"))
    started = await client.start_chat("good morning", conversation_id="greeting", **ANN)
    assert started["conversation_id"] == "greeting"
    events = [event async for event in client.follow_chat("greeting", run_id=started["run_id"])]
    assert events[-1].run_id == started["run_id"]
    (listed,) = await client.agent_conversations(search="MORNING")
    assert (listed.title, listed.run_id, listed.pending) == ("good morning", None, 0)
    assert listed == await client.agent_conversation("greeting")
    renamed = await client.rename_conversation("greeting", "The first one")
    assert renamed.title == "The first one"
    with pytest.raises(BadRequest):
        await client.rename_conversation("greeting", "")
    await client.delete_conversation("greeting")
    with pytest.raises(NotFound):
        await client.delete_conversation("greeting")
    assert not (await client.agent_conversations(user_id="ann", agent_id="helper")).items
    with pytest.raises(NotFound):
        await client.agent_conversation("greeting")


async def test_the_conversations_of_a_project_are_counted(at: Desk, client: Client) -> None:
    made = await client.create_project("counted", str(at.directory("counted")))
    assert (made.conversations, made.in_use) == (0, False)
    running, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(_: Any) -> Response:
        loop.call_soon_threadsafe(running.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(30)
        return Response("done")

    at.model.add(waits)
    await client.start_chat("go", conversation_id="counts", project_id=made.id, **ANN)
    async with asyncio.timeout(30):
        await running.wait()
    during = await client.project(made.id)
    assert (during.conversations, during.in_use) == (1, True)
    may_end.set()
    async with aclosing(client.follow_chat("counts")) as events:
        async for _ in events:
            pass
    async with asyncio.timeout(30):
        while (after := await client.project(made.id)).in_use:  # noqa: ASYNC110  # the service is asked
            await asyncio.sleep(0.01)
    assert after.conversations == 1
    assert after in (await client.projects()).items
    await client.delete_project(made.id)


async def test_what_changes_is_followed(at: Desk, client: Client) -> None:
    at.model.add(Response("hello"))
    started = await client.start_chat("hi", conversation_id="watched", **ANN)
    # The end of the run is a change as well.
    assert [event async for event in client.follow_chat("watched", run_id=started["run_id"])]
    async with asyncio.timeout(30), aclosing(client.changes()) as changes:
        following = asyncio.ensure_future(anext(changes))
        try:
            while not following.done():  # it follows once its request has begun
                await client.rename_conversation("watched", "renamed")
                await asyncio.wait({following}, timeout=0.1)
            change = following.result()
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
    assert (change["type"], change["conversation_id"]) == ("conversation.changed", "watched")


async def test_templates_are_kept(client: Client) -> None:
    variables = [{"name": "file", "label": "File"}]
    made = await client.create_template("Sum", "Add up {{file}}", variables=variables)
    assert await client.template(made["id"]) == made
    changed = await client.change_template(made["id"], {"description": "Adds up"})
    assert changed == {**made, "description": "Adds up"}
    listed = await client.templates()
    assert changed in listed
    with pytest.raises(Conflict) as refused:
        await client.delete_template(next(each["id"] for each in listed if each["built_in"]))
    assert refused.value.code == "built_in"
    await client.delete_template(made["id"])
    with pytest.raises(NotFound):
        await client.template(made["id"])


async def test_directories_for_projects_are_suggested(at: Desk, client: Client) -> None:
    assert await client.project_directories() == [str(at.projects)]
    made = at.directory("suggested")
    (made / "within").mkdir()
    assert await client.project_directories(str(made)) == [str(made / "within")]
    with pytest.raises(Denied):
        await client.project_directories("/etc")


# -- logins, policies and sandboxes ---------------------------------------------------------------


async def test_logins_of_browsers_are_listed_and_ended(console: Console) -> None:
    async with Client(console.served.socket) as client:
        code = await client.make_login_code(operator=False, path="/console/approvals")
        assert (code["path"], code["names"][0]) == ("/console/approvals", console.name)
        body = {"code": code["code"]}
        reply = await console.send("POST", "/api/v1/console/login", console.page(), body)
        assert reply.json["operator"] is False
        (login,) = await client.logins()
        await client.end_login(login["id"])
        assert await client.logins() == []
        with pytest.raises(NotFound):
            await client.end_login(login["id"])
        assert (await client.me())["owner"] == reply.json["owner"]


async def test_a_sandbox_is_observed(console: Console, box: RemoteSandbox) -> None:
    async with Client(console.served.socket) as client:
        details = await client.details(box.id)
        assert (details["id"], details["kernels"], details["busy"]) == (box.id, 1, False)
        assert await client.network_decisions(box.id) == []
        completed = await client.complete(box.id, "math.sqr", 8)
        assert completed == {"matches": ["sqrt"], "start": 5, "end": 8}
        described = await client.describe(box.id, "price", 5)
        assert "41" in described["data"]["text/plain"]
        (entry,), _ = await client.history(box.id)
        recorded = await client.recorded_run(box.id, entry["id"])
        assert recorded["code"] == "import math\nprice = 41"
        gone = await client.create()
        await gone.close()
        assert gone.id in [ended["id"] for ended in await client.ended_sandboxes()]
        for call in (client.details("gone"), client.network_decisions("gone")):
            with pytest.raises(NotFound):
                await call
        policies = {policy["name"] for policy in await client.policies()}
        assert "default" in policies
        assert (await client.policy("strict"))["name"] == "strict"


async def test_the_blocking_client_has_the_same(console: Console, box: RemoteSandbox) -> None:
    def use(socket: Path) -> None:
        with BlockingClient(socket) as client:
            assert client.me()["service"]["version"]
            assert client.details(box.id)["id"] == box.id
            assert client.complete(box.id, "pric", 4)["matches"] == ["price"]
            assert client.templates()
            assert not client.agent_conversations().items
            assert client.policy("default")["source"] is not None

    await asyncio.to_thread(use, console.served.socket)
