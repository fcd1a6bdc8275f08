"""One run of a history again, on copies of the files, in a sandbox that is deleted."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from command import sbx
from live_app import Served, live
from places import short_directory

from sbx.client import Client
from sbx.errors import Conflict, NotFound


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        async with live(directory) as served:
            yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.socket) as client:
        yield client


async def again(client: Client, box: str, run_id: str, **body: Any) -> dict[str, Any]:
    reply = await client.request("POST", f"/v1/sandboxes/{box}/runs/{run_id}/rerun", json=body)
    assert isinstance(reply, dict)
    return reply


async def boxes(client: Client) -> int:
    return len((await client.request("GET", "/v1/sandboxes"))["items"])


@pytest.mark.parametrize("policy", ["default", "strict"])
async def test_the_same_code_runs_on_copies_of_the_files(client: Client, policy: str) -> None:
    box = await client.create(policy)
    talk = box.conversation("default")
    await talk.uploads.put_bytes("a.txt", b"uploaded")
    await talk.files.write("data/n.txt", "1")
    code = (
        "n = int(open('data/n.txt').read()) + 1\n"
        "open('data/n.txt', 'w').write(str(n))\n"
        "print(n, open('/workspace/uploads/temparea/a.txt').read())"
    )
    run = await talk.run(code)
    assert run.text == "2 uploaded\n"
    before = await boxes(client)
    reply = await again(client, box.id, run.run_id)
    assert (reply["before"]["text"], reply["after"]["text"]) == ("2 uploaded\n", "3 uploaded\n")
    assert reply["differences"] == ["stdout", "text"]
    assert await talk.files.read("data/n.txt") == "2"
    assert await boxes(client) == before
    await box.close()


async def test_equal_results_and_lost_variables(client: Client) -> None:
    box = await client.create()
    talk = box.conversation("default")
    equal = await talk.run("print(40 + 2)\n1 + 1")
    assert (await again(client, box.id, equal.run_id))["differences"] == []
    shell = await talk.shell("echo hi; exit 3")
    reply = await again(client, box.id, shell.run_id)
    assert (reply["differences"], reply["after"]["exit_code"]) == ([], 3)
    await talk.run("x = 5")
    needs_x = await talk.run("print(x)")
    reply = await again(client, box.id, needs_x.run_id)
    assert reply["after"]["error"]["name"] == "NameError"
    assert "error" in reply["differences"]
    await box.close()


async def test_runs_that_cannot_run_again_are_refused(served: Served, client: Client) -> None:
    box = await client.create()
    talk = box.conversation("default")
    long = await talk.run(f"# {'x' * 40_000}\nprint(1)")
    with pytest.raises(Conflict) as cut:
        await again(client, box.id, long.run_id)
    assert cut.value.code == "code_not_kept"
    with pytest.raises(NotFound):
        await again(client, box.id, "run-unknown")
    run = await talk.run("print(1)")
    async with served.client() as http:
        bounds = {"user_id": "bob", "agent_id": "helper"}
        token = (await http.post("/v1/admin/tokens", json=bounds)).json()["token"]
    async with Client(served.socket, key=token) as bob:
        with pytest.raises(NotFound):
            await again(bob, box.id, run.run_id)
    await box.close()


async def test_a_rerun_that_takes_too_long_ends_and_leaves_no_sandbox(client: Client) -> None:
    box = await client.create()
    run = await box.conversation("default").run(
        "import os, time\nif os.path.exists('there'): time.sleep(600)\nopen('there', 'w').close()"
    )
    before = await boxes(client)
    reply = await again(client, box.id, run.run_id, timeout=1)
    assert reply["after"]["status"] == "timeout"
    assert await boxes(client) == before
    await box.close()


async def test_the_command_shows_both_results(served: Served, client: Client) -> None:
    box = await client.create()
    talk = box.conversation("default")
    await talk.run("print('same')")
    env = {"SBX_SOCKET": str(served.socket)}
    equal = await asyncio.to_thread(sbx, "rerun", box.id, "last", env=env)
    assert equal.returncode == 0, equal.stderr
    assert equal.stdout == "before: ok\n    same\nafter: ok\n    same\n"
    assert "the results are equal" in equal.stderr
    run = await talk.run("import secrets; print(secrets.token_hex(8))")
    differ = await asyncio.to_thread(sbx, "rerun", box.id, run.run_id, "--json", env=env)
    assert differ.returncode == 1
    assert json.loads(differ.stdout)["differences"] == ["stdout", "text"]
    await box.close()
