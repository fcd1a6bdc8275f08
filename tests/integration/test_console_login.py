"""Logins of browsers: codes, cookies, and the rules of the listener, on raw sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from console_service import Console, console_service

from tests.fake_clock import FakeClock

LOGIN = "/api/v1/console/login"
ME = "/api/v1/me"


# -- codes and cookies -------------------------------------------------------------------------


async def test_a_code_logs_one_browser_in_once(console: Console) -> None:
    code = await console.code()
    first = await console.send("POST", LOGIN, console.page(), {"code": code})
    assert first.status == 200
    assert first.json["via"] == "console"
    assert first.json["operator"] is True
    set_cookie = first.headers["set-cookie"]
    assert set_cookie.startswith("sbx_console=")
    for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert part in set_cookie
    assert "Domain" not in set_cookie
    assert "Secure" not in set_cookie
    assert len(set_cookie.partition("=")[2].partition(";")[0]) == 43
    again = await console.send("POST", LOGIN, console.page(), {"code": code})
    assert (again.status, again.code) == (401, "code_not_valid")


async def test_a_code_that_never_was_has_the_same_answer(console: Console) -> None:
    never = await console.send("POST", LOGIN, console.page(), {"code": "x" * 43})
    assert (never.status, never.code) == (401, "code_not_valid")


async def test_the_cookie_has_the_rights_of_the_caller(console: Console) -> None:
    async with console.served.client(await console.served.key_of("ann")) as ann:
        cookie = await console.login(ann)
    me = (await console.get(ME, cookie)).json
    assert (me["owner"], me["via"], me["operator"]) == ("ann", "console", False)
    assert me["can"]["admin"]["code"] == "forbidden"
    assert me["can"]["sandboxes"] is True
    assert me["can"]["chat"]["code"] == "model_not_configured"
    assert me["can"]["projects"]["code"] == "no_project_dirs"
    assert me["uploads"]["max_file_count"] == 50


async def test_an_operator_can_give_up_these_rights(console: Console) -> None:
    cookie = await console.login(operator=False)
    assert (await console.get(ME, cookie)).json["operator"] is False


async def test_a_login_of_a_token_has_its_rights_and_ends_with_it(console: Console) -> None:
    async with console.served.client(await console.served.key_of("bea")) as bea:
        made = (await bea.post("/v1/admin/tokens", json={"user_id": "u", "ttl_s": 600})).json()
        cookie = await console.login(bea, token=made["token"])
        me = (await console.get(ME, cookie)).json
        assert (me["via"], me["user_id"], me["operator"]) == ("token", "u", False)
        assert me["can"]["projects"]["code"] == "forbidden"
        projects = await console.get("/api/v1/projects", cookie)
        assert projects.json["items"] == []
        made_there = await console.call(
            "POST", "/api/v1/projects", cookie, {"name": "p", "working_directory": "/srv"}
        )
        assert (made_there.status, made_there.code) == (403, "forbidden")
        assert (await bea.delete(f"/v1/admin/tokens/{made['id']}")).status_code == 204
    assert await until_refused(console, cookie) == "unauthorized"


async def test_a_login_ends_with_the_key_that_it_came_from(console: Console) -> None:
    record, text = await console.served.service.access.make_key("cleo")
    async with console.served.client(text) as cleo:
        cookie = await console.login(cleo)
    assert (await console.get(ME, cookie)).status == 200
    await console.served.service.access.revoke_key(record.id)
    assert await until_refused(console, cookie) == "unauthorized"


async def until_refused(console: Console, cookie: str) -> str:
    """A login is looked at again after some seconds."""
    async with asyncio.timeout(30):
        while (reply := await console.get(ME, cookie)).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return reply.code


async def test_tokens_and_logins_make_no_codes(console: Console) -> None:
    cookie = await console.login()
    reply = await console.call("POST", "/api/v1/console/codes", cookie, {})
    assert (reply.status, reply.code) == (403, "forbidden")
    async with console.served.client(await console.served.key_of("dora")) as dora:
        made = (await dora.post("/v1/admin/tokens", json={"user_id": "u", "ttl_s": 600})).json()
    async with console.served.client(made["token"]) as token:
        refused = await token.post("/api/v1/console/codes", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


async def test_logout_ends_the_login_at_once(console: Console) -> None:
    cookie = await console.login()
    assert (await console.call("POST", "/api/v1/console/logout", cookie, {})).status == 204
    assert (await console.get(ME, cookie)).code == "unauthorized"


async def test_logout_can_stop_the_sandboxes_of_the_user(console: Console) -> None:
    async with console.served.client(await console.served.key_of("eve")) as eve:
        box = (await eve.post("/v1/sandboxes", json={})).json()["id"]
        runs = f"/v1/sandboxes/{box}/conversations/default/runs"
        assert (await eve.post(runs, json={"code": "1"})).status_code == 200
        cookie = await console.login(eve)
        done = await console.call("POST", "/api/v1/console/logout", cookie, {"clean": True})
        assert done.status == 204
        assert (await eve.get(f"/v1/sandboxes/{box}")).json()["status"] == "idle"


async def test_the_logins_of_an_owner_can_be_listed_and_ended(console: Console) -> None:
    async with console.served.client(await console.served.key_of("finn")) as finn:
        one, two = await console.login(finn), await console.login(finn)
    items = (await console.get("/api/v1/console/sessions", one)).json["items"]
    assert [item["current"] for item in items] == [True, False]
    ended = await console.call("DELETE", f"/api/v1/console/sessions/{items[1]['id']}", one)
    assert ended.status == 204
    assert (await console.get(ME, two)).code == "unauthorized"
    other = await console.login()
    foreign = await console.call("DELETE", f"/api/v1/console/sessions/{items[0]['id']}", other)
    assert (foreign.status, foreign.code) == (404, "not_found")


async def test_one_owner_has_a_limit_of_waiting_codes(console: Console) -> None:
    async with console.served.client(await console.served.key_of("gus")) as gus:
        for _ in range(16):
            await console.code(gus)
        refused = await gus.post("/api/v1/console/codes", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_codes")
    assert await console.code()


async def test_codes_and_logins_end_by_time(tmp_path: Path) -> None:
    clock = FakeClock()
    async with console_service(tmp_path, clock=clock) as console:
        late = await console.code()
        clock.advance(61)
        reply = await console.send("POST", LOGIN, console.page(), {"code": late})
        assert reply.code == "code_not_valid"
        cookie = await console.login()
        for _ in range(16):  # hours apart, each use extends the login to seven days at most
            clock.advance(11 * 3600)
            last = await console.get(ME, cookie)
            if last.status != 200:
                break
        assert last.code == "unauthorized"
        used = await console.login()
        clock.advance(13 * 3600)
        assert (await console.get(ME, used)).code == "unauthorized"


async def test_many_wrong_codes_are_refused_but_a_valid_one_is_not(tmp_path: Path) -> None:
    async with console_service(tmp_path) as console:
        wrong = {"code": "y" * 43}
        codes = [(await console.send("POST", LOGIN, console.page(), wrong)).code for _ in range(12)]
        assert codes == ["code_not_valid"] * 10 + ["too_many_attempts"] * 2
        assert await console.login()


async def test_a_login_survives_a_restart_of_the_service(tmp_path: Path) -> None:
    async with console_service(tmp_path) as console:
        cookie, port, name = await console.login(), console.port, console.name
    async with console_service(tmp_path, port=port) as console:
        assert console.name == name
        assert (await console.get(ME, cookie)).status == 200


async def test_the_store_and_the_audit_log_have_no_code_and_no_cookie(tmp_path: Path) -> None:
    async with console_service(tmp_path) as console:
        code = await console.code()
        reply = await console.send("POST", LOGIN, console.page(), {"code": code})
        cookie = reply.headers["set-cookie"].partition("=")[2].partition(";")[0]
        await console.call("POST", "/api/v1/console/logout", cookie, {})
    audit = (tmp_path / "data" / "audit.jsonl").read_text()
    for action in ("console.code", "console.login", "console.logout"):
        assert action in audit
    for file in (tmp_path / "data").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert code.encode() not in content
            assert cookie.encode() not in content


# -- the listener --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1", "localhost.evil.example", "sbx.localhost"],
)
async def test_another_host_name_is_refused(console: Console, host: str) -> None:
    """DNS rebinding: the name of a page that an attacker controls."""
    cookie = await console.login()
    reply = await console.send("GET", ME, console.page(cookie, Host=host))
    assert (reply.status, reply.code) == (421, "wrong_host")


async def test_another_port_in_the_host_is_refused(console: Console) -> None:
    reply = await console.send("GET", ME, {"Host": f"{console.name}:1"})
    assert (reply.status, reply.code) == (421, "wrong_host")


async def test_two_host_headers_or_none_are_refused(console: Console) -> None:
    twice = f"GET {ME} HTTP/1.1\r\nHost: {console.host}\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await console.send("", "", raw=twice.encode())).status == 400
    none = f"GET {ME} HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert (await console.send("", "", raw=none.encode())).status == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", None, ""])
async def test_a_change_needs_the_origin_of_the_page(console: Console, origin: str | None) -> None:
    cookie = await console.login()
    headers: Any = console.page(cookie) | {"Origin": origin}
    reply = await console.send("POST", "/v1/sandboxes", headers, {})
    assert (reply.status, reply.code) == (403, "forbidden")


async def test_a_change_needs_the_header_of_the_page(console: Console) -> None:
    cookie = await console.login()
    headers: Any = console.page(cookie) | {"X-Sbx-Console": None}
    reply = await console.send("POST", "/v1/sandboxes", headers, {})
    assert (reply.status, reply.code) == (403, "forbidden")


@pytest.mark.parametrize("fetched_by", ["cross-site", "same-site"])
async def test_a_foreign_page_reads_nothing(console: Console, fetched_by: str) -> None:
    cookie = await console.login()
    headers = console.page(cookie) | {"Sec-Fetch-Site": fetched_by}
    assert (await console.send("GET", "/v1/sandboxes", headers)).code == "forbidden"


@pytest.mark.parametrize("fetched_by", ["same-origin", "none", None])
async def test_the_page_and_a_typed_address_read(console: Console, fetched_by: str | None) -> None:
    cookie = await console.login()
    headers: Any = console.page(cookie) | {"Sec-Fetch-Site": fetched_by}
    assert (await console.send("GET", "/v1/sandboxes", headers)).status == 200


@pytest.mark.parametrize("unix", [False, True])
async def test_nothing_but_the_cookie_identifies_a_caller(console: Console, unix: bool) -> None:
    """On `console.sock`, SO_PEERCRED would identify `sbx console` for every program of the host."""
    key = await console.served.key_of("hal", operator=True)
    for headers in ({}, {"Authorization": f"Bearer {key}"}, {"Cookie": "sbx_token=x"}):
        reply = await console.send("GET", ME, console.page() | headers, unix=unix)
        assert (reply.status, reply.code) == (401, "unauthorized")


async def test_the_cookie_counts_at_no_other_listener(console: Console) -> None:
    cookie = await console.login()
    key = {"Authorization": "Bearer none"}
    async with console.served.client() as client:
        reply = await client.get(ME, headers={"Cookie": f"sbx_console={cookie}"} | key)
    assert reply.status_code == 401


async def test_the_unix_listener_takes_any_port_of_the_name(console: Console) -> None:
    cookie = await console.login()
    headers = console.page(cookie) | {"Host": f"{console.name}:9999"}
    assert (await console.send("GET", ME, headers, unix=True)).status == 200


async def test_at_127_0_0_1_the_cookie_has_the_port_in_its_name(console: Console) -> None:
    host = f"127.0.0.1:{console.port}"
    headers = console.page() | {"Host": host, "Origin": f"http://{host}"}
    reply = await console.send("POST", LOGIN, headers, {"code": await console.code()})
    assert reply.status == 200
    assert reply.headers["set-cookie"].startswith(f"sbx_console_{console.port}=")


@pytest.mark.parametrize(
    "path", ["/docs", "/metrics", "/e2b/sandboxes", "/health", "/openapi.json"]
)
async def test_the_listener_serves_the_console_only(console: Console, path: str) -> None:
    reply = await console.get(path, await console.login())
    assert (reply.status, reply.code) == (404, "not_found")


async def test_browsers_log_in_at_no_ordinary_listener(console: Console) -> None:
    async with console.served.client() as client:
        for path in ("/console/", "/console/static/app.js", "/console/frame.html", "/"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "console_elsewhere")
        login = await client.post(LOGIN, json={"code": "x"})
        assert login.json()["error"]["code"] == "console_elsewhere"


async def test_every_reply_has_the_headers_of_a_browser(console: Console) -> None:
    cookie = await console.login()
    for path in ("/console/", ME, "/nothing", "/v1/sandboxes/none"):
        headers = (await console.get(path, cookie)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "camera=()" in headers["permissions-policy"]
        assert headers["cache-control"] == "no-store"


async def test_the_page_has_a_strict_policy_with_a_fresh_nonce(console: Console) -> None:
    replies = [await console.send("GET", path) for path in ("/console/", "/console/sandboxes/x")]
    policies = [reply.headers["content-security-policy"] for reply in replies]
    assert policies[0] != policies[1]
    for reply, policy in zip(replies, policies, strict=True):
        rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == "'self'"
        assert rules["connect-src"] == "'self'"
        assert rules["frame-src"] == f"http://{console.frames}"
        assert rules["trusted-types"] == "dompurify"
        nonce = rules["style-src"].partition("'nonce-")[2].rstrip("'")
        assert nonce.encode() in reply.body


async def test_the_frames_are_at_the_second_name_only(console: Console) -> None:
    there = {"Host": console.frames}
    for frame in ("frame", "frame-scripts"):
        path = f"/console/{frame}.html"
        assert (await console.send("GET", path)).status == 404
        reply = await console.send("GET", path, there)
        assert reply.status == 200
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'")
        assert "connect-src 'none'" in policy
        assert f"frame-ancestors {console.origin}" in policy
        assert ("'unsafe-inline'; style-src" in policy) == (frame == "frame-scripts")
    for path in ("/console/", ME, "/", "/v1/sandboxes"):
        assert (await console.send("GET", path, there)).status == 404


async def test_a_static_file_is_asked_for_by_its_etag(console: Console) -> None:
    reply = await console.send("GET", "/console/static/BUILD")
    assert (reply.status, reply.headers["cache-control"]) == (200, "no-cache")
    etag = reply.headers["etag"]
    again = await console.send("GET", "/console/static/BUILD", {"If-None-Match": etag})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "name", ["..%2fBUILD", "..%2f..%2f__init__.py", "none.js", ".hidden", "%00", "a%2fb"]
)
async def test_no_other_file_is_served(console: Console, name: str) -> None:
    assert (await console.send("GET", f"/console/static/{name}")).status in (400, 404)


async def test_a_websocket_needs_the_origin_of_the_page(console: Console) -> None:
    cookie = await console.login()
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for origin in ("http://evil.example", "null"):
        headers = console.page(cookie) | upgrade | {"Origin": origin}
        reply = await console.send("GET", "/api/v1/events", headers)
        assert (reply.status, reply.code) == (403, "forbidden")
    wrong = console.page(cookie) | upgrade | {"Host": "evil.example"}
    assert (await console.send("GET", "/api/v1/events", wrong)).code == "wrong_host"
    without: Any = console.page() | upgrade
    assert (await console.send("GET", "/api/v1/events", without)).code == "unauthorized"
