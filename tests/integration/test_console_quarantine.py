"""The quarantine of projects over HTTP: read, restored, deleted, and by whom."""

import json
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from agent_calls import ANN, Desk, at, client, runs

from sbx.agent.messages import Response
from sbx.client import Client
from sbx.errors import Conflict, Denied, NotFound
from sbx.protocol.agent import ToolPending
from sbx.workspace import quarantine

__all__ = ["at", "client"]
pytestmark = pytest.mark.needs("namespaces")


async def _work(at: Desk, client: Client, command: str, name: str) -> Path:
    """Let an agent run a command in a new project, whose owner allows it."""
    made = await client.create_project(name, str(at.directory(name)))
    at.model.add(runs(command), Response("done"))
    chat = client.chat("work", conversation_id=name, project_id=made.id, **ANN)
    async with aclosing(chat) as events:
        async for event in events:
            if isinstance(event.event, ToolPending):
                await client.decide(event.event.tool_call_id, True)
    return Path(made.working_directory)


async def _items_in(client: Client, directory: Path) -> list[dict[str, Any]]:
    return [item for item in await client.quarantine() if item["directory"] == str(directory)]


async def test_a_file_is_read_and_restored_once_its_sandbox_has_ended(
    at: Desk, client: Client
) -> None:
    directory = await _work(at, client, "echo 'export A=1' > .envrc", "restored")
    (item,) = await _items_in(client, directory)
    assert (item["path"], item["program"], item["kind"]) == (".envrc", "direnv", "file")
    content = await client.quarantined(item["id"])
    assert (content["content"], content["complete"]) == ("export A=1\n", True)
    assert not (directory / ".envrc").exists()  # a link that leads nowhere
    with pytest.raises(Conflict) as refused:
        await client.restore_quarantined(item["id"])
    assert refused.value.code == "quarantine_in_use"
    await client.delete_conversation("restored")
    assert await client.restore_quarantined(item["id"]) == str(directory / ".envrc")
    assert (directory / ".envrc").read_text() == "export A=1\n"
    assert await _items_in(client, directory) == []
    log = (at.served.service.data_dir / "audit.jsonl").read_text()
    (line,) = [
        line for line in map(json.loads, log.splitlines()) if line.get("object") == item["id"]
    ]
    assert line["what"] == "quarantine.restore", line


async def test_a_directory_is_read_and_deleted(at: Desk, client: Client) -> None:
    command = "git init -q made && cd made && ln -s /etc/passwd .git/link"
    directory = await _work(at, client, command, "dropped")
    (item,) = await _items_in(client, directory)
    content = await client.quarantined(item["id"])
    entries = {entry["path"]: entry for entry in content["entries"]}
    assert entries["HEAD"]["kind"] == "file"
    assert entries["link"]["target"] == "/etc/passwd"
    head = await client.quarantined(item["id"], "HEAD")
    assert head["content"].startswith("ref: refs/heads/")
    linked = await client.quarantined(item["id"], "link")
    assert (linked["target"], linked["content"]) == ("/etc/passwd", None)  # not followed
    await client.delete_conversation("dropped")
    await client.drop_quarantined(item["id"])
    for call in (client.quarantined, client.drop_quarantined, client.restore_quarantined):
        with pytest.raises(NotFound) as missing:
            await call(item["id"])
        assert missing.value.code == "item_not_found"


async def test_other_owners_and_tokens_have_no_item(at: Desk, client: Client) -> None:
    directory = await _work(at, client, "echo x > .envrc", "private")
    (item,) = await _items_in(client, directory)
    key = await client.make_key("another")
    token = await client.make_token(user_id="ann", agent_id="helper")
    for secret, error in ((key["key"], NotFound), (token["token"], Denied)):
        async with Client(at.served.socket, key=secret) as other:
            assert await other.quarantine() == []
            for call in (other.quarantined, other.restore_quarantined, other.drop_quarantined):
                with pytest.raises(error):
                    await call(item["id"])
    assert await _items_in(client, directory) == [item]


async def test_a_hostile_record_is_shown_as_text(at: Desk, client: Client) -> None:
    directory = await _work(at, client, "echo x > .envrc", "hostile")
    (item,) = await _items_in(client, directory)
    await client.delete_conversation("hostile")
    store = at.served.service.settings.protection.quarantines
    _, content = quarantine.get(store, item["id"])
    record = content.parents[1] / "records" / f"{item['id']}.json"
    hostile = {"path": "a\udcff\u202e\n", "name": "\ud800", "program": "<b>", "kind": "file"}
    record.write_text(json.dumps(hostile))
    os.truncate(content, 200_000)
    (shown,) = await _items_in(client, directory)
    assert shown["path"] == "a\\udcff\u202e\n"
    assert (shown["name"], shown["program"]) == ("\\ud800", "<b>")
    body = await client.quarantined(item["id"])
    assert (len(body["content"]) < 200_000, body["complete"], body["size"]) == (
        True,
        False,
        200_000,
    )
