"""The proxy in a service: over HTTP, with what it did in the audit log and among the events; as
root behind a broker that was told what jails may be made of."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import made
from live_app import Served, live
from places import short_directory
from service_process import service
from web import ADDRESS, Web, networked, web

from sbx.policy import describe
from sbx.settings_files import to_toml
from tests.tiers import rows

TOKEN = "s3cr3t-of-the-service"
GET = """
import os, urllib.error, urllib.request
def asked(url, **headers):
    try:
        request = urllib.request.Request(url, headers=headers)
        return urllib.request.urlopen(request, timeout=60).read()
    except urllib.error.HTTPError as error:
        return error.read()
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as found:
        yield found


def write_policy(
    directory: Path, site: Web, name: str = "net", source: str = "env:REAL_CRM", **changes: Any
) -> None:
    secret = {"env": "CRM", "hosts": [ADDRESS], "from": source, "allow_plain": True}
    policy = networked(site.host, secrets={"CRM": secret}).model_copy(update=changes)
    said = describe(policy)
    del said["name"]
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.toml").write_text(to_toml(said))


@pytest_asyncio.fixture(scope="module")
async def served(site: Web) -> AsyncIterator[Served]:
    with short_directory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REAL_CRM", TOKEN)
        write_policy(top / "policies", site)
        async with live(top, policy_dirs=(top / "policies",)) as found:
            yield found


async def cell(client: httpx.AsyncClient, box: str, code: str) -> str:
    reply = await client.post(f"/v1/sandboxes/{box}/python/exec", json={"code": GET + code})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["success"], answer
    return str(answer["output"])


@pytest.mark.full_tier
async def test_what_it_did_is_in_the_audit_log_and_what_it_refused_among_the_events(
    served: Served, site: Web
) -> None:
    async with served.client() as client:
        box = (await made(client, profile="net"))["id"]
        assert "hello from /a" in await cell(client, box, f"print(asked('{site.url}/a?key=1'))")
        said = await cell(client, box, "print(asked('http://example.org/private?key=1'))")
        assert "refused by network.allow" in said
        events = (await client.get(f"/v1/sandboxes/{box}/events")).text
        assert '"network_refused"' in events
        assert "example.org" in events
    await served.service.audit.record("test", "end", "test")  # after which the notes are written
    lines = (served.service.data_dir / "audit.jsonl").read_text()
    answer = [
        (line["what"], line["details"]["host"], line["details"].get("path"))
        for line in map(json.loads, lines.splitlines())
        if line["what"].startswith("network.") and line["object"] == box
    ]
    assert answer[0] == ("network.allowed", ADDRESS, "/a")
    assert ("network.ended", ADDRESS, "/a") in answer
    assert answer[-1] == ("network.refused", "example.org", "/private")
    assert TOKEN not in lines


async def test_a_request_takes_hosts_and_secrets_away_and_adds_none(
    served: Served, site: Web
) -> None:
    async with served.client() as client:
        less: dict[str, Any] = {"network": {"allow": []}, "secrets": {}}
        box = (await made(client, profile="net", narrower=less))["id"]
        look = f"print(asked('{site.url}/'), 'CRM' in os.environ)"
        said = await cell(client, box, look)
        assert "network.allow" in said
        assert said.strip().endswith("False")
        more = {"network": {"allow": ["example.org"]}}
        reply = await client.post("/v1/sandboxes", json={"profile": "net", "narrower": more})
        assert reply.json()["error"]["code"] == "limit_widened"


async def test_the_policy_that_is_shown_names_where_a_secret_lies_and_not_what_it_is(
    served: Served,
) -> None:
    async with served.client() as client:
        box = (await made(client, profile="net"))["id"]
        text = (await client.get(f"/v1/sandboxes/{box}/inspect")).text
        assert TOKEN not in text


@pytest.mark.needs("root", "landlock", "seccomp")
@pytest.mark.parametrize("start", rows(["fork", "cold"], ci_tier=["fork"]))
def test_a_service_that_gave_up_root_opens_it_for_jails_of_other_uids(
    site: Web, start: str
) -> None:
    """By a confined broker: the socket's directory is the one thing more that it shows. And the
    file of a secret is the one thing more of the host that the service can read."""
    with short_directory() as top:
        pool = networked().pool.model_copy(update={"start": start})
        token = top / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        source = f"file:{token}" if start == "fork" else "env:REAL_CRM"
        write_policy(top / "policies", site, source=source, pool=pool)
        env = {"SBX_POLICY_DIRS": str(top / "policies"), "REAL_CRM": TOKEN}
        with service(top, env=env) as found, found.client() as client:
            box = client.post("/v1/sandboxes", json={"profile": "net"}).json()["id"]
            code = (
                f"print(asked('{site.url}/{start}', Authorization='Bearer ' + os.environ['CRM']))"
            )
            code += "\nprint(asked('http://example.org/'))"
            reply = client.post(f"/v1/sandboxes/{box}/python/exec", json={"code": GET + code})
            assert reply.status_code == 200, (reply.text, found.log)
            said = reply.json()["output"]
            assert f"hello from /{start}" in said
            assert "refused by network.allow" in said
            receipt = client.get(f"/v1/sandboxes/{box}/conversations/default/receipt").json()[
                "receipt"
            ]
            assert (receipt["path"] == "cold") == (start == "cold"), receipt["fallback"]
            assert receipt["network"] == "proxy: 1 host"
            assert TOKEN not in found.log
    sent = [headers for path, headers in site.asked if path == f"/{start}"]
    assert sent[0]["authorization"] == f"Bearer {TOKEN}"
