"""What the client does when a service is slow, busy, gone, or none at all: a server that keeps to a
script, on a real socket."""

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
from opentelemetry import trace

from sbx.client import Client, SessionCreateFailed, SessionNotReady
from sbx.client.address import address_of
from sbx.errors import BadRequest, Broken, Closed, SbxError, TooLarge, Unavailable
from sbx.protocol.events import run_to_json
from sbx.protocol.runs import Run, RunEnd, Status, Stdout

# None: hang up
Answer = bytes | None | Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b'HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'
BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n"


class Script:
    """Answers each request with the next of `answers`; `asked` are the requests as they came."""

    def __init__(
        self, *answers: Answer | Callable[[asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked.append(head.decode())
                length = int(self.header("content-length") or 0)
                self.bodies.append(await reader.readexactly(length) if length else b"")
                answer = self.answers.pop(0)
                if answer is None:
                    return
                if callable(answer):
                    await answer(writer)
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def header(self, name: str, of: int = -1) -> str | None:
        for line in self.asked[of].split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key == name:
                return value
        return None


@asynccontextmanager
async def client_for(script: Script, **more: float) -> AsyncIterator[Client]:
    with tempfile.TemporaryDirectory(prefix="wire-") as directory:
        path = f"{directory}/s"
        server = await asyncio.start_unix_server(script.serve, path)
        async with Client(path, **more) as client:  # type: ignore[arg-type]
            yield client
        server.close()
        await server.wait_closed()


def body(status: int, document: object, *headers: str) -> bytes:
    content = json.dumps(document).encode()
    head = [f"HTTP/1.1 {status} X", "x-request-id: 1", f"content-length: {len(content)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


async def test_one_connection_serves_many_requests() -> None:
    script = Script(OK, OK, OK)
    async with client_for(script) as client:
        for _ in range(3):
            assert await client.health() == {"status": "ok"}
    assert script.connections == 1


async def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def once(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    script = Script(once, OK)
    async with client_for(script) as client:
        await client.health()
        await asyncio.sleep(0.05)
        await client.keepalive("s")
    assert script.connections == 2


async def test_a_get_whose_connection_breaks_is_asked_again_and_a_post_is_not() -> None:
    script = Script(None, OK, None)
    async with client_for(script) as client:
        assert await client.health() == {"status": "ok"}
        with pytest.raises(Unavailable) as raised:
            await client.keepalive("s")
    assert (raised.value.code, bool(raised.value.hint)) == ("connection_lost", True)
    assert [line.split()[0] for line in script.asked] == ["GET", "GET", "POST"]


async def test_a_create_is_asked_again_under_the_same_key() -> None:
    made: dict[str, object] = {
        "id": "sandbox-1", "status": "idle", "profile": "default", "cargo_id": "ws-1",
        "capabilities": [], "created_at": "2026-01-02T03:04:05Z", "expires_at": None,
        "idle_expires_at": None, "containers": None,
    }  # fmt: skip
    script = Script(None, body(201, made))
    async with client_for(script) as client:
        box = await client.create()
    assert (box.id, box.policy) == ("sandbox-1", "default")
    key = script.header("idempotency-key", 0)
    assert key
    assert key == script.header("idempotency-key", 1)


async def test_a_busy_service_is_asked_again_when_it_says_so() -> None:
    script = Script(BUSY, BUSY, OK)
    async with client_for(script) as client:
        await client.keepalive("s")
    assert len(script.asked) == 3


async def test_a_service_that_stays_busy_is_told_of() -> None:
    error = {"error": {"code": "queue_full", "message": "x", "details": {"limit": 16}}}
    script = Script(*[body(429, error, "retry-after: 0")] * 4)
    async with client_for(script) as client:
        with pytest.raises(Unavailable) as raised:
            await client.keepalive("s")
    assert (raised.value.code, raised.value.details["limit"]) == ("queue_full", 16)


async def test_a_service_that_asks_for_too_much_patience_is_told_of_at_once() -> None:
    error = {"error": {"code": "too_many_sandboxes", "message": "x"}}
    script = Script(body(429, error, "retry-after: 3600"))
    async with client_for(script) as client:
        with pytest.raises(Unavailable):
            await client.keepalive("s")


async def test_a_silent_service_has_a_deadline() -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        await over.wait()

    over = asyncio.Event()
    async with client_for(Script(never), timeout=0.1) as client:
        with pytest.raises(Unavailable) as raised:
            await client.health()
        over.set()
    assert raised.value.code == "timeout"


async def test_nobody_there_says_how_to_start_one(tmp_path: Path) -> None:
    async with Client(tmp_path / "none", retries=1) as client:
        with pytest.raises(Unavailable) as raised:
            await client.health()
    assert raised.value.code == "service_unreachable"
    assert str(tmp_path / "none") in raised.value.message
    assert raised.value.hint == "start it with: sbx serve"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{{{",
        b"HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-length: 3\r\n\r\n{{{",
        b"HTTP/1.1 502 Bad\r\ncontent-length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-length: 2\r\n\r\n[]",
    ],
)
async def test_what_is_no_service_is_an_error_of_ours(answer: bytes) -> None:
    async with client_for(Script(*[answer] * 4), retries=0) as client:
        with pytest.raises((Broken, Unavailable)) as raised:
            await client.health()
    assert raised.value.code in ("foreign_reply", "foreign_service", "connection_lost")


async def test_an_upload_that_is_refused_on_the_way_is_not_sent_to_its_end() -> None:
    sent = 0

    async def refuse(writer: asyncio.StreamWriter) -> None:
        error = {"error": {"code": "file_too_large", "message": "x", "details": {"limit": 1}}}
        writer.write(body(413, error, "connection: close"))
        await writer.drain()
        await asyncio.sleep(0.05)

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1 << 16
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    async with client_for(Script(refuse)) as client:
        with pytest.raises(TooLarge) as raised:
            await client.sandbox("s").uploads.put_stream("u", endless())
    assert (raised.value.code, sent < 1 << 28) == ("file_too_large", True)


# -- streams ---------------------------------------------------------------------------------------


def event(number: int, content: Mapping[str, object]) -> bytes:
    return f"id: {number}\nevent: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = (
    b"HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
START = event(1, {"type": "run_start", "run_id": "run-1"})
END = {"type": "run_end", "run": run_to_json(Run("run-1", Status.OK, stdout="ab"))}


async def test_a_stream_that_breaks_is_taken_up_again_after_what_was_seen() -> None:
    async def broken(writer: asyncio.StreamWriter) -> None:
        said = START + b": \n\n" + event(2, {"type": "stdout", "text": "a"})
        for byte in said:  # in the smallest pieces there are
            writer.write(chunk(bytes([byte])))
        writer.write(b"5\r\nid:")
        await writer.drain()

    async def rest(writer: asyncio.StreamWriter) -> None:
        said = event(3, {"type": "stdout", "text": "b"}) + event(4, END)
        writer.write(STREAM + chunk(said) + b"0\r\n\r\n")
        await writer.drain()

    async def begun(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        await broken(writer)

    script = Script(begun, None, rest)
    async with client_for(script) as client:
        events = [one async for one in client.sandbox("s").stream("x")]
    assert [one.text for one in events if isinstance(one, Stdout)] == ["a", "b"]
    assert isinstance(events[-1], RunEnd)
    assert [line.split()[:2] for line in script.asked[1:]] == [
        ["GET", "/v1/sandboxes/s/runs/run-1/events"]
    ] * 2
    assert script.header("last-event-id") == "2"


async def test_a_stream_that_fails_raises_what_failed() -> None:
    async def fail(writer: asyncio.StreamWriter) -> None:
        error = {"code": "closed", "message": "x"}
        failed = event(2, {"type": "failure", "status": 409, "error": error})
        writer.write(STREAM + chunk(START + failed) + b"0\r\n\r\n")
        await writer.drain()

    async with client_for(Script(fail)) as client:
        with pytest.raises(Closed):
            async for _ in client.sandbox("s").stream("x"):
                pass


async def test_what_cannot_be_sent_is_refused_before_it_is() -> None:
    async with Client("/none") as client:
        box = client.sandbox("s")
        for call, code in (
            (lambda: box.run("\udc80"), "invalid_code"),
            (lambda: box.run("1", timeout=float("nan")), "invalid_timeout"),
            (lambda: box.shell("1", env={"A": "\udc80"}), "invalid_env"),
            (lambda: box.files.write("a", "\udc80"), "invalid_content"),
            (lambda: box.files.read("\udc80"), "invalid_path"),
            (lambda: box.uploads.put_bytes("a/b", b""), "invalid_path"),
            (lambda: box.run("1", timeout=True), "invalid_timeout"),
        ):
            with pytest.raises(BadRequest) as raised:
                await call()
            assert raised.value.code == code
        for name in ("", ".", "..", "a/b", "a\\b", "\0", "x" * 256):
            with pytest.raises(BadRequest):
                box.conversation(name)


# -- sessions and keys -----------------------------------------------------------------------------


def session(status: str) -> bytes:
    session = {"session_id": "sb-session-u-a", "status": status, "created_at": 1, "ttl": 7200}
    return body(200, session)


MISSING = body(404, {"error": {"code": "not_found", "message": "x"}})
REFUSED = body(503, {"error": {"code": "no_space", "message": "disk full"}})


@pytest.mark.parametrize(
    ("answers", "actions"),
    [
        ((session("running"),), ["get", "reuse_existing"]),
        ((MISSING, session("pending"), session("running")), ["get", "create_new", "get"]),
        ((session("stopped"), session("running")), ["get", "recreate"]),
        ((session("error"), session("running")), ["get", "recover_from_error"]),
    ],
)
async def test_a_session_is_ensured_and_each_step_is_a_span(
    answers: tuple[bytes, ...], actions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[dict[str, str]] = []

    class Tracer:
        def start_as_current_span(self, name: str, attributes: dict[str, str]) -> object:
            assert name == "sbx.ensure_session"
            spans.append(attributes)
            return nullcontext()

    monkeypatch.setattr(trace, "get_tracer", lambda _: Tracer())
    async with client_for(Script(*answers)) as client:
        found = await client.ensure_session(
            "u", "a", business_domain_id="d", retry_interval=0.01, max_retries=2
        )
    assert found.status == "running"
    assert [span["action"] for span in spans] == actions
    assert spans[-1] | {"action": ""} == {
        "session_id": "sb-session-u-a", "user_id": "u", "agent_id": "a",
        "business_domain_id": "d", "action": "",
    }  # fmt: skip


async def test_a_session_is_ensured_although_a_poll_and_the_first_request_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sbx.client.sessions")
    monkeypatch.setenv("SBX_SESSION_RETRY_INTERVAL", "0.01")
    broken = body(500, {"error": {"code": "internal_error", "message": "x"}})
    answers = (broken, session("pending"), REFUSED, broken, session("running"))
    async with client_for(Script(*answers)) as client:
        assert (await client.ensure_session("u", "a")).status == "running"
    logged = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert [line.partition(":")[0] for line in logged] == [
        "could not be read, so it is created", "recover_from_error",
        "pending, attempt 1 of 30", "a poll failed, and is repeated",
        "pending, attempt 2 of 30", "a poll failed, and is repeated",
        "pending, attempt 3 of 30", "ready",
    ]  # fmt: skip


async def test_a_wrong_setting_of_ensure_session_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBX_SESSION_MAX_RETRIES", "many")
    async with client_for(Script()) as client:
        with pytest.raises(BadRequest, match="SBX_SESSION_MAX_RETRIES"):
            await client.ensure_session("u", "a")


async def test_a_session_that_does_not_come_up_says_which() -> None:
    pending = [session("pending")] * 4
    async with client_for(Script(MISSING, *pending)) as client:
        with pytest.raises(SessionNotReady) as late:
            await client.ensure_session("u", "a", retry_interval=0.01, max_retries=2)
    assert (late.value.code, late.value.details["session_id"]) == (
        "session_not_ready",
        "sb-session-u-a",
    )
    async with client_for(Script(MISSING, REFUSED)) as client:
        with pytest.raises(SessionCreateFailed) as failed:
            await client.ensure_session("u", "a")
    assert failed.value.details["cause"] == "no_space"


async def test_over_tcp_the_key_goes_with_each_request() -> None:
    script = Script(OK)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", key="sk-sbx-1") as client:
        await client.health()
    assert script.header("authorization") == "Bearer sk-sbx-1"
    assert script.header("host") == f"127.0.0.1:{port}"
    server.close()
    await server.wait_closed()
    with pytest.raises(BadRequest):
        Client("/none", key="a\r\nx-evil: 1")


# -- whose it is -----------------------------------------------------------------------------------


async def test_a_client_that_was_closed_says_so() -> None:
    client = Client("/none")
    await client.close()
    with pytest.raises(Closed):
        await client.health()


async def test_a_run_that_is_followed_when_its_client_closes_is_told_so() -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(START))
        await closed.wait()

    closed = asyncio.Event()
    async with client_for(Script(never)) as client:
        run = client.sandbox("s").conversation("c").start_run("x")
        async for _ in run.events():
            break
        await client.close()
        closed.set()
        with pytest.raises(Closed):
            await run.result()


def test_a_client_belongs_to_one_event_loop() -> None:
    client = Client("/none", retries=0)
    with pytest.raises(Unavailable):
        asyncio.run(client.health())
    with pytest.raises(BadRequest) as raised:
        asyncio.run(client.health())
    assert raised.value.code == "other_loop"
    asyncio.run(client.close())


def test_a_client_is_not_used_after_a_fork() -> None:
    """The child has the parent's sockets: what it wrote would end up in the parent's requests."""

    async def ask() -> str:
        client = Client("/none", retries=0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                coroutine = client.health()
                coroutine.send(None)
            except SbxError as error:
                code = 0 if error.code == "used_after_fork" else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  # nothing else goes on here
        await client.close()
        return str(os.waitstatus_to_exitcode(status))

    assert asyncio.run(ask()) == "0"


@pytest.mark.parametrize(
    "given",
    [
        "ftp://x",
        "http://",
        "http://h/path",
        "http://h:99999",
        "http://u@h",
        "",
        "a\0b",
        "example.org:80",
        "größe.example:1",
    ],
)
def test_an_address_that_is_none(given: str) -> None:
    with pytest.raises(BadRequest) as raised:
        address_of(given) if given else address_of("unix://")
    assert raised.value.code == "invalid_address"


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("http://127.0.0.1:8765/").port == 8765
    assert address_of("https://host").tls
    for text in ("localhost:8080", "127.0.0.1:1", "[::1]:9"):
        local = address_of(text)
        assert (local.path, local.tls, local.host) == (None, False, text)
    assert address_of("unix:///run/a").path == "/run/a"
    monkeypatch.setenv("SBX_SOCKET", "/run/b")
    assert address_of(None).path == "/run/b"
