"""The key of a model's provider is where it is needed, and nowhere else: all is searched for it."""

import logging
from pathlib import Path

import httpx
import pytest
from agent_calls import calls, desk, say
from model_server import Refused
from places import short_directory
from sessions_calls import API

from sbx.agent.messages import Response
from sbx.agent.settings import AgentSettings, read_agent_settings

KEY = "sk-recognisable-8f1d2c3b4a5968778695a4b3c2d1e0f"
LOOKS = (
    "import os, pathlib\n"
    "seen = dict(os.environ)\n"
    "for path in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
    "    try:\n"
    "        seen[str(path)] = path.read_bytes()\n"
    "    except OSError:\n"
    "        pass\n"
    "pathlib.Path('seen.txt').write_text(repr(seen))\n"
    "print(seen)"
)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AgentSettings:
    """As a service has them: its environment holds the key."""
    for name in ("API_KEY", "SBX_AGENT_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("MODEL_NAME", "scripted")
    return read_agent_settings({"base_url": "http://127.0.0.1:1/v1"}, directory=tmp_path)


async def test_the_key_is_in_no_file_log_event_error_or_sandbox(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    looks = calls(("run_code", {"code": LOOKS}), ("execute_command", {"command": "env; set"}))
    bad = Refused(400, f"what is {KEY}?")
    with short_directory() as directory:
        async with desk(directory, looks, Response("seen"), bad, key=KEY) as at:
            async with at.served.client() as client:
                events = await say(client, "good")
                assert sum(event["type"] == "tool_end" for event in events) == 2
                events += await say(client, "bad")
                assert events[-1]["error"]["code"] == "model_bad_request"
                answer = await everything(client)
            assert at.model.requests[0].key == KEY  # it did arrive where it belongs
            written = files(directory)
    assert any(path.name == "seen.txt" for path in written)
    assert any(path.name == "audit.jsonl" for path in written)
    assert holders(written) == []
    assert [event for event in events if KEY in str(event)] == []
    assert KEY not in answer
    assert KEY not in caplog.text
    assert KEY not in repr(settings)


async def test_a_wrong_key_is_not_quoted_though_the_provider_quotes_it(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with short_directory() as directory:
        other = desk(directory, key=KEY, known_key="sk-another")
        async with other as at, at.served.client() as client:
            events = await say(client, "wrong")
            assert events[-1]["error"]["code"] == "model_unauthorized"
            assert at.model.requests[0].key == KEY
            answer = await everything(client)
        assert holders(files(directory)) == []
    assert KEY not in str(events) + answer + caplog.text


async def everything(client: httpx.AsyncClient) -> str:
    """What a client can be told, errors too."""
    paths = ["/openapi.json", "/metrics", f"{API}/approvals", f"{API}/tools", "/v1/profiles"]
    for conversation in ("good", "bad", "wrong"):
        paths.append(f"{API}/chat/{conversation}/events")
        paths += [
            f"{API}/conversations/{conversation}/{what}" for what in ("messages", "runs", "export")
        ]
    answer = [(await client.get(path)).text for path in paths]
    refused = await client.post(f"{API}/chat", json={"user_id": "ann"})
    assert refused.status_code == 422
    return "\n".join([*answer, refused.text])


def files(top: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in top.rglob("*") if path.is_file()}


def holders(written: dict[Path, bytes]) -> list[Path]:
    return [path for path, content in written.items() if KEY.encode() in content]
