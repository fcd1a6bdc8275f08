"""The end of each credential, and of everything that came from it: one table for all ways in."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from live_app import live
from persistent_sandboxes import eventually
from places import short_directory
from sessions_calls import API
from websockets.asyncio.client import unix_connect

from sbx.api import auth, ports, sse
from sbx.api.console import stream
from sbx.api.v1 import terminals
from sbx.errors import Denied
from sbx.service.auth import Authenticator
from sbx.service.caller import Caller
from sbx.service.console import ConsoleLogins
from sbx.service.links import Links
from sbx.store import Store
from tests.fake_clock import FakeClock

TOKENS = {"token", "login of token", "link of token", "link of token's login"}
MADE_BY_KEY = {"login of key", "link of key", "link of key's login", "token of key's login"}
ENDS = {
    "nothing": set(),
    "key revoked": TOKENS | MADE_BY_KEY | {"key"},
    "token revoked": TOKENS,
    "token expired": TOKENS,
    "login of key ended": {"login of key", "link of key's login"},
    "login of token ended": {"login of token"},
    "logins expired": TOKENS | {"login of key", "link of key's login"},
    "another key revoked": set(),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_credential_ends_with_what_it_came_from(tmp_path: Path, end: str) -> None:
    """A link outlived the expiry of its token, and the key behind the login that made it: four
    places judged whether a credential is alive."""
    clock = FakeClock()
    async with await Store.open(tmp_path / "sbx.db") as store:
        access = Authenticator(store, clock, tmp_path / "secret", 4711)
        links, logins = Links(access, clock), ConsoleLogins(store, access, clock)
        key, key_text = await access.make_key("ann")
        other, _ = await access.make_key("ann")
        token, token_text = await access.make_token("ann", user_id="u", ttl_s=60, via_id=key.id)
        of_key, of_token = [
            await logins.login(logins.make_code(await access.from_bearer(text))[0], "browser")
            for text in (key_text, token_text)
        ]
        _, from_login = await access.make_token(
            "ann", user_id="u", ttl_s=9e6, via_id=of_key[1].caller.via_id
        )

        async def link_of(caller: Caller) -> Callable[[], Awaitable[object]]:
            text = await links.make(caller, "box", port=8000, expires_at=clock.now() + 9e6)
            return lambda: links.open(text, "box", 8000)

        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "key": lambda: access.from_bearer(key_text),
            "token": lambda: access.from_bearer(token_text),
            "token of key's login": lambda: access.from_bearer(from_login),
            "login of key": lambda: logins.find(of_key[0]),
            "login of token": lambda: logins.find(of_token[0]),
            "link of key": await link_of(await access.from_bearer(key_text)),
            "link of token": await link_of(await access.from_bearer(token_text)),
            "link of key's login": await link_of(of_key[1].caller),
            "link of token's login": await link_of(of_token[1].caller),
        }
        assert set(ways) == MADE_BY_KEY | TOKENS | {"key"}
        assert {name for name, way in ways.items() if await is_refused(way)} == set()
        match end:
            case "key revoked":
                await access.revoke_key(key.id)
            case "another key revoked":
                await access.revoke_key(other.id)
            case "token revoked":
                await access.revoke_token(token.id)
            case "token expired":
                clock.advance(60)
            case "logins expired":
                clock.advance(13 * 3600)
            case "login of key ended":
                await logins.end("ann", of_key[1].row.id)
            case "login of token ended":
                await logins.end("ann", of_token[1].row.id)
        assert {name for name, way in ways.items() if await is_refused(way)} == ENDS[end]
        # A service that starts again knows the same.
        access = Authenticator(store, clock, tmp_path / "secret", 4711)
        links, logins = Links(access, clock), ConsoleLogins(store, access, clock)
        assert {name for name, way in ways.items() if await is_refused(way)} == ENDS[end]


async def is_refused(way: Callable[[], Awaitable[object]]) -> bool:
    try:
        await way()
    except Denied:
        return True
    return False


async def test_open_sockets_end_with_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (ports, "_CHECK_S"),
        (stream, "_CHECK_S"),
        (terminals, "_CHECK_S"),
        (sse, "KNOWN_S"),
        (sse, "FIRST_S"),  # for which the head of a silent stream waits
    ):
        monkeypatch.setattr(module, name, 0.1)
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(short_directory())
        served = await stack.enter_async_context(live(directory, clock=clock))
        key = await stack.enter_async_context(served.client(await served.key_of("ann")))
        session = {"user_id": "u", "agent_id": "a"}
        await key.post(f"{API}/sessions", json=session)
        (box,) = [each["id"] for each in (await key.get("/v1/sandboxes")).json()["items"]]
        place = f"/v1/sandboxes/{box}/conversations/default"
        server = {"command": "python3 -m http.server 8000 --bind 127.0.0.1"}
        await key.post(f"{place}/commands", json=server)
        wait = "until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"
        await key.post(f"{place}/runs", json={"kind": "shell", "code": wait})
        terminal = (await key.post(f"{place}/terminals", json={})).json()["id"]
        new = {"user_id": "u", "ttl_s": 60}
        token = (await key.post("/v1/admin/tokens", json=new)).json()["token"]
        user = await stack.enter_async_context(served.client(token))
        link = (await user.post(f"/v1/sandboxes/{box}/port-links", json={"port": 8000})).json()
        sockets = []
        for path in (
            f"{API}/events",
            f"/v1/sandboxes/{box}/port-tunnels/8000",
            f"{place}/terminals/{terminal}/attach",
        ):
            opening = unix_connect(
                str(served.socket),
                f"ws://sbx{path}",
                additional_headers={"authorization": f"Bearer {token}"},
            )
            sockets.append(await stack.enter_async_context(opening))
        feed = await stack.enter_async_context(user.stream("GET", f"{API}/events"))

        clock.advance(61)
        async with asyncio.timeout(30):
            for socket in sockets:
                await socket.wait_closed()
            assert b"unauthorized" in b"".join([piece async for piece in feed.aiter_raw()])
        assert (await user.get("/v1/sandboxes")).status_code == 401
        mcp = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert (await user.post(f"{place}/mcp", content=json.dumps(mcp))).status_code == 401
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(served.socket)), base_url="http://sbx"
        ) as holder:
            assert (await holder.get(link["path"])).status_code == 401
        assert (await key.delete(f"/v1/sandboxes/{box}")).status_code == 204


async def test_a_body_and_a_reply_end_with_the_key_of_their_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client with a revoked key could send to a server inside, and read a file, for hours."""
    monkeypatch.setattr(auth, "CHECK_S", 0.0)
    monkeypatch.setattr(ports, "_CHECK_S", 0.1)
    caplog.set_level("INFO", "sbx.api.middleware")
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(live(stack.enter_context(short_directory())))
        record, text = await served.service.access.make_key("ann")
        ann = await stack.enter_async_context(served.client(text))
        place = f"/v1/sandboxes/{(await ann.post('/v1/sandboxes', json={})).json()['id']}"
        place += "/conversations/default/files"
        await ann.put(place, params={"path": "large"}, content=bytes(16 << 20))
        reply = await stack.enter_async_context(ann.stream("GET", place, params={"path": "large"}))
        assert reply.status_code == 200
        reader, writer = await asyncio.open_unix_connection(str(served.socket))
        writer.write(
            f"PUT {place}?path=new HTTP/1.1\r\nHost: sbx\r\nAuthorization: Bearer {text}\r\n"
            "Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        async with asyncio.timeout(30):
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # so the caller was checked
            await served.service.access.revoke_key(record.id)
            writer.write(b"3\r\nabc\r\n")
            assert b" 401 " in await reader.readline()
            await eventually(lambda: "was cut off" in caplog.text)
        writer.close()
        with pytest.raises(httpx.RemoteProtocolError):
            await reply.aread()
