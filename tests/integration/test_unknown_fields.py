"""Fields that a route does not have: refused on our own routes, reported on those of others."""

from typing import Any

import httpx
import pytest
from bay_calls import made
from sessions_calls import API, code_of, new_session, new_user, url

NATIVE = "conversations/default"


@pytest.mark.parametrize(
    ("path", "body", "known"),
    [
        ("/api/v1/sessions", {"user_id": "u", "agent_id": "a", "confg": {}}, "config"),
        ("/api/v1/sessions", {"user_id": "u", "agent_id": "a", "config": {"tll": 1}}, "ttl"),
        ("/api/v1/projects", {"name": "p", "working_dir": "/x"}, "working_directory"),
        ("/v1/admin/tokens", {"user_id": "u", "scope": []}, "scopes"),
    ],
)
async def test_our_own_routes_refuse_a_field_and_name_the_nearest(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], known: str
) -> None:
    reply = await client.post(path, json=body)
    assert code_of(reply) == (400, "unknown_field")
    error = reply.json()["error"]
    assert (error["details"]["nearest"], "did you mean" in error.get("hint", known)) == (
        known,
        True,
    )


async def test_a_run_with_a_misspelled_limit_does_not_run(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    body = {"conversation_id": "c", "code": "open('ran', 'w')", "timout": 1}
    assert code_of(await client.post(url(session, "/execute"), json=body)) == (400, "unknown_field")
    answer = await made(client)
    native = f"/v1/sandboxes/{answer['id']}/{NATIVE}"
    reply = await client.post(f"{native}/runs", json={"code": "1", "timout": 5})
    assert code_of(reply) == (400, "unknown_field")


async def test_bay_s_routes_report_what_they_ignore_and_never_ignore_what_narrows(
    client: httpx.AsyncClient,
) -> None:
    reply = await client.post("/v1/sandboxes", json={"profil": "strict", "é": 1})
    assert (reply.status_code, reply.headers["sbx-ignored"]) == (201, "profil, %C3%A9")
    box = f"/v1/sandboxes/{reply.json()['id']}"
    ran = await client.post(f"{box}/python/exec", json={"code": "1", "timout": 5})
    assert (ran.status_code, ran.headers["sbx-ignored"]) == (200, "timout")
    assert "sbx-ignored" not in (await client.get(box)).headers
    for name in ("policy", "narrower", "env"):
        refused = await client.post(f"{box}/python/exec", json={"code": "1", name: {}})
        assert code_of(refused) == (400, "unknown_field")
    hostile = {"code": "1", "a\r\nset-cookie: x": 1, **{str(number): 1 for number in range(99)}}
    ran = await client.post(f"{box}/python/exec", json=hostile)
    assert "set-cookie" not in ran.headers
    assert len(ran.headers["sbx-ignored"].split(", ")) == 20


async def test_known_fields_are_no_news(client: httpx.AsyncClient) -> None:
    body = {"user_id": new_user(), "agent_id": "a", "config": {"ttl": 60}}
    reply = await client.post(f"{API}/sessions", json=body)
    assert (reply.status_code, "sbx-ignored" in reply.headers) == (201, False)


async def test_a_body_that_is_no_json_says_so(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = await client.post(
            f"{API}/sessions", content=b'{"user_id": "u"}', headers={"content-type": kind}
        )
        assert code_of(reply) == (422, "validation_error")
        message = reply.json()["error"]["message"]
        assert message == "the body is not JSON; send Content-Type: application/json"
