"""The proxy in a service: over HTTP, with what it did in the audit log and among the events; as
root behind a broker that was told what jails may be made of."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import made
from live_app import Served, live
from places import short_directory
from service_process import service
from web import ADDRESS, Web, granting, networked

from sbx.client import Client
from sbx.errors import Denied, NotFound
from sbx.policy import describe
from sbx.service.caller import Caller
from sbx.service.models import SessionIdentity
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
        (top / "policies" / "granting.toml").write_text(granting(site))
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


async def test_a_grant_is_in_the_receipt_the_events_and_the_audit_log(
    served: Served, site: Web
) -> None:
    url = "/v1/sandboxes/{}/conversations/default/grants"
    access = {"kind": "network", "target": f"{ADDRESS}:{site.port}"}
    async with served.client() as client:
        box = (await made(client, profile="granting"))["id"]
        asked = f"print(asked('{site.url}/a'))"
        assert "refused by network.allow" in await cell(client, box, asked)
        reply = await client.post(url.format(box), json={**access, "duration": "hour"})
        assert reply.status_code == 201, reply.text
        grant = reply.json()
        assert grant["expires_at"] == pytest.approx(grant["granted_at"] + 3600)
        assert "hello from /a" in await cell(client, box, asked)
        assert (await client.get(url.format(box))).json() == {"items": [grant]}
        receipt = await client.get(f"/v1/sandboxes/{box}/conversations/default/receipt")
        assert receipt.json()["receipt"]["grants"] == [grant]

        assert (await client.delete(f"{url.format(box)}/{grant['id']}")).status_code == 204
        assert "refused by network.allow" in await cell(client, box, asked)
        assert (await client.get(url.format(box))).json() == {"items": []}
        gone = await client.delete(f"{url.format(box)}/{grant['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "no_such_grant")
        other = await client.post(url.format(box), json={**access, "target": "127.0.0.1:1"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "not_grantable")
        events = (await client.get(f"/v1/sandboxes/{box}/events")).text
        assert '"granted"' in events
        assert '"grant_ended"' in events
    await served.service.audit.record("test", "end", "test")  # after which the notes are written
    lines = (served.service.data_dir / "audit.jsonl").read_text().splitlines()
    granted, ended = (
        entry
        for entry in map(json.loads, lines)
        if entry["what"].startswith("grant.") and entry["what"] != "grant.revoke"
    )
    assert (granted["what"], ended["what"]) == ("grant.added", "grant.ended")
    assert granted["details"] | {"owner": ""} == {
        "owner": "",
        "conversation": "default",
        "grant": grant,
    }
    assert granted["who"] == grant["by"]


async def test_a_client_grants_and_revokes_access(served: Served, site: Web) -> None:
    async with Client(served.socket) as client, await client.create("granting") as box:
        conversation = box.conversation("other")
        assert await conversation.grants.list() == []
        grant = await conversation.grants.add("network", site.host, "hour")
        assert (grant.kind, grant.target, grant.duration) == ("network", site.host, "hour")
        assert await conversation.grants.list() == [grant]
        assert await box.grants.list() == []  # of another conversation
        run = await conversation.run(f"{GET}print(asked('{site.url}/a'))")
        assert "hello from /a" in run.stdout
        await conversation.grants.revoke(grant.id)
        with pytest.raises(NotFound) as gone:
            await conversation.grants.revoke(grant.id)
        assert gone.value.code == "no_such_grant"
        with pytest.raises(Denied) as refused:
            await conversation.grants.add("network", site.host, "conversation")
        assert (refused.value.code, refused.value.details["longest"]) == ("not_grantable", "hour")


async def test_a_token_grants_nothing(served: Served, site: Web) -> None:
    """It may be in the hands of the program that the walls are for."""
    service = served.service
    ann = Caller("alice", "key")
    session = SessionIdentity("s-1", "ann", "helper")
    box = await service.sandboxes.create(ann, policy="granting", session=session)
    _, token = await service.access.make_token("alice", user_id="ann", scopes=["execute"], ttl_s=60)
    access = {"kind": "network", "target": site.host, "duration": "hour"}
    async with served.client(token) as bearer:
        url = f"/v1/sandboxes/{box.id}/conversations/default/grants"
        reply = await bearer.post(url, json=access)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "rule_not_permitted")
        assert (await bearer.get(url)).json() == {"items": []}
