"""What only looks at a conversation does not make it, and takes nothing that lasts."""

import os

import httpx
from bay_calls import made, refused
from live_app import Served

LOOKS = (
    ("GET", "list"),
    ("GET", "stat?path=a"),
    ("GET", "files?path=a"),
    ("GET", "uploads"),
    ("GET", "uploads/a"),
    ("DELETE", "files?path=a"),
    ("DELETE", "uploads/a"),
)


async def names(client: httpx.AsyncClient, sandbox_id: str) -> list[str]:
    answer = (await client.get(f"/v1/sandboxes/{sandbox_id}/inspect")).json()
    return [one["conversation_id"] for one in answer["conversations"]]


async def test_a_look_at_an_unknown_conversation_is_404(client: httpx.AsyncClient) -> None:
    box = await made(client)
    at = f"/v1/sandboxes/{box['id']}/conversations"
    for number, (method, what) in enumerate(LOOKS):
        refused(await client.request(method, f"{at}/unknown{number}/{what}"), 404, "not_found")
    assert await names(client, box["id"]) == []
    assert (await client.get(f"{at}/default/list")).status_code == 200
    assert (await client.put(f"{at}/new/files?path=a", content=b"x")).status_code == 200
    assert (await client.get(f"{at}/new/files?path=a")).content == b"x"
    assert (await client.put(f"{at}/up/uploads/a", content=b"x")).status_code == 200
    made_directory = await client.post(f"{at}/dir/directories", json={"path": "d"})
    assert made_directory.status_code == 200
    assert await names(client, box["id"]) == ["default", "dir", "new", "up"]


async def test_a_token_that_may_only_read_takes_no_descriptors(
    client: httpx.AsyncClient, served: Served
) -> None:
    made_session = await client.post("/api/v1/sessions", json={"user_id": "u", "agent_id": "a"})
    key = made_session.json()["session_id"]
    answer = await client.post(
        "/v1/admin/tokens",
        json={"user_id": "u", "scopes": ["files:read"], "ttl_s": 60, "owner": f"uid:{os.getuid()}"},
    )
    async with served.client(answer.json()["token"]) as reader:
        await reader.get(f"/v1/sandboxes/{key}/conversations/c/list")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(50):
            url = f"/v1/sandboxes/{key}/conversations/c{number}/list"
            refused(await reader.get(url), 404, "not_found")
        # Not exact: the pool may start a kernel meanwhile.
        assert len(os.listdir("/proc/self/fd")) < before + 50
