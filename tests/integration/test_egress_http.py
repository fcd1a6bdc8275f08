"""The egress proxy between a client and servers, plain HTTP: what goes through and what not."""

import asyncio
import base64
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from egressing import allowing, closed, origin, refusal, reply, until_the_end, way

from sbx.egress import EgressDecision, Timeouts
from sbx.policy.tables import Network, NetworkRule

HOST = "site.example"
HERE = {HOST: ["127.0.0.1"]}


async def test_a_listed_host_is_asked_and_what_is_for_the_proxy_is_left_out(tmp_path: Path) -> None:
    async with (
        origin(
            lambda _: reply(b"hello", b"Connection: X-Gone", b"X-Gone: 1", b"X-Stays: 2")
        ) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        said = await out.get(
            f"http://SITE.example.:{site.port}/a?b=c",
            "Proxy-Authorization: Basic eDp5",
            "Proxy-Connection: keep-alive",
            "Connection: X-Mine",
            "X-Mine: 1",
            "TE: trailers",
            "X-Kept: 2",
        )
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")
        assert said.endswith(b"\r\n\r\nhello")
        assert b"X-Stays: 2" in said
        assert b"X-Gone" not in said
        [heard] = site.heard
        assert heard.head == (
            b"GET /a?b=c HTTP/1.1\r\nHost: site.example:%d\r\nX-Kept: 2\r\n\r\n" % site.port
        )
    first, last = out.decisions
    assert first == EgressDecision(
        at=first.at,
        sandbox="box",
        allowed=True,
        rule=f"network.allow: {HOST}:{site.port}",
        host=HOST,
        port=site.port,
        method="GET",
        path="/a?b=c",
        address="127.0.0.1",
        reason="",
    )
    assert (last.ended, last.allowed, last.bytes_out) == (True, True, len(heard.head))
    assert last.bytes_in > len(b"hello")


@pytest.mark.parametrize("request_line", ["GET http://{}/", "CONNECT {}:443", "HEAD http://{}/"])
async def test_a_host_that_is_not_listed_is_refused_in_words(
    tmp_path: Path, request_line: str
) -> None:
    async with way(tmp_path, allowing("listed.example"), HERE) as out:
        line = request_line.format(HOST)
        host = line.split()[1].removeprefix("http://").removesuffix("/")
        said = await out.say(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    reason = "site.example is not in the policy's network.allow"
    sentence = f"sbx refused by network.allow: {reason}"
    assert said.startswith(f"HTTP/1.1 403 {sentence}\r\n".encode())
    assert said.endswith(b"\r\n\r\n" if "HEAD" in line else f"\r\n\r\n{sentence}\n".encode())
    reported = refusal(said)
    assert (reported["rule"], reported["reason"], reported["host"]) == (
        "network.allow",
        reason,
        HOST,
    )
    [decision] = out.decisions
    assert (decision.allowed, decision.rule, decision.reason) == (False, "network.allow", reason)
    assert out.looked_up == []  # nobody's name server hears of it


async def test_a_redirect_is_passed_on_and_what_it_leads_to_is_judged(tmp_path: Path) -> None:
    place = b"http://169.254.169.254/latest/meta-data/"
    moved = reply(b"", b"Location: " + place, status=b"302 Found")
    async with (
        origin(lambda _: moved) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        assert b"Location: " + place in await out.get(f"http://{HOST}:{site.port}/")
        assert refusal(await out.get(place.decode()))["rule"] == "network.allow"


async def test_a_listed_metadata_address_is_refused_all_the_same(tmp_path: Path) -> None:
    async with way(tmp_path, allowing("169.254.169.254", "meta.example"), {
        "meta.example": ["169.254.169.254"]
    }) as out:  # fmt: skip
        for host in ("169.254.169.254", "meta.example"):
            assert refusal(await out.get(f"http://{host}/"))["rule"] == "network.allow_private"


async def test_a_name_that_also_leads_inside_is_refused(tmp_path: Path) -> None:
    async with (
        origin() as site,
        way(
            tmp_path,
            allowing(f"{HOST}:{site.port}", allow_private=("127.0.0.2",)),
            {HOST: ["127.0.0.2", "::1"]},
        ) as out,
    ):
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/"))
        assert reported["rule"] == "network.allow_private"
        assert "::1, a loopback address" in reported["reason"]
        assert site.connections == 0


async def test_dns_that_rebinds_is_asked_once_and_never_followed(tmp_path: Path) -> None:
    """The first answer is checked and used; the second, which leads to a service of the host,
    counts only for the next request, and is refused."""
    answers = iter([["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1"]])
    async with (
        origin(lambda _: reply(b"outside"), address="127.0.0.2") as good,
        origin(lambda _: reply(b"INSIDE"), port=good.port) as bad,
        way(
            tmp_path,
            allowing(f"{HOST}:{good.port}", allow_private=("127.0.0.2",)),
            lambda _: next(answers),
        ) as out,
    ):
        url = f"http://{HOST}:{good.port}/"
        assert (await out.get(url)).endswith(b"outside")
        assert out.looked_up == [HOST]
        assert refusal(await out.get(url))["rule"] == "network.allow_private"
        assert bad.connections == 0


async def test_each_request_of_a_connection_is_judged_anew(tmp_path: Path) -> None:
    async with (
        origin(lambda heard: reply(heard.line)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        host = f"{HOST}:{site.port}"
        lines = [f"http://{host}/1", f"http://{host}/2", "http://evil.example/3"]
        said = await out.say(
            "".join(
                f"GET {url} HTTP/1.1\r\nHost: {url.split('/')[2]}\r\n\r\n" for url in lines
            ).encode()
        )
        assert said.count(b"HTTP/1.1 200 OK") == 2
        assert said.index(b"GET /1") < said.index(b"GET /2") < said.index(b"HTTP/1.1 403")
        assert site.connections == 1  # which was kept for the second
    assert [d.allowed for d in out.decisions if not d.ended] == [True, True, False]


async def test_rules_hold_methods_and_paths(tmp_path: Path) -> None:
    rules = (NetworkRule(host=HOST, methods=("GET",), paths=("/v1/*",)),)
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", rule=rules), HERE) as out,
    ):
        url = f"http://{HOST}:{site.port}"
        said = await out.get(f"{url}/v1/x", "X-HTTP-Method-Override: DELETE", "X-Original-URL: /a")
        assert said.startswith(b"HTTP/1.1 200")
        assert refusal(await out.get(f"{url}/v2/x"))["rule"] == "network.rule"
        assert refusal(await out.get(f"{url}/v1/%2e%2e/v2"))["rule"] == "network.rule"
        assert refusal(await out.get(f"{url}/v1/x", method="DELETE"))["rule"] == "network.rule"
        [heard] = site.heard
        assert heard.header("X-HTTP-Method-Override") is None
        assert heard.header("X-Original-URL") is None


MALFORMED = {
    "two lengths": b"POST http://{0}/ HTTP/1.1\r\nHost: {0}\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two content-lengths": b"POST http://{0}/ HTTP/1.1\r\nHost: {0}\r\nContent-Length: 4\r\n"
    b"Content-Length: 5\r\n\r\nabcde",
    "odd coding": b"POST http://{0}/ HTTP/1.1\r\nHost: {0}\r\nTransfer-Encoding: xchunked\r\n\r\n",
    "chunked in 1.0": b"POST http://{0}/ HTTP/1.0\r\nHost: {0}\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare LF": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\nX-Smuggled: 1\r\n\r\n",
    "bare CR": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nX: a\rX-Smuggled: 1\r\n\r\n",
    "folded": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nX: a\r\n b\r\n\r\n",
    "NUL": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nX: \0\r\n\r\n",
    "space before colon": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nX : a\r\n\r\n",
    "two hosts": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nHost: {0}\r\n\r\n",
    "no host": b"GET http://{0}/ HTTP/1.1\r\n\r\n",
    "another host": b"GET http://{0}/ HTTP/1.1\r\nHost: other.example\r\n\r\n",
    "another port": b"GET http://{0}/ HTTP/1.1\r\nHost: site.example:1\r\n\r\n",
    "user": b"GET http://u@{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "https": b"GET https://{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "a path only": b"GET / HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "a fragment": b"GET http://{0}/#a HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "trace": b"TRACE http://{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "connect with a body": b"CONNECT {0} HTTP/1.1\r\nHost: {0}\r\nContent-Length: 1\r\n\r\na",
    "connect without a port": b"CONNECT site.example HTTP/1.1\r\nHost: {0}\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a websocket": b"GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "nothing of HTTP": b"\xff\xfe\r\n\r\n",
}


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED)
async def test_what_could_be_read_in_two_ways_reaches_nobody(tmp_path: Path, said: bytes) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        answered = await out.say(said.replace(b"{0}", f"{HOST}:{site.port}".encode()))
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert refusal(answered)["rule"] in ("http", "http.host")
        assert site.connections == 0
    assert [decision.allowed for decision in out.decisions] == [False]


async def test_a_chunk_that_is_none_ends_the_request(tmp_path: Path) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        host = f"{HOST}:{site.port}"
        head = f"POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        said = await out.say(head.encode() + b"3\r\nabcX\r\n0\r\n\r\n")
        assert refusal(said)["rule"] == "http"
        assert site.heard == []
    assert (out.decisions[-1].ended, out.decisions[-1].allowed) == (True, False)


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 11\r\n\r\nhello world",
        b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n"
        b"6\r\n world\r\n0\r\nTrailer: 1\r\n\r\n",
        b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\nhello world",
    ],
)
async def test_a_body_arrives_whole(tmp_path: Path, body: bytes) -> None:
    async with (
        origin(lambda heard: reply(heard.body)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        host = f"{HOST}:{site.port}".encode()
        head = b"PUT http://%b/ HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n" % (host, host)
        assert (await out.say(head + body)).endswith(b"\r\n\r\nhello world")
        assert site.heard[0].body == b"hello world"
        assert b"Trailer" not in site.heard[0].head


@pytest.mark.parametrize(
    ("request_line", "answer", "end"),
    [
        ("GET {} HTTP/1.1", reply(b"", status=b"204 No Content"), b"\r\n\r\n"),
        ("HEAD {} HTTP/1.1", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"\r\n\r\n"),
        (
            "GET {} HTTP/1.1",
            b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + reply(b"late"),
            b"\r\n\r\nlate",
        ),
        (
            "GET {} HTTP/1.0",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"\r\n\r\nabc",
        ),
        (
            "GET {} HTTP/1.1",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"3\r\nabc\r\n0\r\n\r\n",
        ),
    ],
)
async def test_replies_keep_their_meaning(
    tmp_path: Path, request_line: str, answer: bytes, end: bytes
) -> None:
    async with (
        origin(lambda _: answer) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        host = f"{HOST}:{site.port}"
        line = request_line.format(f"http://{host}/")
        said = await out.say(f"{line}\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert said.endswith(end)
        assert said.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"this is no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 103 Hints\r\n\r\n" * 20,
    ],
)
async def test_a_hostile_server_is_told_of_and_not_passed_on(tmp_path: Path, answer: bytes) -> None:
    async with (
        origin(lambda _: answer) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/"))
        assert (reported["status"], reported["rule"]) == ("502", "outside")
    assert [(d.ended, d.allowed) for d in out.decisions] == [(False, True), (True, False)]


async def test_a_reply_that_breaks_off_is_not_made_whole(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()

    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        said = await out.get(f"http://{HOST}:{site.port}/")
        assert said.endswith(b"3\r\nabc\r\n")
    assert out.decisions[-1].reason.startswith("site.example closed the connection")


async def test_who_is_not_there_is_told_of(tmp_path: Path) -> None:
    async with origin() as site:
        pass
    async with way(tmp_path, allowing(f"{HOST}:{site.port}", "nobody.example"), HERE) as out:
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/"))
        assert (reported["status"], reported["rule"]) == ("502", "outside")
        assert "Connection refused" in reported["reason"]
        reported = refusal(await out.get("http://nobody.example/"))
        assert reported["reason"] == "nobody.example was not reached: nobody.example has no address"


async def test_a_reply_before_the_body_is_over_arrives(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(b"too much", b"Connection: close", status=b"413 No"))
        await writer.drain()

    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        said = await out.get(f"http://{HOST}:{site.port}/", method="POST", body="x" * 5_000_000)
        assert said.startswith(b"HTTP/1.1 413 No")
        assert said.endswith(b"too much")


async def test_a_refusal_arrives_though_the_body_is_still_coming(tmp_path: Path) -> None:
    """Closed with bytes unread, the connection would be reset under whoever still sends."""
    async with way(tmp_path, allowing("other.example"), HERE, patience=Timeouts(linger=60)) as out:
        reader, writer = await out.open()
        with closed(writer):
            writer.write(f"POST http://{HOST}/ HTTP/1.1\r\nHost: {HOST}\r\n".encode())
            writer.write(b"Content-Length: 600000\r\n\r\n" + b"x" * 1000)
            async with asyncio.timeout(60):
                await reader.readuntil(b"network.allow\n")
            for _ in range(30):
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.005)


# -- bounds ----------------------------------------------------------------------------------------


async def test_a_huge_head_is_refused(tmp_path: Path) -> None:
    async with way(tmp_path, allowing(HOST), HERE) as out:
        reported = refusal(await out.get(f"http://{HOST}/", "X: " + "a" * 100_000))
        assert (reported["status"], reported["rule"]) == ("431", "http.head_size")


@pytest.mark.parametrize("said", [b"GET http://", b"GET http://site.example/ HTTP/1.1\n\n"])
async def test_a_slow_head_is_refused(tmp_path: Path, said: bytes) -> None:
    async with way(tmp_path, allowing(HOST), HERE, patience=Timeouts(head=0.1)) as out:
        reported = refusal(await out.say(said))
        assert (reported["status"], reported["rule"]) == ("408", "http.head_time")


async def test_who_says_nothing_is_left(tmp_path: Path) -> None:
    async with way(tmp_path, allowing(HOST), HERE, patience=Timeouts(idle=0.1)) as out:
        assert await out.say(b"") == b""
    assert out.decisions == []


async def test_a_body_that_does_not_come_ends_the_request(tmp_path: Path) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE, patience=Timeouts(body=0.1)) as out,
    ):
        host = f"{HOST}:{site.port}"
        said = f"POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\nabc"
        assert await out.say(said.encode()) == b""
    assert out.decisions[-1].reason == "the client went away"


async def test_a_name_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """… nor may it take the places of all: the lookups of one sandbox are few at a time."""
    waiting = asyncio.Event()

    async def slow(host: str, port: int) -> list[str]:
        await waiting.wait()
        return []

    from sbx.egress.resolver import NotReached, Resolver

    resolver = Resolver(slow, 0.1)
    try:
        with pytest.raises(NotReached, match=r"not resolved within 0\.1 s"):
            await resolver.resolve("a.example", 80)
        assert len(resolver._under_way) == 1
        await asyncio.gather(
            *(resolver.resolve(f"{n}.example", 80) for n in range(9)), return_exceptions=True
        )
        assert len(resolver._under_way) == 3
    finally:
        await resolver.close()


def _forever(piece: bytes = b"x" * 65536) -> tuple[list[int], Callable[..., Any]]:
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            sent[0] += len(piece)

    return sent, serve


async def test_more_connections_than_may_be_are_told_so(tmp_path: Path) -> None:
    async with way(tmp_path, allowing(HOST, connections_max=2), HERE) as out:
        first, second = await out.open(), await out.open()
        with closed(first[1]), closed(second[1]):
            await asyncio.sleep(0.05)  # until both are accepted
            reported = refusal(await out.say(b""))
            assert (reported["status"], reported["rule"]) == ("503", "network.connections_max")
            assert reported["reason"] == "2 connections are open already"
        await asyncio.sleep(0.05)
        assert refusal(await out.get("http://other.example/"))["rule"] == "network.allow"


async def test_bytes_are_those_of_all_connections_and_end_them(tmp_path: Path) -> None:
    _, serve = _forever()
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", bytes_max=1 << 20), HERE) as out,
    ):
        said = await out.get(f"http://{HOST}:{site.port}/")
        assert len(said) <= 1.2 * (1 << 20)
        assert out.decisions[-1].rule == "network.bytes_max"
        assert (out.decisions[-1].ended, out.decisions[-1].allowed) == (True, False)
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/"))
        assert (reported["rule"], site.connections) == ("network.bytes_max", 1)


async def test_time_is_up_for_a_reply_without_end(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", time_max=0.2), HERE) as out,
    ):
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/"))
        assert (reported["status"], reported["rule"]) == ("504", "network.time_max")
    assert out.decisions[-1].rule == "network.time_max"


async def test_who_does_not_read_slows_who_sends(tmp_path: Path) -> None:
    sent, serve = _forever()
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        _, writer = await out.open()
        with closed(writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            host = f"{HOST}:{site.port}"
            writer.write(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            before = 0
            while before == 0 or before != sent[0]:
                before = sent[0]
                await asyncio.sleep(0.2)
            assert sent[0] < 32 << 20  # what linux holds in its buffers of TCP, and no more


async def test_who_leaves_is_not_answered_for(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        left.set()

    asked, left = asyncio.Event(), asyncio.Event()
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE, patience=Timeouts(left=0.1)) as out,
    ):
        _, writer = await out.open()
        with closed(writer):
            host = f"{HOST}:{site.port}"
            writer.write(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await asked.wait()
        async with asyncio.timeout(60):
            await left.wait()
    assert out.decisions[-1].reason == "the client went away"


async def test_who_says_all_at_once_and_no_more_is_answered(tmp_path: Path) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        reader, writer = await out.open()
        with closed(writer):
            host = f"{HOST}:{site.port}"
            writer.write(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            writer.write_eof()
            assert (await until_the_end(reader)).endswith(b"hello")


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_closing_at_any_moment_leaves_nothing(tmp_path: Path, turns: int) -> None:
    before = asyncio.all_tasks()
    async with (
        origin(lambda _: reply(b"x" * 300_000)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        asking = [
            asyncio.create_task(out.get(f"http://{HOST}:{site.port}/", method="POST", body="a"))
            for _ in range(3)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        await out.egress.close()
        await asyncio.gather(*asking, return_exceptions=True)
        begun = [d for d in out.decisions if d.allowed and not d.ended]
        assert len(begun) == len([d for d in out.decisions if d.ended])
    left: list[Any] = [task.get_coro() for task in asyncio.all_tasks() - before if not task.done()]
    assert [coro for coro in left if "/egress/" in coro.cr_code.co_filename] == []


async def test_closing_ends_all_and_takes_the_socket_away(tmp_path: Path) -> None:
    _, serve = _forever()
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        reader, writer = await out.open()
        with closed(writer):
            host = f"{HOST}:{site.port}"
            writer.write(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await reader.readexactly(1000)
            assert out.socket.parent.stat().st_mode & 0o777 == 0o700
            await out.egress.close()
            await out.egress.close()
            await until_the_end(reader)
        assert not out.socket.parent.exists()
    assert out.decisions[-1].reason == "the proxy was closed"


async def test_a_flood_of_refused_requests_is_slowed(tmp_path: Path) -> None:
    """Each is written to the audit log, which must not fill the disk."""
    async with way(tmp_path, Network(mode="proxy"), HERE) as out:
        floods = [out.get(f"http://{HOST}/") for _ in range(20)]
        async with asyncio.timeout(60):
            await asyncio.gather(*floods)
        began = asyncio.get_running_loop().time()
        for _ in range(4):
            await asyncio.gather(*(out.get(f"http://{HOST}/") for _ in range(10)))
        assert asyncio.get_running_loop().time() - began > 1


async def test_a_trip_wire_is_seen_in_a_request(tmp_path: Path) -> None:
    def honeytokens(text: str) -> str | None:
        return "planted key" if "AKIA-PLANTED" in text else None

    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE, honeytokens=honeytokens) as out,
    ):
        url = f"http://{HOST}:{site.port}/"
        assert refusal(await out.get(f"{url}?k=AKIA-PLANTED"))["rule"] == "honeytoken"
        assert refusal(await out.get(url, "X: AKIA-PLANTED"))["rule"] == "honeytoken"
        assert refusal(await out.get(url, method="AKIA-PLANTED"))["rule"] == "honeytoken"
        coded = base64.b64encode(b"me:AKIA-PLANTED").decode()
        reported = refusal(await out.get(url, f"Authorization: Basic {coded}"))
        assert reported["rule"] == "honeytoken"
        body = "x" * 100_000 + "AKIA-PLANTED"
        assert refusal(await out.get(url, method="POST", body=body))["rule"] == "honeytoken"
        assert (await out.get(url)).startswith(b"HTTP/1.1 200")
        assert [heard.body for heard in site.heard] == [b""]


# -- one sandbox, and all others -------------------------------------------------------------------


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """A server in a thread of its own, which takes whatever comes as fast as it can."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def swallow() -> None:
            with suppress(OSError):
                taken, _ = server.accept()
                with taken:
                    while taken.recv(1 << 18):
                        pass

        done = thread.submit(swallow)
        try:
            yield server.getsockname()[1]
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            done.result()


async def longest_wait(working: asyncio.Task[Any]) -> float:
    """The largest part of the time until this is done in which the loop had no turn for others."""
    longest, last = 0.0, time.perf_counter()
    began = last
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await working
    return longest / (last - began)


async def test_chunks_of_a_byte_keep_nobody_waiting(tmp_path: Path) -> None:
    """What asyncio finds in a socket it takes without a turn of the loop, and a piece of 64 KiB may
    hold ten thousand chunks: a sender who never lets up had all of the runtime for itself."""
    with swallowing() as port:
        async with way(tmp_path, allowing(f"{HOST}:{port}"), HERE) as out:
            head = f"POST http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\n"

            def send() -> None:
                fd = os.open(out.socket.parent, os.O_PATH)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(f"/proc/self/fd/{fd}/{out.socket.name}")
                    os.close(fd)
                    sock.settimeout(60)
                    sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                    sock.sendall(b"1\r\na\r\n" * 40_000)

            sending = asyncio.create_task(asyncio.to_thread(send))
            assert await longest_wait(sending) < 0.5


async def test_a_head_of_countless_lines_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Each is parsed and searched by itself: 16000 of them took a second of everybody's."""
    async with origin() as site, way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out:
        few = [f"X-{n}: {n}" for n in range(200)]
        assert b"hello" in await out.get(f"http://{HOST}:{site.port}/", *few)
        reported = refusal(await out.get(f"http://{HOST}:{site.port}/", *["a:"] * 16_000))
        assert (reported["rule"], reported["status"]) == ("http.head_size", "431")
        assert len(site.heard) == 1


async def test_heads_that_come_at_once_are_read_one_after_another(tmp_path: Path) -> None:
    """Each takes some milliseconds, and a sandbox has 32 connections."""
    head = f"GET http://other.example/ HTTP/1.1\r\nHost: other.example\r\nX: {'%41' * 20_000}\r\n"
    async with way(tmp_path, allowing(HOST), HERE) as out:

        async def begun() -> asyncio.StreamWriter:
            _, writer = await out.open()
            writer.write(head.encode())
            return writer

        writers = [await begun() for _ in range(30)]
        await asyncio.sleep(0.5)  # all but the last line has been read

        for writer in writers:
            writer.write(b"\r\n")
        at_once, known = 0, 0
        async with asyncio.timeout(60):
            while known < len(writers):
                await asyncio.sleep(0)  # one turn of the loop
                at_once, known = max(at_once, len(out.decisions) - known), len(out.decisions)
        for writer in writers:
            writer.transport.abort()
        assert at_once == 1
