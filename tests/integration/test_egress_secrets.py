"""Secrets: outside they arrive, inside they never do."""

import gzip
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from egressing import (
    Certificates,
    Heard,
    Origin,
    Way,
    allowing,
    origin,
    refusal,
    reply,
    way,
)

from sbx.egress import Secret

HOST = "api.example"
OTHER = "other.example"
HERE = {HOST: ["127.0.0.1"], OTHER: ["127.0.0.1"]}
VALUE = 'v4lue-of-the/secret+"0"'


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


def echo(heard: Heard) -> bytes:
    """A server that tells whoever asks all that it was told."""
    token = heard.header("Authorization") or b""
    return reply(heard.head + heard.body, b"X-Echo: " + token, b"Set-Cookie: t=" + token)


@asynccontextmanager
async def secured(
    tmp_path: Path, certificates: Certificates, answer: Any = echo, **more: Any
) -> AsyncIterator[tuple[Way, Origin, ssl.SSLContext, str]]:
    """A way out with a secret for HOST; what stands inside is last. OTHER is read as well, for it
    has a rule."""
    from sbx.policy.tables import NetworkRule

    secret = Secret("API", "API_TOKEN", (HOST,), "Authorization", VALUE, **more)
    async with (
        origin(answer, tls=certificates.server(HOST, OTHER)) as site,
        way(
            tmp_path,
            allowing(
                f"{HOST}:{site.port}", f"{OTHER}:{site.port}", rule=(NetworkRule(host=OTHER),)
            ),
            HERE,
            secrets={"API": secret},
            outside=certificates.trust,
        ) as out,
    ):
        inside = out.inside
        yield out, site, inside, out.egress.environment["API_TOKEN"]


async def test_the_value_arrives_outside_and_what_echoes_it_shows_the_placeholder(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with secured(tmp_path, certificates) as (out, site, inside, placeholder):
        said = await out.ask(
            f"{HOST}:{site.port}",
            inside,
            "/",
            f"Authorization: Bearer {placeholder}",
            "Accept-Encoding: gzip, br",
            "Range: bytes=0-5",
        )
        [heard] = site.heard
        assert heard.header("Authorization") == b"Bearer " + VALUE.encode()
        assert heard.header("Accept-Encoding") == b"identity"
        assert heard.header("Range") is None
    assert VALUE.encode() not in said
    for shown in (b"X-Echo: Bearer ", b"Set-Cookie: t=Bearer ", b"\r\nauthorization: Bearer "):
        assert shown.lower() + placeholder.encode() in said.lower()
    assert VALUE not in repr(out.decisions)


@pytest.mark.parametrize("header", ["Range", "If-Range", "Request-Range"])
async def test_a_host_with_a_secret_is_asked_for_no_part_of_anything(
    tmp_path: Path, certificates: Certificates, header: str
) -> None:
    """Also without the placeholder: what it remembers of the last request would come in halves."""
    async with secured(tmp_path, certificates) as (out, site, inside, _):
        await out.ask(f"{HOST}:{site.port}", inside, "/last", f"{header}: bytes=0-9")
        assert site.heard[0].header(header) is None
        await out.ask(f"{OTHER}:{site.port}", inside, "/last", f"{header}: bytes=0-9")
        assert site.heard[1].header(header) == b"bytes=0-9"


@pytest.mark.parametrize(
    ("host", "path", "header", "body"),
    [
        (OTHER, "/", "Authorization: {}", ""),
        (HOST, "/", "X-Other: {}", ""),
        (HOST, "/", "Cookie: a={}", ""),
        (HOST, "/?token={}", "A: b", ""),
        (HOST, "/{}/", "A: b", ""),
        (HOST, "/", "A: b", "token={}"),
        (HOST, "/", "Authorization: {}", "token={}"),
        (OTHER, "/", "A: b", "{}"),
        (HOST, "/", "Proxy-Authorization: {}", ""),
        (HOST, "/", "Connection: close, {}", ""),
    ],
)
async def test_a_placeholder_anywhere_else_is_refused_and_recorded(
    tmp_path: Path, certificates: Certificates, host: str, path: str, header: str, body: str
) -> None:
    async with secured(tmp_path, certificates) as (out, site, inside, placeholder):
        path, header = path.format(placeholder), header.format(placeholder)
        reported = refusal(
            await out.ask(
                f"{host}:{site.port}", inside, path, header, body=body.format(placeholder)
            )
        )
        assert (reported["status"], reported["rule"]) == ("403", "secrets.API")
        assert "placeholder of API" in reported["reason"]
        assert site.heard == []
    last = out.decisions[-1]
    assert (last.allowed, last.rule, last.host) == (False, "secrets.API", host)


async def test_a_placeholder_in_plain_http_is_refused_and_sent_where_it_may_be(
    tmp_path: Path,
) -> None:
    for number, allow_plain in enumerate((False, True)):
        secret = Secret("API", "T", (HOST,), "X-Key", VALUE, allow_plain)
        directory = tmp_path / str(number)
        directory.mkdir()
        async with (
            origin(echo) as site,
            way(
                directory,
                allowing(f"{HOST}:{site.port}", f"{OTHER}:{site.port}"),
                HERE,
                secrets={"API": secret},
            ) as out,
        ):
            key = f"X-Key: {out.egress.environment['T']}"
            reported = refusal(await out.get(f"http://{OTHER}:{site.port}/", key))
            assert reported["rule"] == "secrets.API"
            said = await out.get(f"http://{HOST}:{site.port}/", key)
            if allow_plain:
                assert site.heard[0].header("X-Key") == VALUE.encode()
                assert VALUE.encode() not in said
                assert out.egress.environment["T"].encode() in said
            else:
                assert "not sent in clear text" in refusal(said)["reason"]
                assert site.heard == []


async def test_a_placeholder_for_the_proxy_itself_is_refused(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with secured(tmp_path, certificates) as (out, site, _, placeholder):
        head = f"CONNECT {HOST}:{site.port} HTTP/1.1\r\nHost: {HOST}:{site.port}\r\n"
        said = await out.say(f"{head}Proxy-Authorization: {placeholder}\r\n\r\n".encode())
        assert refusal(said)["rule"] == "secrets.API"


def coded(_: Heard) -> bytes:
    return reply(b"\x1f\x8b whatever", b"Content-Encoding: gzip")


def unlabelled(heard: Heard) -> bytes:
    return reply(gzip.compress(heard.head), b"Content-Type: text/plain")


def package(_: Heard) -> bytes:
    return reply(gzip.compress(b"a package"), b"Content-Type: application/x-tar")


def in_the_reason(heard: Heard) -> bytes:
    return reply(b"", status=b"200 " + (heard.header("Authorization") or b""))


def broken(heard: Heard) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + (heard.header("Authorization") or b"") + b"\r\n\r\n"


@pytest.mark.parametrize("answer", [coded, unlabelled, in_the_reason, broken])
async def test_nothing_that_a_server_does_brings_the_value_in(
    tmp_path: Path, certificates: Certificates, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with secured(tmp_path, certificates, answer) as (out, site, inside, placeholder):
        said = await out.ask(f"{HOST}:{site.port}", inside, "/", f"Authorization: {placeholder}")
        assert site.heard[0].header("Authorization") == VALUE.encode()
        assert VALUE.encode() not in said
        if answer is not in_the_reason:
            assert refusal(said)["status"] in ("403", "502")
    assert VALUE not in repr(out.decisions) + caplog.text


async def test_compressed_reply_without_a_label_is_refused_and_a_package_is_not(
    tmp_path: Path, certificates: Certificates
) -> None:
    """A host that compressed its echo and did not say so was not searched."""
    for answer, is_refused in ((unlabelled, True), (package, False)):
        (tmp_path / answer.__name__).mkdir()
        async with secured(tmp_path / answer.__name__, certificates, answer) as (out, site, on, _):
            said = await out.ask(f"{HOST}:{site.port}", on, "/")
            if is_refused:
                assert refusal(said)["rule"] == "secrets"
                assert "compressed" in refusal(said)["reason"]
                assert b"\x1f\x8b" not in said
            else:
                assert gzip.compress(b"a package")[10:] in said


async def test_a_coding_that_was_not_asked_for_is_told_of(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with secured(tmp_path, certificates, coded) as (out, site, inside, _):
        reported = refusal(await out.ask(f"{HOST}:{site.port}", inside, "/"))
        assert reported["rule"] == "secrets"
        assert "cannot be searched" in reported["reason"]


async def test_a_host_that_no_secret_is_for_may_answer_in_any_coding(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with secured(tmp_path, certificates, coded) as (out, site, inside, _):
        said = await out.ask(f"{OTHER}:{site.port}", inside, "/", "Accept-Encoding: gzip")
        assert said.endswith(b"\x1f\x8b whatever")
        assert site.heard[0].header("Accept-Encoding") == b"gzip"
