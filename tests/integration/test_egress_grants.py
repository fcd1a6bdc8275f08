"""The proxy with grants of one conversation: what each allows, and that it ends."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from egressing import Certificates, allowing, closed, origin, refusal, reply, until_the_end, way

from sbx.egress import Secret
from sbx.egress.unix_socket import EgressSocket
from sbx.isolation.launch_plan import CERTIFICATES
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.grants import Access
from sbx.workspace.layout import DataDirectory

HOST = "data.example.org"
HERE = {HOST: ["127.0.0.1"]}


def granting(*entries: dict[str, Any], **more: Any) -> Grants:
    network = {"mode": "proxy"}
    secrets = {"CRM": {"env": "CRM", "hosts": [HOST], "from": "env:REAL", "allow_plain": True}}
    table = {"name": "granting", "network": network, "secrets": secrets, "grant": list(entries)}
    return Grants(Policy.model_validate(table), **more)


async def test_a_granted_host_is_reached_at_its_port_only_until_the_end(tmp_path: Path) -> None:
    async with origin() as site, origin() as other:
        target = f"{HOST}:{site.port}"
        grants = granting({"network": [target, f"{HOST}:{other.port}"]})
        async with way(tmp_path, allowing(), HERE, grants=grants) as out:
            assert refusal(await out.get(f"http://{target}/"))["rule"] == "network.allow"
            assert grants.take_refused() == (Access("network", target),)
            grant = await grants.grant(Access("network", target), "hour", "ann")
            assert b"hello" in await out.get(f"http://{target}/")
            denied = refusal(await out.get(f"http://{HOST}:{other.port}/"))
            assert denied["rule"] == "network.allow"
            grants.end(grant.id)
            assert refusal(await out.get(f"http://{target}/"))["rule"] == "network.allow"
            assert [each.rule for each in out.decisions if each.allowed and not each.ended] == [
                f"grant: {target}"
            ]


async def test_access_that_the_policy_does_not_permit_is_not_noted(tmp_path: Path) -> None:
    grants = granting({"network": [HOST]})
    async with way(tmp_path, allowing(), HERE, grants=grants) as out:
        await out.get("http://evil.example.com/")
        await out.get(f"http://{HOST}:8080/")
        assert grants.take_refused() == ()
        await out.get(f"http://{HOST}/")
        assert grants.take_refused() == (Access("network", f"{HOST}:80"),)


async def test_a_grant_opens_no_private_network(tmp_path: Path) -> None:
    async with origin() as site:
        target = f"{HOST}:{site.port}"
        grants = granting({"network": [target]})
        await grants.grant(Access("network", target), "hour", "ann")
        async with way(tmp_path, allowing(allow_private=()), HERE, grants=grants) as out:
            denied = refusal(await out.get(f"http://{target}/"))
            assert denied["rule"] == "network.allow_private"
        await grants.close()


async def test_another_conversation_has_another_socket_and_no_grant(tmp_path: Path) -> None:
    async with origin() as site:
        target = f"{HOST}:{site.port}"
        granted, other = granting({"network": [target]}), granting({"network": [target]})
        await granted.grant(Access("network", target), "conversation", "ann")
        async with way(tmp_path, allowing(), HERE, grants=granted) as out:
            out.egress.listen(tmp_path / "other", None, other)
            assert b"hello" in await out.get(f"http://{target}/")
            out.socket = tmp_path / "other" / out.socket.name
            assert refusal(await out.get(f"http://{target}/"))["rule"] == "network.allow"
            assert other.take_refused() == (Access("network", target),)


async def test_the_end_of_a_grant_closes_its_tunnels_and_leaves_others(tmp_path: Path) -> None:
    certificates = Certificates()
    stay = "stay.example.org"
    names = {HOST: ["127.0.0.1"], stay: ["127.0.0.1"]}
    async with origin(tls=certificates.server(HOST, stay)) as site:
        target, allowed = f"{HOST}:{site.port}", f"{stay}:{site.port}"
        grants = granting({"network": [target]})
        async with way(tmp_path, allowing(allowed), names, grants=grants) as out:
            grant = await grants.grant(Access("network", target), "hour", "ann")
            async with (
                out.tls(target, certificates.trust) as (reader, _),
                out.tls(allowed, certificates.trust) as (kept, writer),
            ):
                grants.end(grant.id)
                out.egress.end_forbidden()
                assert await until_the_end(reader) == b""
                writer.write(f"GET / HTTP/1.1\r\nHost: {allowed}\r\n\r\n".encode())
                async with asyncio.timeout(60):
                    assert await kept.readexactly(12) == b"HTTP/1.1 200"
            ends = [each for each in out.decisions if each.ended and each.host == HOST]
            assert [each.reason for each in ends] == ["the grant has ended"]


async def test_a_secret_is_inserted_only_after_its_grant(tmp_path: Path) -> None:
    async with origin(lambda heard: reply(heard.header("Authorization") or b"none")) as site:
        target = f"{HOST}:{site.port}"
        secret = Secret("CRM", "CRM", (HOST,), "Authorization", "the-real-value", allow_plain=True)
        grants = granting({"secret": ["CRM"]})
        opened = way(
            tmp_path,
            allowing(target),
            HERE,
            secrets={"CRM": secret},
            need_grant=["CRM"],
            grants=grants,
        )
        async with opened as out:
            header = f"Authorization: {out.egress.environment['CRM']}"
            denied = refusal(await out.get(f"http://{target}/", header))
            assert denied["rule"] == "secrets.CRM"
            assert site.heard == []
            assert grants.take_refused() == (Access("secret", "CRM"),)
            grant = await grants.grant(Access("secret", "CRM"), "hour", "ann")
            assert b"200 OK" in await out.get(f"http://{target}/", header)
            assert site.heard[0].header("Authorization") == b"the-real-value"
            grants.end(grant.id)
            assert refusal(await out.get(f"http://{target}/", header))["rule"] == "secrets.CRM"
            assert len(site.heard) == 1


async def test_a_closed_listener_takes_its_connections_along(tmp_path: Path) -> None:
    grants = granting({"network": [HOST]})
    async with way(tmp_path, allowing(), HERE, grants=grants) as out:
        stop = out.egress.listen(tmp_path / "other", None, grants)
        out.socket = tmp_path / "other" / out.socket.name
        reader, writer = await out.open()
        with closed(writer):
            writer.write(b"GET ")
            await asyncio.sleep(0)
            stop()
            stop()
            assert await until_the_end(reader) == b""
        assert not (tmp_path / "other").exists()


async def test_a_conversation_that_ends_leaves_no_files_of_its_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REAL", "the-real-value")
    secret = {"env": "CRM", "hosts": [HOST], "from": "env:REAL"}
    table = {"name": "granting", "network": {"mode": "proxy"}, "secrets": {"CRM": secret}}
    policy = Policy.model_validate({**table, "grant": [{"secret": ["CRM"]}]})
    with DataDirectory(tmp_path / "data") as data:
        proxy = EgressSocket("sandbox-1", policy, data, lambda _: None)
        left, stays = Grants(policy, on_close=lambda: proxy.leave("left")), Grants(policy)
        async with (
            proxy.opened(None, "left", left) as first,
            proxy.opened(None, "stays", stays) as second,
        ):
            assert CERTIFICATES in os.listdir(first.directory)
            top, name = os.path.split(second.directory)
            await left.close()
            assert os.listdir(top) == [name]
            assert CERTIFICATES in os.listdir(second.directory)
        await proxy.close()
        assert os.listdir(top) == []
