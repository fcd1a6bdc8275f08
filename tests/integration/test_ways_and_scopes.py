"""Each way in and out of an approval, a file and a run, and the tokens that it refuses."""

import re
from typing import Any

import httpx
import pytest
from agent_calls import Desk, at, say
from starlette.routing import Route

from sbx.agent.messages import Response
from sbx.api.auth import WAYS
from sbx.service.auth import SCOPES

__all__ = ["at"]
# Of other products: their calls go through one target each (sdk_target.py) and its scopes.
SDK = ("/e2b", "/opensandbox")
# Neither of the three: settings, lists of ids, pages, and what only an owner or operator may do.
NEITHER = re.compile(
    r"(/v1/admin/|/v1/(policies|profiles|cargos)|/console|/docs|/health|/metrics|/openapi.json|/$"
    r"|/api/v1/(me|events|login|logout|console|projects|agents|templates|tasks/templates)\b"
    r"|/api/v1/(quarantine|tools(/sources|/{name})?|sessions(/{session_id}(/extend_ttl)?)?)$"
    r"|/v1/sandboxes(/{sandbox_id}(/(extend_ttl|keepalive|events|inspect|browser/.*))?)?$).*"
)


def ways(at: Desk) -> dict[tuple[str, str], tuple[str, ...]]:
    """The scopes by method and path."""
    found = {}
    for route in at.served.app.routes:
        path = str(getattr(route, "path", ""))
        if path.startswith(SDK):
            continue
        methods = (route.methods or ()) if isinstance(route, Route) else ("WS",)
        for method in sorted(set(methods) - {"HEAD", "OPTIONS"}):
            row = next((each for each in WAYS if re.fullmatch(each[2], f"{method} {path}")), None)
            if row is not None:
                found[method, path] = row[1]
            else:
                assert NEITHER.match(path), f"{method} {path} is in no row of WAYS"
    return found


async def test_each_route_is_a_row_of_the_table_or_neither(at: Desk) -> None:
    found = ways(at)
    assert len(found) > 80
    for _, scopes, pattern in WAYS:
        assert set(scopes) <= set(SCOPES)
        used = [each for each in found if re.fullmatch(pattern, " ".join(each))]
        assert used, f"no route is {pattern}"


@pytest.mark.full_tier
async def test_each_way_refuses_tokens_of_other_scopes(at: Desk) -> None:
    async with at.served.client() as client:
        at.model.add(Response("hi"))
        await say(client, "c1")
        (box,) = [each["id"] for each in (await client.get("/v1/sandboxes")).json()["items"]]
        place = f"/v1/sandboxes/{box}/conversations/c1"
        await client.put(f"{place}/files", params={"path": "a.txt"}, content=b"a")
        await client.put(f"{place}/uploads/u.txt", content=b"a")
        run = (await client.post(f"{place}/runs", json={"code": "1"})).json()["run_id"]
        terminal = (await client.post(f"{place}/terminals", json={})).json()["id"]
        command = (await client.post(f"{place}/commands", json={"command": "sleep 99"})).json()
        ids = {
            "sandbox_id": box,
            "conversation": "c1",
            "conversation_id": "c1",
            "run_id": run,
            "execution_id": run,
            "terminal": terminal,
            "command_id": command["id"],
            "session_id": "sb-session-ann-helper",
            "name": "u.txt",
            "context": "default",
            "port": "8000",
        }
        document = (await client.get("/openapi.json")).json()
        tokens = {}
        for scopes in ((), *((scope,) for scope in SCOPES), None):
            new = {"user_id": "ann", "scopes": scopes, "ttl_s": 600}
            tokens[scopes] = (await client.post("/v1/admin/tokens", json=new)).json()["token"]
        tried = []
        found = {each: scopes for each, scopes in ways(at).items() if each[0] != "WS"}
        # The ways that end something come last, and the largest last of all.
        for method, path in sorted(
            found, key=lambda each: (each[0] == "DELETE", "stop" in each[1], -each[1].count("/"))
        ):
            url = re.sub(r"{(\w+)(:path)?}", lambda match: ids.get(match[1], "x"), path)
            operation = document["paths"].get(path, {}).get(method.lower(), {})
            request = {
                "params": {"path": "a.txt", "pattern": "a", "conversation_id": "c1"},
                "json": None if method == "GET" else example(operation, document),
            }
            for scopes, token in tokens.items():
                if scopes is None:  # the positive control
                    if await status(client, method, url, token, request) not in (
                        401,
                        403,
                        404,
                        422,
                    ):
                        tried.append((method, path))
                        assert found[method, path], f"a token may {method} {path}"
                elif not set(scopes) & set(found[method, path]):
                    code = await status(client, method, url, token, request)
                    assert code in (401, 403, 404, 422), (method, path, scopes, code)
        assert len(tried) > 60


async def status(
    client: httpx.AsyncClient, method: str, url: str, token: str, request: dict[str, Any]
) -> int:
    """The status of a reply; 200 of a request that waits."""
    bearer = {"authorization": f"Bearer {token}"}
    try:
        async with client.stream(method, url, headers=bearer, timeout=3, **request) as reply:
            return reply.status_code
    except httpx.TimeoutException:
        return 200


def example(operation: dict[str, Any], document: dict[str, Any]) -> Any:
    """A body with the required fields, of ids that exist where there are some."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return {}
    known = {"conversation_id": "c1", "user_id": "ann", "agent_id": "helper", "path": "a.txt"}
    known |= {"message": "hi", "sandbox_session_id": "sb-session-ann-helper", "source": "a.txt"}

    def of(schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return of(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return of(schema[key][0])
        if "default" in schema or "enum" in schema:
            return schema.get("default", schema.get("enum", [None])[0])
        if schema.get("type") == "object":
            required = schema.get("required", ())
            return {name: known.get(name) or of(schema["properties"][name]) for name in required}
        plain = {"array": [], "integer": 1, "number": 1.0, "boolean": True}
        return plain.get(schema.get("type", ""), "x")

    return of(content["schema"])
