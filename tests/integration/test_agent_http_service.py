"""Agents of a service as an operator starts it: as root it has given up its rights by then."""

import contextlib
import json
import signal
from typing import Any

import httpx
from agent_calls import calls
from model_server import KEY, BrokenOff, ModelServer, model_server
from serving import Service, open_directory, service

from sbx.agent.messages import Response

ASKED = {"user_id": "ann", "agent_id": "helper", "conversation_id": "c1", "message": "do it"}
HANGS = BrokenOff(Response("thinking about it for long"), after=3, then="hang")


def environment(model: ModelServer) -> dict[str, str]:
    return {
        "SBX_AGENT_BASE_URL": model.openai_url,
        "SBX_AGENT_API_KEY": KEY,
        "SBX_AGENT_MODEL_NAME": "scripted",
    }


def read(line: str) -> dict[str, Any] | None:
    return json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else None


def asked(client: httpx.Client) -> list[dict[str, Any]]:
    with client.stream("POST", "/api/v1/chat", json=ASKED) as reply:
        assert reply.status_code == 200
        return [event for line in reply.iter_lines() if (event := read(line)) is not None]


def test_an_agent_works_and_is_told_of_the_end_of_its_service() -> None:
    answer = calls(("run_code", {"code": "print('from ' + 'inside')"}))
    with open_directory() as top, model_server(answer, Response("done"), HANGS) as model:
        with service(top=top, env=environment(model)) as served, served.http() as client:
            events = asked(client)
            assert events[-1]["content"] == "done", events[-1]
            (end,) = (event for event in events if event["type"] == "tool_end")
            assert "from inside" in end["result"]
            ends = follow_to_its_end(served, client)
            assert (ends[-1]["type"], ends[-1]["reason"]) == ("run_end", "aborted")
            assert KEY not in served.log.read_text()
            assert "SBX_AGENT" not in served.log.read_text()  # no setting that is not known
        with service(top=top) as served, served.http() as client:
            runs = client.get("/api/v1/conversations/c1/runs").json()["items"]
            assert [run["reason"] for run in runs] == ["aborted", "done"]
            refused = client.post("/api/v1/chat", json=ASKED)
            assert refused.json()["error"]["code"] == "model_not_configured"


def follow_to_its_end(served: Service, client: httpx.Client) -> list[dict[str, Any]]:
    """Ask, and end the service in the midst of the answer."""
    events = []
    with client.stream("POST", "/api/v1/chat", json=ASKED) as reply:
        for line in reply.iter_lines():
            if (event := read(line)) is not None:
                events.append(event)
                if event["type"] == "text_delta" and len(events) == 2:
                    served.process.send_signal(signal.SIGTERM)
    return events


def test_sandboxes_of_sub_agents_end_with_a_killed_service() -> None:
    """They stayed for a day, within the limit of their owner."""
    delegate = calls(("delegate", {"task": "think"}))
    with open_directory() as top, model_server(delegate, HANGS) as model:
        agents = top / "agents"
        agents.mkdir()
        (agents / "helper.toml").write_text("[delegate]\nat_once = 2\n")
        agents.chmod(0o755)
        env = {**environment(model), "SBX_AGENTS_DIR": str(agents)}
        with (
            service(top=top, env=env) as served,
            served.http() as client,
            contextlib.suppress(httpx.HTTPError),
            client.stream("POST", "/api/v1/chat", json=ASKED) as reply,
        ):
            assert reply.status_code == 200
            assert model.hanging.wait(60)
            items = client.get("/v1/sandboxes").json()["items"]
            session, _ = sorted(items, key=lambda item: str(item["created_at"]))
            served.process.kill()
            served.process.wait(60)
        with service(top=top) as served, served.http() as client:
            (left,) = client.get("/v1/sandboxes").json()["items"]
            assert left["id"] == session["id"]
