"""Public escapes by the fields of a request: lists of hosts that mean all, rules that do nothing,
options of containers in images and metadata, and routes without a key."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory
from starlette.routing import WebSocketRoute

ALLOWED = ("*.files.example", "api.example")
POLICY = f"""
schema = 1
extends = "default"
[network]
mode = "proxy"
allow = {json.dumps(ALLOWED)}
"""
TEMPLATES = {"net": "net", "base": "default"}


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as top:
        (top / "policies").mkdir()
        (top / "policies/net.toml").write_text(POLICY)
        async with live(top, policy_dirs=(top / "policies",), templates=TEMPLATES) as served:
            yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client(await served.key_of("ann")) as client:
        key = client.headers["authorization"].removeprefix("Bearer ")
        client.headers.update({"x-api-key": key, "open-sandbox-api-key": key})
        yield client
    await served.empty()


async def hosts_of_new_sandbox(
    served: Served, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[str, ...] | int:
    """Return the hosts that a new sandbox reaches, or the status of the refusal."""
    reply = await client.post(path, json=body)
    if reply.is_error:
        return reply.status_code
    (sandbox,) = served.service.sandboxes.every()
    network = (await sandbox.view()).policy.network
    await served.empty()
    return network.allow if network.mode == "proxy" else ()


CLOSED = {"denyOut": ["0.0.0.0/0"]}
E2B: list[tuple[dict[str, Any], tuple[str, ...] | int]] = [
    ({}, ALLOWED),
    ({"network": None}, ALLOWED),
    ({"allow_internet_access": False}, ()),
    ({"network": CLOSED}, ()),
    ({"network": {**CLOSED, "allowOut": []}}, ()),
    ({"network": {**CLOSED, "allowOut": None}}, ()),
    ({"network": {**CLOSED, "allowOut": [""]}}, 400),
    ({"network": {**CLOSED, "allowOut": ["*"]}}, 400),
    ({"network": {**CLOSED, "allowOut": ["0.0.0.0/0"]}}, 400),
    ({"network": {**CLOSED, "allowOut": ["evil.example"]}}, 400),
    ({"network": {**CLOSED, "allowOut": ["api.example"]}}, ("api.example",)),
    ({"network": {"denyOut": ["api.example"]}}, 400),
    ({"network": {"denyOut": ["*.files.example", "10.0.0.0/8"]}}, 400),
    ({"network": {"denyOut": []}}, ALLOWED),
]
OPENSANDBOX: list[tuple[dict[str, Any] | None, tuple[str, ...] | int]] = [
    (None, ALLOWED),
    ({}, ()),
    ({"egress": []}, ()),
    ({"egress": None}, ()),
    ({"defaultAction": "deny"}, ()),
    ({"defaultAction": None}, ()),
    ({"defaultAction": "ALLOW"}, ()),
    ({"defaultAction": "allow"}, ALLOWED),
    ({"egress": [{"action": "allow", "target": ""}]}, 400),
    ({"egress": [{"action": "allow", "target": "*"}]}, 400),
    ({"egress": [{"action": "allow", "target": None}]}, 400),
    ({"egress": [{"action": "allow"}]}, 400),
    ({"egress": [{"action": "allow", "target": "api.example"}]}, ("api.example",)),
    ({"defaultAction": "allow", "egress": [{"action": "deny", "target": "api.example"}]}, 400),
    ({"defaultAction": "allow", "egress": [{"action": "block", "target": "api.example"}]}, 400),
    ({"defaultAction": "allow", "egress": ["api.example"]}, 400),
    ({"egress": [{"action": "deny", "target": "api.example"}]}, ()),
    (
        {
            "egress": [
                {"action": "allow", "target": "*.files.example"},
                {"action": "deny", "target": "x.files.example"},
            ]
        },
        400,
    ),
]


@pytest.mark.parametrize(("fields", "hosts"), E2B, ids=str)
async def test_hosts_of_an_e2b_sandbox_are_no_more_than_requested(
    served: Served, client: httpx.AsyncClient, fields: dict[str, Any], hosts: tuple[str, ...] | int
) -> None:
    """CVE-2025-66479: an empty list of hosts meant all. A denied host was ignored here unless all
    were denied."""
    body = {"templateID": "net", **fields}
    assert await hosts_of_new_sandbox(served, client, "/e2b/sandboxes", body) == hosts


@pytest.mark.parametrize(("policy", "hosts"), OPENSANDBOX, ids=str)
async def test_hosts_of_an_opensandbox_are_no_more_than_requested(
    served: Served,
    client: httpx.AsyncClient,
    policy: dict[str, Any] | None,
    hosts: tuple[str, ...] | int,
) -> None:
    """CVE-2025-66479: an empty policy meant all hosts here, too, and a denied host was ignored."""
    body = {"templateId": "net", "networkPolicy": policy, "entrypoint": ["x"]}
    assert await hosts_of_new_sandbox(served, client, "/opensandbox/v1/sandboxes", body) == hosts


@pytest.mark.parametrize(
    "allow", [None, [""], ["*"], [None], "", "*", {}, ["evil.example"]], ids=str
)
async def test_hosts_of_our_own_api_are_lists_of_hosts(
    served: Served, client: httpx.AsyncClient, allow: Any
) -> None:
    for body in ({"policy": "net", "narrower": {"network": {"allow": allow}}},):
        hosts = await hosts_of_new_sandbox(served, client, "/v1/sandboxes", body)
        assert hosts in ((), 400, 403, 422)
    empty = {"policy": "net", "narrower": {"network": {"allow": []}}}
    assert await hosts_of_new_sandbox(served, client, "/v1/sandboxes", empty) in ((), 400)


OPTIONS = {
    "privileged": True,
    "network_mode": "container:other",
    "networkMode": "host",
    "dockerArgs": ["--privileged", "--no-sandbox"],
    "capAdd": ["ALL"],
    "securityOpt": ["seccomp=unconfined"],
    "binds": ["/:/host"],
    "runtime": "host",
    "policy": "host",
    "profile": "host",
}
TEXTS = {**{name: json.dumps(value) for name, value in OPTIONS.items()}, "--no-sandbox": "1"}
CREATIONS = {
    "bay": ("/v1/sandboxes", {"labels": TEXTS}),
    "e2b": ("/e2b/sandboxes", {"templateID": "base", "metadata": TEXTS, **OPTIONS}),
    "opensandbox": (
        "/opensandbox/v1/sandboxes",
        {
            "image": {"uri": "base", "auth": OPTIONS},
            "metadata": TEXTS,
            "extensions": TEXTS,
            "entrypoint": ["--privileged", "--net=host"],
            "env": {"DOCKER_OPTS": "--privileged"},
            **OPTIONS,
        },
    ),
    "sessions": (
        "/api/v1/sessions",
        {"user_id": "u", "agent_id": "a", "config": {}, "metadata": TEXTS},
    ),
}


@pytest.mark.parametrize("surface", CREATIONS)
async def test_options_of_containers_in_a_request_move_no_wall(
    served: Served, client: httpx.AsyncClient, surface: str
) -> None:
    """CVE-2026-27002, CVE-2026-32038, CVE-2026-32046: OpenClaw passed options of a request to its
    container. Here they are refused, or ignored and named, or text."""
    path, body = CREATIONS[surface]
    reply = await client.post(path, json=body)
    if reply.is_error:
        assert reply.status_code in (400, 422)
        return
    (sandbox,) = served.service.sandboxes.every()
    policy = (await sandbox.view()).policy
    default, _ = await served.service.runtime.decide("default")
    assert policy.walls == default.walls
    assert (policy.network, policy.filesystem, policy.filter, policy.host_executables) == (
        default.network,
        default.filesystem,
        default.filter,
        default.host_executables,
    )


NAMES = ("base --privileged", "base\n--net=host", "--privileged", "../default", "host", "default\0",
         "base;host", "BASE")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_an_image_is_a_name_of_the_operator_and_no_option(
    served: Served, client: httpx.AsyncClient, name: str
) -> None:
    for path, body in (
        ("/e2b/sandboxes", {"templateID": name}),
        ("/opensandbox/v1/sandboxes", {"image": {"uri": name}, "entrypoint": ["x"]}),
        ("/opensandbox/v1/sandboxes", {"templateId": name, "entrypoint": ["x"]}),
    ):
        reply = await client.post(path, json=body)
        assert reply.status_code in (400, 404), (path, reply.text)
    assert not list(served.service.sandboxes.every())


# Routes that answer a caller without a key: static pages, the list of routes, whether a service
# runs, and a login, which takes the password itself.
PUBLIC = {
    *("GET /", "GET /console", "GET /console/static/{name:path}", "GET /console/{frame}.html"),
    *("GET /console/{path:path}", "GET /docs", "GET /health", "GET /openapi.json"),
    *("HEAD /openapi.json", "POST /api/v1/console/login"),
}


async def test_every_other_route_wants_a_key(served: Served) -> None:
    """CVE-2025-3248, CVE-2026-4307: a route that runs code answered any caller."""
    address = ("192.0.2.7", 4321)
    transport = httpx.ASGITransport(served.app, client=address, raise_app_exceptions=False)
    answered, sockets = set(), 0
    async with httpx.AsyncClient(transport=transport, base_url="http://sbx") as client:
        for route in served.app.routes:
            template = getattr(route, "path", "")
            path = re.sub(r"\{[^}]*\}", "x", template)
            for method in getattr(route, "methods", None) or ():
                reply = await client.request(method, path, json={})
                if reply.status_code not in (401, 403):
                    answered.add(f"{method} {template}")
            if isinstance(route, WebSocketRoute):
                sockets += 1
                assert not await is_accepted(served, path, address), path
    assert answered == PUBLIC
    assert sockets >= 2


async def is_accepted(served: Served, path: str, client: tuple[str, int]) -> bool:
    """Return whether a WebSocket without a key is accepted."""
    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"sbx")], "client": client, "server": ("sbx", 80),
        "subprotocols": [], "extensions": {"websocket.http.response": {}}, "state": {},
    }  # fmt: skip
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if not sent else "websocket.disconnect", "code": 1000}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await served.app(scope, receive, send)
    assert sent
    return "websocket.accept" in sent
