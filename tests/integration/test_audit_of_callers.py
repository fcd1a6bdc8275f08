"""What the audit log tells of callers, and what a token of one conversation is told of its box."""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import collected, events, made
from live_app import Served
from sessions_calls import API, ensure, new_user, put, run, url

from sbx.store.tokens import TokenRecord

ENV = {"SECRET": "of-everybody"}


class User:
    """A user of a new owner, whose session knows a secret; and the owner's key."""

    def __init__(self, served: Served, owner: str, key: httpx.AsyncClient, box: str) -> None:
        self.served, self.owner, self.key, self.box = served, owner, key, box
        self.session = f"sb-session-{owner}-agent"

    async def token(self, **bounds: Any) -> tuple[TokenRecord, httpx.AsyncClient]:
        given = {"user_id": self.owner, "ttl_s": 600.0, **bounds}
        record, text = await self.served.service.access.make_token(self.owner, **given)
        return record, self.served.client(text)


@pytest_asyncio.fixture
async def user(served: Served) -> AsyncIterator[User]:
    name = new_user()
    async with served.client(await served.key_of(name)) as key:
        assert (await ensure(key, name, env=ENV)).status_code == 201
        answer = (await key.get(f"/v1/sandboxes/sb-session-{name}-agent")).json()
        yield User(served, name, key, answer["id"])
        await key.delete(url(f"sb-session-{name}-agent"))


def log(served: Served) -> list[dict[str, Any]]:
    lines = (served.service.data_dir / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def said(served: Served, who: str) -> list[tuple[str, str]]:
    return [(one["what"], one["object"]) for one in log(served) if one["who"] == who]


@pytest.mark.full_tier
async def test_what_a_token_does_is_told_with_the_token(served: Served, user: User) -> None:
    """The native routes told nothing of files, uploads, starts and stops, and an act of a token
    was told as its owner's."""
    record, client = await user.token()
    box = f"/v1/sandboxes/{user.box}"
    talk = f"{box}/conversations/c1"
    file = {"path": "a.txt"}
    async with client:
        replies = [
            await client.put(f"{talk}/files", params=file, content=b"x"),
            await client.post(f"{talk}/directories", json={"path": "d"}),
            await client.delete(f"{talk}/files", params=file),
            await client.put(f"{talk}/uploads/u.csv", content=b"x"),
            await client.delete(f"{talk}/uploads/u.csv"),
            await client.post(f"{talk}/start"),
            await client.post(f"{talk}/stop"),
            await client.put(f"{box}/filesystem/files", json={"path": "b.txt", "content": "x"}),
            await client.delete(f"{box}/filesystem/files", params={"path": "b.txt"}),
            await client.post(
                f"{box}/filesystem/upload", data={"path": "c"}, files={"file": ("c", b"x")}
            ),
            await client.post(f"{box}/extend_ttl", json={"extend_by": 5}),
            await client.post(f"{box}/stop"),
            await client.post(f"{box}/resume"),
            await client.delete(box),
        ]
        assert [one.status_code for one in replies if one.status_code >= 300] == []
    assert said(served, f"{user.owner} {record.id}") == [
        (what, user.box)
        for what in (
            "file.write", "directory.create", "file.delete", "upload.put", "upload.delete",
            "conversation.start", "conversation.stop", "file.write", "file.delete", "file.write",
            "sandbox.extend", "sandbox.stop", "sandbox.resume", "sandbox.delete",
        )
    ]  # fmt: skip
    (upload,) = (one["details"] for one in log(served) if one["object"] == user.box
                 and one["what"] == "upload.put")  # fmt: skip
    assert (upload["conversation"], upload["name"], upload["size"]) == ("c1", "u.csv", 1)


@pytest.mark.full_tier
async def test_the_acts_of_a_session_are_told_with_the_token(served: Served, user: User) -> None:
    record, client = await user.token(scopes=["execute", "files:write", "admin"])
    async with client:
        await put(client, user.session, "a.csv", b"x")
        await client.post(url(user.session, "/stop"))
        assert (await ensure(client, user.owner)).status_code == 200  # which starts it again
        assert (await ensure(client, user.owner)).status_code == 200
        await client.delete(url(user.session, "/conversations/c1"))
        assert (await client.post(f"{API}/login")).status_code == 200
        await client.delete(url(user.session))
    session = user.session
    assert said(served, f"{user.owner} {record.id}") == [
        ("upload.put", session),
        ("session.stop", session),
        ("session.resume", session),
        ("session.reuse", session),
        ("conversation.delete", session),
        ("token.login", record.id),
        ("session.delete", session),
    ]


async def test_a_key_is_told_by_its_id_and_a_peer_by_its_uid(
    served: Served, client: httpx.AsyncClient
) -> None:
    key = (await client.post("/v1/admin/keys", json={"owner": "ann", "operator": True})).json()
    async with served.client(key["key"]) as ann:
        box = (await made(ann))["id"]
        asked = {"user_id": "u", "conversation_id": "c1", "scopes": ["files:read"]}
        token = (await ann.post("/v1/admin/tokens", json=asked)).json()
        await collected(ann)
        await ann.delete(f"/v1/sandboxes/{box}")
    assert said(served, f"ann {key['id']}") == [
        ("sandbox.create", box),
        ("token.create", token["id"]),
        ("gc.run", served.service.instance_id),
        ("sandbox.delete", box),
    ]
    assert ("key.create", key["id"]) in said(served, f"uid:{os.getuid()}")
    (answer,) = (one["details"] for one in log(served) if one["object"] == token["id"])
    assert (answer["conversation_id"], answer["scopes"]) == ("c1", ["files:read"])


async def test_a_long_path_hides_nothing_else(served: Served, user: User) -> None:
    """Details beyond the longest line would be left out, all of them."""
    path = "/".join(["𝄞" * 60] * 16)
    talk = f"/v1/sandboxes/{user.box}/conversations/c1"
    reply = await user.key.put(f"{talk}/files", params={"path": path}, content=b"x")
    assert reply.status_code == 200, reply.text
    answer = log(served)[-1]["details"]
    assert (answer["conversation"], answer["size"]) == ("c1", 1)
    assert answer["path"].startswith("𝄞")


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("bounds", "env", "kernels"),
    [
        ({"conversation_id": "c1", "scopes": ["files:read"]}, None, []),
        ({"conversation_id": "c1"}, None, ["c1"]),
        ({"scopes": ["files:read"]}, None, []),
        ({}, ENV, ["c1", "c2"]),
    ],
)
async def test_inspect_tells_a_token_what_is_within_its_bounds(
    user: User, bounds: dict[str, Any], env: dict[str, str] | None, kernels: list[str]
) -> None:
    """The environment of the sandbox was told to a token that may only read one conversation's
    files."""
    for conversation in ("c1", "c2"):
        await run(user.key, user.session, "1", conversation)
    _, client = await user.token(**bounds)
    async with client:
        answer = (await client.get(f"/v1/sandboxes/{user.box}/inspect")).json()
    assert answer["env"] == env
    assert [one["conversation"] for one in answer["kernels"]] == kernels
    shown = [one["conversation_id"] for one in answer["conversations"]]
    assert shown == (["c1"] if "conversation_id" in bounds else ["c1", "c2"])


async def test_a_token_of_one_conversation_learns_of_no_other(user: User) -> None:
    """The events, as a list and as a stream, named all conversations."""
    for conversation in ("c2", "c1"):
        await run(user.key, user.session, "1", conversation)
    await user.key.delete(url(user.session, "/conversations/c2"))
    _, client = await user.token(conversation_id="c1")
    box = f"/v1/sandboxes/{user.box}"
    async with client:
        one = (await client.get(f"{box}/events", params={"limit": 1})).json()
        params = {"cursor": one["next_cursor"]}
        rest = (await client.get(f"{box}/events", params=params)).json()
        seen = [(event["type"], event["details"]) for event in one["items"] + rest["items"]]
        followed = []
        accept = {"accept": "text/event-stream"}
        async with client.stream("GET", f"{box}/events", headers=accept) as stream:
            assert (await user.key.delete(box)).status_code == 204
            followed = [event.data["type"] async for event in events(stream)]
        answer = [await client.get(url(user.session)), await client.get(f"{API}/sessions")]
    assert [what for what, _ in seen] == ["created", "started"]
    assert seen[1][1] == {"conversation": "c1"}
    assert followed[:2] == ["created", "started"]
    assert followed[-1] == "deleted"
    assert "conversation_deleted" not in followed
    assert not [reply.text for reply in answer if '"c2"' in reply.text or "/c2" in reply.text]


async def test_a_token_of_another_conversation_is_refused_before_its_body_is_read(
    user: User,
) -> None:
    """And it does not take back a stop by request."""
    await run(user.key, user.session, "1", "c1")
    box = f"/v1/sandboxes/{user.box}"
    await user.key.post(f"{box}/stop")
    _, client = await user.token(conversation_id="c1")
    async with client:
        files = {"file": ("x", b"x")}
        for reply in (
            await client.post(f"{box}/filesystem/upload", data={"path": "x"}, files=files),
            await client.get(f"{box}/filesystem/files", params={"path": "x"}),
            await client.post(f"{box}/python/exec", json={"code": "1"}),
            await client.post(f"{box}/conversations/c2/start"),
            await client.get(f"{box}/conversations/c2/list"),
            await client.put(f"{box}/conversations/c2/files", params={"path": "x"}, content=b"x"),
        ):
            assert reply.status_code == 404, reply.text
    assert (await user.key.get(f"{box}/inspect")).json()["stopped"] is True
