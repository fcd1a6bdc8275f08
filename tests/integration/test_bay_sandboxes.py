"""/v1/sandboxes, cargos, profiles and collection, over the socket."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from bay_calls import collected, made, refused
from live_app import Served, live

FIELDS = {
    "id", "status", "profile", "cargo_id", "capabilities", "created_at", "expires_at",
    "idle_expires_at", "containers",
}  # fmt: skip


# -- outside of /v1 --------------------------------------------------------------------------------


async def test_health_needs_no_caller(client: httpx.AsyncClient) -> None:
    reply = await client.get("/health", headers={"authorization": "Bearer wrong"})
    assert reply.json() == {"status": "ok", "version": "0.1.0"}


async def test_metrics_are_for_the_operator(served: Served, client: httpx.AsyncClient) -> None:
    assert (await client.get("/metrics")).status_code == 200
    async with served.client(await served.key_of("nobody")) as other:
        refused(await other.get("/metrics"), 403, "forbidden")


# -- sandboxes -------------------------------------------------------------------------------------


async def test_create_answers_every_field(client: httpx.AsyncClient) -> None:
    answer = await made(client)
    assert set(answer) == FIELDS
    assert answer["id"].startswith("sandbox-")
    assert len(answer["id"]) == len("sandbox-") + 12
    assert answer["cargo_id"].startswith("ws-")
    assert answer["status"] == "idle"
    assert answer["profile"] == "python-default"
    assert answer["capabilities"] == ["python", "shell", "filesystem"]
    assert answer["created_at"].endswith("Z")
    assert answer["expires_at"] is answer["containers"] is None


@pytest.mark.parametrize("ttl", [None, 0, -5])
async def test_a_sandbox_without_a_ttl_never_expires(
    client: httpx.AsyncClient, ttl: int | None
) -> None:
    answer = await made(client, ttl=ttl)
    assert answer["expires_at"] is None
    reply = await client.post(f"/v1/sandboxes/{answer['id']}/extend_ttl", json={"extend_by": 60})
    assert refused(reply, 409, "sandbox_ttl_infinite") == {"sandbox_id": answer["id"]}


async def test_create_echoes_the_profile_and_refuses_an_unknown_one(
    client: httpx.AsyncClient,
) -> None:
    assert (await made(client, profile="strict"))["profile"] == "strict"
    refused(
        await client.post("/v1/sandboxes", json={"profile": "none-such"}), 400, "validation_error"
    )
    refused(await client.post("/v1/sandboxes", json={"cargo_id": "ws-0"}), 404, "not_found")


async def test_policy_is_another_name_for_profile_and_is_never_ignored(
    client: httpx.AsyncClient,
) -> None:
    assert (await made(client, policy="strict"))["profile"] == "strict"
    assert (await made(client, policy="strict", profile="strict"))["profile"] == "strict"
    reply = await client.post("/v1/sandboxes", json={"policy": "strict", "profile": "default"})
    assert reply.status_code == 422
    refused(reply, 422, "validation_error")


@pytest.mark.parametrize("profile", ["../default", ""])
async def test_a_profile_is_a_name_and_no_path(client: httpx.AsyncClient, profile: str) -> None:
    reply = await client.post("/v1/sandboxes", json={"profile": profile})
    assert reply.status_code in (400, 422)


async def test_narrower_and_env_reach_the_kernel(client: httpx.AsyncClient) -> None:
    answer = await made(client, narrower={"limits": {"memory_max": "64MiB"}}, env={"COLOR": "blue"})
    reply = await client.post(
        f"/v1/sandboxes/{answer['id']}/python/exec",
        json={"code": "import os; os.environ['COLOR']"},
    )
    assert reply.json()["output"] == "'blue'\n"
    wider = {"narrower": {"limits": {"memory_max": "900GiB"}}}
    refused(await client.post("/v1/sandboxes", json=wider), 400, "limit_widened")


async def test_list_is_by_id_in_pages_and_by_status(served: Served) -> None:
    async with served.client(await served.key_of("lister")) as client:
        ids = sorted([(await made(client))["id"] for _ in range(3)])
        first = (await client.get("/v1/sandboxes", params={"limit": 2})).json()
        assert [item["id"] for item in first["items"]] == ids[:2]
        rest = (await client.get("/v1/sandboxes", params={"cursor": first["next_cursor"]})).json()
        assert [item["id"] for item in rest["items"]] == ids[2:]
        assert rest["next_cursor"] is None
        for status, found in (("idle", 3), ("ready", 0), ("no-such", 3)):
            answer = (await client.get("/v1/sandboxes", params={"status": status})).json()
            assert len(answer["items"]) == found
        for limit in (0, 201, "x"):
            reply = await client.get("/v1/sandboxes", params={"limit": limit})
            refused(reply, 422, "validation_error")
            assert reply.json()["detail"][0]["loc"] == ["query", "limit"]


async def test_a_ready_sandbox_shows_its_kernel(client: httpx.AsyncClient) -> None:
    answer = await made(client)
    url = f"/v1/sandboxes/{answer['id']}"
    await client.post(f"{url}/python/exec", json={"code": "1"})
    found = (await client.get(url)).json()
    assert found["status"] == "ready"
    assert found["idle_expires_at"] is not None
    (container,) = found["containers"]
    assert set(container) == {
        "name", "runtime_type", "status", "version", "capabilities", "healthy"
    }  # fmt: skip
    assert (container["name"], container["runtime_type"]) == ("kernel", "sbx")
    assert (container["status"], container["healthy"]) == ("running", True)


async def test_stop_keeps_files_and_resume_starts_again(client: httpx.AsyncClient) -> None:
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    await client.post(f"{url}/python/exec", json={"code": "x = 1; open('kept', 'w').write('a')"})
    for _ in range(2):
        assert (await client.post(f"{url}/stop")).json() == {"status": "stopped"}
    stopped = (await client.get(url)).json()
    assert (stopped["status"], stopped["idle_expires_at"]) == ("idle", None)
    assert (await client.post(f"{url}/resume")).json()["status"] == "ready"
    reply = await client.post(f"{url}/python/exec", json={"code": "open('kept').read()"})
    assert reply.json()["output"] == "'a'\n"


async def test_keepalive_starts_nothing(client: httpx.AsyncClient) -> None:
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    assert (await client.post(f"{url}/keepalive")).json() == {"status": "ok"}
    assert (await client.get(url)).json()["status"] == "idle"


async def test_extend_ttl_adds_to_what_is_left(client: httpx.AsyncClient) -> None:
    answer = await made(client, ttl=100)
    url = f"/v1/sandboxes/{answer['id']}"
    reply = await client.post(f"{url}/extend_ttl", json={"extend_by": 50})
    assert reply.status_code == 200
    assert set(reply.json()) == FIELDS
    assert reply.json()["expires_at"] > answer["expires_at"]
    for seconds in (0, -1):
        reply = await client.post(f"{url}/extend_ttl", json={"extend_by": seconds})
        refused(reply, 400, "validation_error")
    for body in ({}, {"extend_by": "x"}, {"extend_by": 1e300}, {"extend_by": None}):
        refused(await client.post(f"{url}/extend_ttl", json=body), 422, "validation_error")


async def test_extend_by_very_much_is_refused_or_done(client: httpx.AsyncClient) -> None:
    url = f"/v1/sandboxes/{(await made(client, ttl=10))['id']}"
    reply = await client.post(f"{url}/extend_ttl", json={"extend_by": 1 << 53})
    assert reply.status_code in (200, 400, 422)
    assert (await client.get(url)).status_code == 200


async def test_delete_is_final_and_may_be_said_twice(client: httpx.AsyncClient) -> None:
    answer = await made(client)
    url = f"/v1/sandboxes/{answer['id']}"
    for _ in range(2):
        reply = await client.delete(url)
        assert (reply.status_code, reply.content) == (204, b"")
    refused(await client.get(url), 404, "not_found")
    refused(await client.get(f"/v1/cargos/{answer['cargo_id']}"), 404, "not_found")
    refused(await client.delete("/v1/sandboxes/sandbox-000000000000"), 404, "not_found")


async def test_every_route_of_an_unknown_sandbox_is_404(client: httpx.AsyncClient) -> None:
    url = "/v1/sandboxes/sandbox-000000000000"
    calls: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("POST", "/extend_ttl", {"extend_by": 1}),
        ("POST", "/keepalive", None),
        ("POST", "/stop", None),
        ("POST", "/resume", None),
        ("POST", "/interrupt", None),
        ("POST", "/python/exec", {"code": "1"}),
        ("POST", "/shell/exec", {"command": "true"}),
        ("GET", "/filesystem/files?path=a", None),
        ("PUT", "/filesystem/files", {"path": "a", "content": ""}),
        ("DELETE", "/filesystem/files?path=a", None),
        ("GET", "/filesystem/directories", None),
        ("GET", "/filesystem/download?path=a", None),
        ("GET", "/history", None),
        ("GET", "/history/last", None),
        ("GET", "/history/exec-000000000000", None),
        ("PATCH", "/history/exec-000000000000", {"notes": "x"}),
        ("GET", "/events", None),
        ("GET", "/runs/exec-000000000000/events", None),
        ("POST", "/browser/exec", {}),
    ]
    for method, rest, body in calls:
        reply = await client.request(method, url + rest, json=body)
        refused(reply, 404, "not_found")


async def test_another_owner_finds_nothing(served: Served, client: httpx.AsyncClient) -> None:
    answer = await made(client)
    url = f"/v1/sandboxes/{answer['id']}"
    async with served.client(await served.key_of("mallory")) as other:
        for reply in (
            await other.get(url),
            await other.delete(url),
            await other.post(f"{url}/stop"),
            await other.post(f"{url}/python/exec", json={"code": "1"}),
            await other.get(f"{url}/filesystem/directories"),
            await other.get(f"{url}/history"),
            await other.get(f"/v1/cargos/{answer['cargo_id']}"),
        ):
            refused(reply, 404, "not_found")
        assert (await other.get("/v1/sandboxes")).json()["items"] == []
        named = await other.get("/v1/sandboxes", headers={"x-owner": "uid:0"})
        assert named.json()["items"] == []
    assert (await client.get(url)).status_code == 200


async def test_a_wrong_key_is_401_also_on_the_socket(served: Served) -> None:
    async with served.client("sk-sbx-" + "0" * 64) as other:
        reply = await other.get("/v1/sandboxes")
        refused(reply, 401, "unauthorized")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        refused(await other.get("/v1/profiles"), 401, "unauthorized")
    async with served.client() as other:
        for value in ("Basic abc", "Bearer", "sk-sbx"):
            reply = await other.get("/v1/sandboxes", headers={"authorization": value})
            refused(reply, 401, "unauthorized")


# -- the life of a sandbox -------------------------------------------------------------------------


async def test_events_tell_a_life_in_order(client: httpx.AsyncClient) -> None:
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    await client.post(f"{url}/python/exec", json={"code": "1"})
    await client.post(f"{url}/stop")
    answer = (await client.get(f"{url}/events")).json()
    types = [event["type"] for event in answer["items"]]
    assert types[0] == "created"
    assert types[-1] == "stopped"
    assert set(answer["items"][0]) == {"id", "at", "type", "cause", "details"}
    one = (await client.get(f"{url}/events", params={"limit": 1})).json()
    rest = (await client.get(f"{url}/events", params={"cursor": one["next_cursor"]})).json()
    assert one["items"] + rest["items"] == answer["items"]
    refused(await client.get(f"{url}/events", params={"cursor": "x"}), 422, "validation_error")


# -- idempotency -----------------------------------------------------------------------------------


async def test_the_same_key_gives_the_same_sandbox(client: httpx.AsyncClient) -> None:
    key = {"idempotency-key": "same-1"}
    replies = await asyncio.gather(
        *(client.post("/v1/sandboxes", json={"ttl": 100}, headers=key) for _ in range(5)),
        client.post("/v1/sandboxes", content='{"ttl":  100, "profile": "python-default"}',
                    headers={**key, "content-type": "application/json"}),
    )  # fmt: skip
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.content for reply in replies}) == 1
    other = await client.post("/v1/sandboxes", json={"ttl": 101}, headers=key)
    assert set(refused(other, 409, "conflict")) == {"key", "hint"}
    cargo = await client.post("/v1/cargos", json={}, headers=key)
    refused(cargo, 409, "conflict")


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "a/b"])
async def test_a_malformed_key_is_a_conflict(client: httpx.AsyncClient, key: str) -> None:
    reply = await client.post("/v1/sandboxes", json={}, headers=[("idempotency-key", key)])
    refused(reply, 409, "conflict")


async def test_an_error_is_not_kept(client: httpx.AsyncClient) -> None:
    key = {"idempotency-key": "first-wrong"}
    body = {"profile": "none-such"}
    for _ in range(2):
        refused(await client.post("/v1/sandboxes", json=body, headers=key), 400, "validation_error")


async def test_extend_ttl_again_extends_once(client: httpx.AsyncClient) -> None:
    url = f"/v1/sandboxes/{(await made(client, ttl=100))['id']}"
    replies = [
        await client.post(
            f"{url}/extend_ttl", json={"extend_by": 50}, headers={"idempotency-key": "ext-1"}
        )
        for _ in range(2)
    ]
    assert replies[0].content == replies[1].content
    assert (await client.get(url)).json()["expires_at"] == replies[0].json()["expires_at"]


# -- cargos ----------------------------------------------------------------------------------------


async def test_a_cargo_outlives_its_sandbox(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/cargos", json={"size_limit_mb": 64})
    assert reply.status_code == 201
    cargo = reply.json()
    assert set(cargo) == {
        "id", "managed", "managed_by_sandbox_id", "backend", "size_limit_mb", "created_at",
        "last_accessed_at",
    }  # fmt: skip
    assert (cargo["managed"], cargo["size_limit_mb"]) == (False, 64)
    first = await made(client, cargo_id=cargo["id"])
    assert first["cargo_id"] == cargo["id"]
    files = f"/v1/sandboxes/{first['id']}/filesystem/files"
    await client.put(files, json={"path": "a.txt", "content": "kept"})
    details = refused(await client.delete(f"/v1/cargos/{cargo['id']}"), 409, "conflict")
    assert details["active_sandbox_ids"] == [first["id"]]
    await client.delete(f"/v1/sandboxes/{first['id']}")
    second = await made(client, cargo_id=cargo["id"])
    found = await client.get(
        f"/v1/sandboxes/{second['id']}/filesystem/files", params={"path": "a.txt"}
    )
    assert found.json() == {"content": "kept"}
    await client.delete(f"/v1/sandboxes/{second['id']}")
    assert (await client.delete(f"/v1/cargos/{cargo['id']}")).status_code == 204
    refused(await client.get(f"/v1/cargos/{cargo['id']}"), 404, "not_found")


async def test_a_managed_cargo_goes_with_its_sandbox(client: httpx.AsyncClient) -> None:
    box = await made(client)
    cargo = (await client.get(f"/v1/cargos/{box['cargo_id']}")).json()
    assert (cargo["managed"], cargo["managed_by_sandbox_id"]) == (True, box["id"])
    details = refused(await client.delete(f"/v1/cargos/{box['cargo_id']}"), 409, "conflict")
    assert details["managed_by_sandbox_id"] == box["id"]


async def test_cargos_are_listed_apart(served: Served) -> None:
    async with served.client(await served.key_of("shipper")) as client:
        box = await made(client)
        ids = sorted([(await client.post("/v1/cargos", json={})).json()["id"] for _ in range(2)])
        answer = (await client.get("/v1/cargos")).json()
        assert [item["id"] for item in answer["items"]] == ids
        assert {item["size_limit_mb"] for item in answer["items"]} == {1024}
        managed = (await client.get("/v1/cargos", params={"managed": True})).json()
        assert [item["id"] for item in managed["items"]] == [box["cargo_id"]]


@pytest.mark.parametrize("size", [0, 65537, "x"])
async def test_the_size_of_a_cargo_is_bounded(client: httpx.AsyncClient, size: Any) -> None:
    refused(await client.post("/v1/cargos", json={"size_limit_mb": size}), 422, "validation_error")


# -- operation -------------------------------------------------------------------------------------


async def test_an_alias_of_the_operator_means_another_policy(tmp_path: Path) -> None:
    aliases = {"python-default": "strict", "small": "default"}
    async with live(tmp_path, policy_aliases=aliases) as served, served.client() as client:
        limits = {
            name: (await client.get(f"/v1/sandboxes/{(await made(client, profile=name))['id']}"))
            for name in ("python-default", "strict")
        }
        assert [reply.json()["profile"] for reply in limits.values()] == list(limits)
        assert limits["python-default"].json()["capabilities"] == ["python", "filesystem"]
        items = {one["id"]: one for one in (await client.get("/v1/profiles")).json()["items"]}
        assert items["python-default"]["resources"] == items["strict"]["resources"]
        assert items["small"]["resources"] == items["default"]["resources"]


async def test_profiles_are_the_policies(client: httpx.AsyncClient) -> None:
    items = {one["id"]: one for one in (await client.get("/v1/profiles")).json()["items"]}
    assert {"default", "python-default", "strict", "data-science"} <= set(items)
    one = items["python-default"]
    assert set(one) == {
        "id", "image", "resources", "capabilities", "idle_timeout", "description", "containers",
        "languages",
    }  # fmt: skip
    assert one["resources"] == {"cpus": 1.0, "memory": "1024m"}
    assert one["containers"] is None
    detailed = (await client.get("/v1/profiles", params={"detail": True})).json()["items"]
    assert detailed[0]["containers"][0]["name"] == "kernel"


async def test_collection_reports_its_tasks(client: httpx.AsyncClient) -> None:
    answer = await collected(client)
    assert set(answer) == {"results", "total_cleaned", "total_errors", "duration_ms"}
    assert {one["task_name"] for one in answer["results"]} == {
        "idle_session", "expired_sandbox", "orphan_cargo", "orphan_container"
    }  # fmt: skip
    assert set(answer["results"][0]) == {"task_name", "cleaned_count", "skipped_count", "errors"}
    one = await collected(client, tasks=["idle_session"])
    assert [result["task_name"] for result in one["results"]] == ["idle_session"]
    wrong = await client.post("/v1/admin/gc/run", json={"tasks": ["x"]})
    refused(wrong, 422, "validation_error")


async def test_the_collector_tells_its_state(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/admin/gc/status")).json()
    assert set(answer) == {"enabled", "is_running", "instance_id", "interval_seconds", "tasks"}
    assert answer["tasks"]["idle_session"] == {"enabled": True}


async def test_collection_is_for_the_operator(served: Served) -> None:
    async with served.client(await served.key_of("user")) as other:
        refused(await other.post("/v1/admin/gc/run"), 403, "forbidden")
        refused(await other.get("/v1/admin/gc/status"), 403, "forbidden")
    async with served.client(await served.key_of("boss", operator=True)) as other:
        assert (await other.get("/v1/admin/gc/status")).status_code == 200
