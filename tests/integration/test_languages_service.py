"""Languages by HTTP: /api/v1 execute, the native route, history, profiles."""

from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from sessions_calls import code_of, new_session, run, url
from speaking import needs_language
from test_sessions_runs import events

from sbx.runtime.processes import languages
from sbx.runtime.processes.languages import InstalledPrograms


def only(monkeypatch: pytest.MonkeyPatch, found: InstalledPrograms) -> None:
    """The service, which is in this process, finds nothing else from now on."""
    monkeypatch.setattr(languages, "find", lambda view: found)
    monkeypatch.setattr(languages, "_cache", languages.Cache())


async def box_of(client: httpx.AsyncClient) -> str:
    reply = await client.post("/v1/sandboxes", json={})
    return str(reply.json()["id"])


async def asked(client: httpx.AsyncClient, box: str, **body: Any) -> httpx.Response:
    path = f"/v1/sandboxes/{box}/conversations/default/runs"
    return await client.post(path, json=body, timeout=60)


@pytest.mark.full_tier
async def test_a_session_executes_other_languages(client: httpx.AsyncClient) -> None:
    needs_language("javascript")
    session = await new_session(client)
    code = "require('fs').writeFileSync('made', '1'); console.log(6 * 7); console.error('no')"
    body = (await run(client, session, code, language="javascript")).json()
    assert (body["status"], body["stdout"], body["stderr"]) == ("ok", "42\n", "no\n"), body
    assert (body["result"], body["execution_count"], body["error"]) == (None, None, None)
    assert (await run(client, session, "open('made').read()")).json()["result"] == "'1'"
    reply = await run(client, session, "echo 1; exit 3", language="bash", stream=True)
    answer = events(reply.text)
    assert [kind for _, kind, _ in answer] == ["run_start", "stdout", "run_end"]
    assert (answer[-1][2]["status"], answer[-1][2]["stdout"]) == ("error", "1\n")
    late = (await run(client, session, "sleep 30", language="bash", timeout=1)).json()
    assert (late["status"], late["state_lost"]) == ("timeout", False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_language_that_is_not_there_is_400_and_no_run(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    only(
        monkeypatch,
        InstalledPrograms(bash="/usr/bin/bash", node="/usr/bin/node", node_version=(20, 1, 1)),
    )
    session = await new_session(client)
    packages = {"typescript": "nodejs", "java": "default-jdk", "go": "golang"}
    for language, package in packages.items():
        reply = await run(client, session, "1", language=language, stream=stream)
        assert code_of(reply) == (400, "language_unavailable")
        details = reply.json()["error"]["details"]
        assert details["install"] == package
        assert details["available"] == ["bash", "javascript"]
    listed = (await client.get(url(session, "/conversations"))).json()["items"]
    assert [one["status"] for one in listed] in ([], ["idle"])


async def test_runs_of_every_language_are_in_the_history(client: httpx.AsyncClient) -> None:
    box = await box_of(client)
    first = await asked(client, box, kind="bash", code="echo $1; exit 3", args=["one"])
    assert (first.status_code, first.json()["exit_code"]) == (200, 3)
    await asked(client, box, kind="python", code="1")
    path = f"/v1/sandboxes/{box}/history"
    (entry,) = (await client.get(path, params={"exec_type": "bash"})).json()["entries"]
    assert (entry["code"], entry["success"], entry["output"]) == ("echo $1; exit 3", False, "one\n")
    assert (await client.get(path)).json()["total"] == 2
    refused = await client.get(path, params={"exec_type": "perl"})
    assert refused.status_code == 422


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"kind": "perl"}, 422, "validation_error"),
        ({"kind": "bash", "args": ["x"] * 1001}, 422, "validation_error"),
        ({"kind": "bash", "args": ["\0"]}, 400, "invalid_arguments"),
        ({"kind": "bash", "args": ["x" * (200 << 10)]}, 413, "arguments_too_large"),
        ({"kind": "bash", "timeout": 3601}, 400, "limit_widened"),
        ({"kind": "bash", "env": {"": "x"}}, 400, "invalid_env"),
    ],
)
async def test_what_the_native_route_refuses(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, code: str
) -> None:
    reply = await asked(client, await box_of(client), **{"code": "true", **body})
    assert code_of(reply) == (status, code), reply.text


async def test_an_interrupt_of_the_conversation_ends_a_script(client: httpx.AsyncClient) -> None:
    box = await box_of(client)
    path = f"/v1/sandboxes/{box}/conversations/default"
    # One long wait: bash goes on when the signal comes just as a child of it ends by itself, which
    # was 2 % of the interrupts of a loop over `sleep 0.01`.
    body = {"kind": "bash", "code": "echo on; sleep 60; sleep 60", "stream": True}
    async with client.stream("POST", f"{path}/runs", json=body, timeout=30) as reply:
        lines = reply.aiter_lines()
        async for line in lines:
            if line.startswith("event: stdout"):
                break
        assert (await client.post(f"{path}/interrupt")).json() == {"interrupted": True}
        rest = [line async for line in lines]
    assert any('"status":"interrupted"' in line for line in rest)


async def test_profiles_say_which_languages_there_are(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = InstalledPrograms(bash="/usr/bin/bash", node="/usr/bin/node", node_version=(22, 13, 0))
    only(monkeypatch, found)

    async def languages_of(profile: str) -> list[str]:
        items = (await client.get("/v1/profiles")).json()["items"]
        (answer,) = (one["languages"] for one in items if one["id"] == profile)
        return list(answer)

    assert await languages_of("default") == ["python", "bash", "javascript", "typescript"]
    assert await languages_of("python-default") == await languages_of("default")
    assert await languages_of("strict") == ["python"]
    only(monkeypatch, replace(found, node=None, java="/usr/bin/java"))
    assert await languages_of("default") == ["python", "bash", "java"]
