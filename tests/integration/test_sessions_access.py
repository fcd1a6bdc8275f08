"""Who may what in /api/v1: the bounds of tokens, cookies, other origins."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory
from sessions_calls import API, code_of, ensure, new_user, put, run, until, url


async def token(served: Served, owner: str, user: str, **bounds: object) -> str:
    _, text = await served.service.access.make_token(
        owner,
        user_id=user,
        **{"ttl_s": 600.0, **bounds},  # type: ignore[arg-type]
    )
    return text


@pytest_asyncio.fixture
async def owner(served: Served) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    name = new_user()
    async with served.client(await served.key_of(name)) as client:
        yield name, client


async def everything(client: httpx.AsyncClient, session: str) -> list[httpx.Response]:
    """A call of every route of a session."""
    c1 = {"conversation_id": "c1"}
    return [
        await client.get(url(session)),
        await client.get(url(session, "/conversations")),
        await client.get(url(session, "/conversations/c1/prompt")),
        await client.get(url(session, "/files"), params=c1),
        await client.get(url(session, "/files/a.csv"), params=c1),
        await put(client, session, "a.csv", b"x"),
        await run(client, session, "1"),
        await client.post(url(session, "/interrupt"), json=c1),
        await client.delete(url(session, "/files/a.csv"), params=c1),
        await client.delete(url(session, "/conversations/c1")),
        await client.post(url(session, "/stop")),
        await client.post(url(session, "/extend_ttl"), json={"extend_by": 1}),
        await client.delete(url(session)),
    ]


async def test_a_token_reaches_its_user_and_nobody_else(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    name, key = owner
    mine, theirs = new_user(), new_user()
    for user in (mine, theirs):
        await ensure(key, user)
        await put(key, f"sb-session-{user}-agent", "a.csv", b"x")
    async with served.client(await token(served, name, mine)) as client:
        listed = (await client.get(f"{API}/sessions")).json()["items"]
        assert [one["session_id"] for one in listed] == [f"sb-session-{mine}-agent"]
        for reply in await everything(client, f"sb-session-{theirs}-agent"):
            assert code_of(reply) == (404, "not_found")
        assert code_of(await ensure(client, theirs)) == (404, "not_found")
        assert (await ensure(client, mine, "another")).status_code == 201
        for reply in await everything(client, f"sb-session-{mine}-agent"):
            assert reply.status_code < 300, reply.text
    assert (await key.get(url(f"sb-session-{theirs}-agent"))).status_code == 200


async def test_a_token_for_one_agent_and_conversation_reaches_no_other(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    name, key = owner
    user = new_user()
    session = f"sb-session-{user}-agent"
    await ensure(key, user)
    for conversation in ("c1", "c2"):
        await put(key, session, "a.csv", conversation.encode(), conversation)
    bounds = {"agent_id": "agent", "conversation_id": "c1"}
    async with served.client(await token(served, name, user, **bounds)) as client:
        assert code_of(await ensure(client, user, "another")) == (404, "not_found")
        assert (await ensure(client, user)).json()["info"]["conversations"] == ["c1"]
        listed = (await client.get(url(session, "/conversations"))).json()["items"]
        assert [one["conversation_id"] for one in listed] == ["c1"]
        assert (await client.get(url(session, "/files/a.csv"))).text == "c1"
        c2 = {"conversation_id": "c2"}
        for reply in (
            await client.get(url(session, "/files"), params=c2),
            await client.get(url(session, "/files/a.csv"), params=c2),
            await client.delete(url(session, "/files/a.csv"), params=c2),
            await put(client, session, "b.csv", b"x", "c2"),
            await put(client, session, "b.csv", b"x", "new"),
            await run(client, session, "1", "c2"),
            await client.post(url(session, "/interrupt"), json=c2),
            await client.get(url(session, "/conversations/c2/prompt")),
            await client.delete(url(session, "/conversations/c2")),
            await client.post(url(session, "/stop")),
            await client.post(url(session, "/extend_ttl"), json={"extend_by": 1}),
            await client.delete(url(session)),
        ):
            assert code_of(reply) == (404, "not_found")
        assert (await run(client, session, "1")).status_code == 200
        other = (await run(key, session, "1", "c2")).json()["run_id"]
        reply = await client.get(f"{API}/runs/{other}/events")
        assert code_of(reply) == (404, "not_found")


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (["files:read"], {"list", "down", "prompt"}),
        (["files:write"], {"ensure", "up", "delete"}),  # to forget a conversation ends its runs
        (["execute"], {"ensure", "run", "follow", "interrupt", "stop"}),
        (
            ["files:write", "execute"],
            {"ensure", "up", "delete", "run", "follow", "interrupt", "stop", "forget"},
        ),
        (["admin"], {"extend", "end"}),
    ],
)
async def test_a_token_does_only_what_its_scopes_say(
    served: Served, owner: tuple[str, httpx.AsyncClient], scopes: list[str], allowed: set[str]
) -> None:
    name, key = owner
    user = new_user()
    session = f"sb-session-{user}-agent"
    await ensure(key, user)
    await put(key, session, "a.csv", b"x")
    c1 = {"conversation_id": "c1"}
    ran = (await run(key, session, "1")).json()["run_id"]
    async with served.client(await token(served, name, user, scopes=scopes)) as client:
        replies = {
            "ensure": await ensure(client, user),
            "list": await client.get(url(session, "/files"), params=c1),
            "down": await client.get(url(session, "/files/a.csv"), params=c1),
            "prompt": await client.get(url(session, "/conversations/c1/prompt")),
            "up": await put(client, session, "b.csv", b"x"),
            "delete": await client.delete(url(session, "/files/a.csv"), params=c1),
            "run": await run(client, session, "1"),
            "follow": await client.get(f"{API}/runs/{ran}/events"),
            "interrupt": await client.post(url(session, "/interrupt"), json=c1),
            "stop": await client.post(url(session, "/stop")),
            "extend": await client.post(url(session, "/extend_ttl"), json={"extend_by": 1}),
            "forget": await client.delete(url(session, "/conversations/c1")),
            "end": await client.delete(url(session)),
        }
    done = {what for what, reply in replies.items() if reply.status_code < 300}
    assert done == allowed
    refused = {code_of(reply) for what, reply in replies.items() if what not in allowed}
    assert refused <= {(404, "not_found")}


async def test_a_token_cannot_choose_another_policy(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    user = new_user()
    async with served.client(await token(served, owner[0], user)) as client:
        assert code_of(await ensure(client, user, policy="strict")) == (400, "limit_widened")
        assert (await ensure(client, user, policy="default")).status_code == 201


async def test_a_login_is_a_cookie_that_scripts_cannot_read(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    name, _ = owner
    user = new_user()
    text = await token(served, name, user, agent_id="agent", scopes=["execute"])
    async with served.client() as browser:
        reply = await browser.post(f"{API}/login", json={"token": text})
        assert reply.status_code == 200
        answer = reply.json()
        assert (answer["user_id"], answer["agent_id"], answer["scopes"]) == (
            user,
            "agent",
            ["execute"],
        )
        cookie = reply.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "max-age=" in cookie
        assert reply.headers["cache-control"] == "no-store"
        assert (await ensure(browser, user)).status_code == 201
        assert code_of(await ensure(browser, new_user())) == (404, "not_found")
        stranger = {"origin": "http://evil.example"}
        body = {"user_id": user, "agent_id": "agent"}
        refused = await browser.post(f"{API}/sessions", json=body, headers=stranger)
        assert code_of(refused) == (403, "forbidden")
        assert (await browser.post(f"{API}/logout")).status_code == 204
        assert "sbx_token" not in browser.cookies
    async with served.client(text) as bearer:
        assert (await bearer.post(f"{API}/login")).status_code == 200
    async with served.client() as browser:
        for body in ({"token": "nonsense"}, {"token": text[:-2]}, {}):
            assert code_of(await browser.post(f"{API}/login", json=body)) == (401, "unauthorized")
        key = {"token": await served.key_of("somebody")}
        assert code_of(await browser.post(f"{API}/login", json=key)) == (400, "validation_error")


async def test_a_logout_can_end_the_session_of_its_token_and_no_other(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    name, key = owner
    user, other = new_user(), new_user()
    for one in (user, other):
        await ensure(key, one)
        await put(key, f"sb-session-{one}-agent", "a.csv", b"x")
    session, end = f"sb-session-{user}-agent", {"end_session": True}
    bound = await token(served, name, user, conversation_id="c1", scopes=["execute"])
    for text in (bound, await token(served, name, user, scopes=["files:read"])):
        async with served.client(text) as client:
            assert code_of(await client.post(f"{API}/logout", json=end)) == (403, "forbidden")
    assert code_of(await key.post(f"{API}/logout", json=end)) == (400, "validation_error")
    async with served.client(await token(served, name, user, agent_id="agent")) as client:
        running = asyncio.create_task(run(client, session, "import time; time.sleep(60)"))

        async def is_busy() -> bool:
            shown = (await key.get(url(session, "/conversations"))).json()["items"]
            return any(one["status"] == "busy" for one in shown)

        await until(is_busy)
        assert (await client.post(f"{API}/logout", json={})).status_code == 204
        assert (await client.get(url(session))).json()["status"] != "error"
        assert (await client.post(f"{API}/logout", json=end)).status_code == 204
        assert (await running).json()["status"] == "interrupted"
        shown = (await client.get(url(session))).json()
        assert (shown["status"], shown["info"]["reason"]) == (
            "error",
            "expired: its time to live is over",
        )
        assert (await client.post(f"{API}/logout", json=end)).status_code == 204
        again = await ensure(client, user)
        assert (again.status_code, again.json()["info"]["restored"]) == (201, True)
    assert (await key.get(url(f"sb-session-{other}-agent"))).json()["status"] != "error"


async def test_an_owner_s_key_creates_tokens_within_its_owner_only(
    served: Served, owner: tuple[str, httpx.AsyncClient]
) -> None:
    """Only the operator could: a platform with a key could not log its users in."""
    name, key = owner
    tokens = "/v1/admin/tokens"
    made = (await key.post(tokens, json={"user_id": new_user()})).json()
    assert made["owner"] == name
    foreign = {"user_id": "u", "owner": "other"}
    async with served.client() as operator:
        theirs = (await operator.post(tokens, json=foreign)).json()
    listed = (await key.get(tokens)).json()["items"]
    assert {token["owner"] for token in listed} == {name}
    assert code_of(await key.post(tokens, json=foreign)) == (403, "forbidden")
    assert code_of(await key.get(tokens, params={"owner": "other"})) == (403, "forbidden")
    assert code_of(await key.delete(f"{tokens}/{theirs['id']}")) == (404, "not_found")
    assert code_of(await key.post("/v1/admin/keys", json={"owner": name})) == (403, "forbidden")
    async with served.client(made["token"]) as client:
        assert (await ensure(client, made["user_id"])).status_code == 201
        for reply in (
            await client.post(tokens, json={"user_id": made["user_id"]}),
            await client.get(tokens),
            await client.delete(f"{tokens}/{made['id']}"),
        ):
            assert code_of(reply) == (403, "forbidden")
        assert (await key.delete(f"{tokens}/{made['id']}")).status_code == 204
        assert code_of(await client.get(f"{API}/sessions")) == (401, "unauthorized")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_page_of_another_origin_changes_nothing_by_a_cookie(
    served: Served, owner: tuple[str, httpx.AsyncClient], method: str
) -> None:
    native = "/v1/sandboxes/none/conversations/default"
    path = {
        "POST": f"{API}/sessions",
        "PUT": f"{native}/files",
        "PATCH": f"{native}/partials/none",
        "DELETE": f"{API}/sessions/none",
    }[method]
    text = await token(served, owner[0], new_user())
    async with served.client() as browser:
        assert (await browser.post(f"{API}/login", json={"token": text})).status_code == 200
        refused = await browser.request(method, path, headers={"origin": "http://evil.example"})
        assert code_of(refused) == (403, "forbidden")
        reply = await browser.request(method, path, headers={"origin": "http://sbx"})
        assert code_of(reply) != (403, "forbidden")  # judged by what it asks for


async def test_other_origins_are_answered_only_when_allowed(
    client: httpx.AsyncClient,
) -> None:
    asked = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,conversation_id,subdir,"
        "x-conversation-id,idempotency-key,last-event-id,content-type",
    }
    refused = await client.options(f"{API}/sessions", headers=asked)
    assert "access-control-allow-origin" not in refused.headers
    with short_directory() as directory:
        async with (
            live(directory, cors_origins=("https://app.example",)) as served,
            served.client() as allowed,
        ):
            reply = await allowed.options(f"{API}/sessions", headers=asked)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == "https://app.example"
            other = asked | {"origin": "https://other.example"}
            reply = await allowed.options(f"{API}/sessions", headers=other)
            assert "access-control-allow-origin" not in reply.headers
