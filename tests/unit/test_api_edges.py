"""What surrounds every route: limits, error bodies, streams of events; over a small app."""

import asyncio
import contextlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, cast

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import Message, Scope

from sbx import errors
from sbx.api import middleware, sse
from sbx.api.app import create_app
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented, error_response, install, status_of
from sbx.api.middleware import HEADERS_MAX, JSON_MAX, RequestLimitsMiddleware
from sbx.api.server.settings import ServiceSettings
from sbx.client.errors import error_of
from sbx.isolation.broker.process import broker_died
from sbx.service.service import Service


class Body(BaseModel):
    number: int


def small_app() -> FastAPI:
    app = FastAPI()
    install(app)

    @app.post("/json")
    async def takes_json(body: Body) -> Body:
        return body

    @app.post("/v1/sandboxes/x/filesystem/upload")
    async def takes_any(request: Request) -> dict[str, int]:
        return {"size": sum([len(chunk) async for chunk in request.stream()])}

    @app.get("/fails/{kind}")
    async def fails(kind: str) -> None:
        if kind == "bug":
            raise RuntimeError("a secret")
        raise errors.Unavailable("full", code=kind, details={"retry_after_s": 1.2})

    @app.get("/stream/{kind}")
    async def streams(kind: str, request: Request) -> Response:
        return await sse.stream(said(kind), request=request)

    @app.get("/last")
    async def last(request: Request) -> int:
        return sse.last_event_id(request)

    app.add_middleware(RequestLimitsMiddleware)
    return app


async def said_again_and_again(closed: asyncio.Event) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        while True:
            number += 1
            yield number, {"type": "stdout", "text": "x"}
            await asyncio.sleep(0)
    finally:
        closed.set()


async def said(kind: str) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    if kind == "first":
        raise errors.NotFound("no such run")
    yield 1, {"type": "stdout", "text": "line\n\ud800é"}
    if kind == "ours":
        raise errors.Closed("it ended")
    if kind == "bug":
        raise RuntimeError("a secret")
    if kind == "silent":
        await asyncio.sleep(0.3)
    yield 2, {"type": "run_end"}


class Reply:
    """What an app sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message.get("body", b"")

    @property
    def code(self) -> str:
        error = json.loads(self.body)["error"]
        assert error["request_id"] == self.headers["x-request-id"]
        return str(error["code"])


async def call(
    method: str,
    path: str,
    *,
    headers: list[tuple[str, str]] | None = None,
    body: bytes | AsyncIterator[bytes] = b"",
    raw_path: bytes | None = None,
    query: bytes = b"",
    state: dict[str, Any] | None = None,
    host: str | None = "x",
    http_version: str = "1.1",
) -> Reply:
    if host is not None:
        headers = [*(headers or []), ("host", host)]
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": http_version, "scheme": "http",
        "method": method, "path": path, "root_path": "", "query_string": query,
        "raw_path": raw_path or path.encode(), "server": ("x", 80), "client": None,
        "headers": [(k.encode(), v.encode()) for k, v in headers or []],
        "state": state or {},
    }  # fmt: skip
    parts = body if not isinstance(body, bytes) else _once(body)
    over = asyncio.Event()

    async def receive() -> Message:
        if over.is_set():
            await asyncio.Event().wait()
        try:
            return {"type": "http.request", "body": await anext(parts), "more_body": True}
        except StopAsyncIteration:
            over.set()
            return {"type": "http.request", "body": b"", "more_body": False}

    reply = Reply()
    async with asyncio.timeout(60):
        await small_app()(scope, receive, reply.send)
    return reply


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def endless(piece: bytes) -> AsyncIterator[bytes]:
    while True:
        yield piece


JSON = ("content-type", "application/json")


async def test_a_sane_request_id_is_kept_and_another_one_is_replaced() -> None:
    kept = await call("GET", "/none", headers=[("x-request-id", "abc-1")])
    assert kept.headers["x-request-id"] == "abc-1"
    assert kept.code == "not_found"
    made = await call("GET", "/none", headers=[("x-request-id", "a b\\")])
    assert len(made.headers["x-request-id"]) == 36


async def test_routing_and_validation_answer_in_our_shape() -> None:
    assert (reply := await call("GET", "/none")).code == "not_found"
    assert reply.status == 404
    assert (reply := await call("GET", "/json")).code == "method_not_allowed"
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    reply = await call("POST", "/json", headers=[JSON], body=b'{"number": "x"}')
    assert (reply.status, reply.code) == (422, "validation_error")
    assert json.loads(reply.body)["detail"][0]["loc"] == ["body", "number"]
    reply = await call("POST", "/json", headers=[JSON], body=b'{"number": ')
    assert (reply.status, reply.code) == (422, "validation_error")
    reply = await call("POST", "/json", headers=[JSON], body=b'{"number": "\xff"}')
    assert reply.status in (400, 422)
    assert reply.code == "validation_error"


async def test_deep_json_is_refused_and_no_bug() -> None:
    reply = await call("POST", "/json", headers=[JSON], body=b"[" * 100_000)
    assert 400 <= reply.status < 500


async def test_a_bug_is_told_by_its_request_id_alone() -> None:
    reply = await call("GET", "/fails/bug")
    assert (reply.status, reply.code) == (500, "internal_error")
    assert b"secret" not in reply.body


@pytest.mark.parametrize(
    ("code", "status"),
    [("queue_full", 429), ("too_many_sandboxes", 429), ("no_space", 507), ("anything", 503),
     ("session_not_ready", 503)],
)  # fmt: skip
async def test_a_limit_says_when_to_come_again(code: str, status: int) -> None:
    reply = await call("GET", f"/fails/{code}")
    assert (reply.status, reply.code) == (status, code)
    assert reply.headers["retry-after"] == "2"


async def test_a_body_that_is_too_large_is_refused_by_its_length_and_by_its_bytes() -> None:
    answer = [JSON, ("content-length", str(JSON_MAX + 1))]
    reply = await call("POST", "/json", headers=answer)
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"
    reply = await call("POST", "/json", headers=[JSON], body=endless(b"x" * 65536))
    assert (reply.status, reply.code) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_the_values_of_json_in_another_encoding_are_not_missed(encoding: str) -> None:
    """A quote seemed to begin in U+0122 and the like, so that no later value was counted: 90,000
    wrong ones stopped the service for a second."""
    text = '{"a": "\u0122", "b": [' + "[]," * 90_000 + "[]]}"
    reply = await call("POST", "/json", headers=[JSON], body=text.encode(encoding))
    assert (reply.status, reply.code) == (413, "body_too_large")


async def test_a_streamed_body_is_not_bounded_by_its_size() -> None:
    reply = await call("POST", "/v1/sandboxes/x/filesystem/upload", body=b"x" * (JSON_MAX + 1))
    assert json.loads(reply.body) == {"size": JSON_MAX + 1}


async def stalled(before_s: float) -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(before_s)
        yield b" "


async def test_a_body_that_stops_coming_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "IDLE_S", 0.05)
    reply = await call("POST", "/json", headers=[JSON], body=stalled(10))
    assert (reply.status, reply.code) == (408, "request_timeout")
    reply = await call("POST", "/v1/sandboxes/x/filesystem/upload", body=stalled(10))
    assert (reply.status, reply.code) == (408, "request_timeout")


async def test_a_body_that_drips_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "JSON_S", 0.05)
    reply = await call("POST", "/json", headers=[JSON], body=stalled(0.01))
    assert (reply.status, reply.code) == (408, "request_timeout")
    monkeypatch.setattr(middleware, "SLOW_AFTER_S", 0.05)
    reply = await call("POST", "/v1/sandboxes/x/filesystem/upload", body=stalled(0.01))
    assert (reply.status, reply.code) == (408, "request_timeout")


async def test_a_body_that_came_fast_may_not_drip_ever_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "SLOW_AFTER_S", 0.05)
    monkeypatch.setattr(middleware, "SLOWEST", 1 << 20)

    async def tired() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.06)
        yield b"x" * (100 << 20)
        async for one in stalled(0.01):
            yield one

    async with asyncio.timeout(60):
        reply = await call("POST", "/v1/sandboxes/x/filesystem/upload", body=tired())
    assert (reply.status, reply.code) == (408, "request_timeout")


async def test_a_body_must_come_faster_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HURRIED_AFTER_S", 0.05)
    waiting = [False]

    async def slow() -> AsyncIterator[bytes]:
        for number in range(40):
            waiting[0] = number > 20
            await asyncio.sleep(0.005)
            yield b"x"

    for hurry, status in ((lambda: False, 200), (lambda: waiting[0], 408)):
        path = "/v1/sandboxes/x/filesystem/upload"
        assert (await call("POST", path, body=slow(), state={"hurry": hurry})).status == status


@pytest.mark.parametrize(
    "called",
    [
        "POST /v1/sandboxes/uploads/extend_ttl",
        "POST /v1/sandboxes/filesystem/upload",
        "POST /api/v1/sessions/uploads/execute",
        "POST /api/v1/sessions/files/upload",
        "POST /v1/sandboxes/x/python/exec",
        "GET /v1/sandboxes/x/filesystem/upload",
        "POST /v1/sandboxes/x/conversations/uploads/interrupt",
        "POST /v1/sandboxes/x/conversations/c/uploads/y",
        "PUT /x/v1/sandboxes/x/conversations/c/files",
        "PUT /v1/sandboxes/x/conversations/c/uploads/y/z",
        "POST /v1/sandboxes/x/filesystem/upload\n",
        "POST /uploads/x",
    ],
)
def test_no_id_makes_another_route_one_of_large_bodies(called: str) -> None:
    assert middleware.largest_body(called) == JSON_MAX  # what each route gets


def test_the_routes_of_files_and_only_they_are_not_bounded() -> None:
    app = create_app(cast("Service", None), ServiceSettings())
    streamed = set()
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            called = f"{method.upper()} {path}"
            if middleware.largest_body(called) is None:
                streamed.add(called)
            kinds = operation.get("requestBody", {}).get("content", {}).keys()
            takes_files = kinds & {"multipart/form-data", "application/octet-stream"}
            assert bool(takes_files) == (called in streamed), called
    assert len(streamed) == 6


async def test_no_byte_is_read_for_somebody_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(_: Request) -> None:
        raise errors.Denied("who?", code="unauthorized")

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"{}"

    read: list[int] = []
    monkeypatch.setattr(RequestLimitsMiddleware.__init__, "__defaults__", (nobody, None))
    for path in ("/json", "/v1/sandboxes/x/filesystem/upload"):
        reply = await call("POST", path, headers=[JSON], body=body())
        assert (reply.status, reply.code, read) == (401, "unauthorized", [])


async def test_headers_are_bounded_and_what_decides_comes_once() -> None:
    many = [(f"x-{number}", "1") for number in range(HEADERS_MAX + 1)]
    assert (await call("GET", "/none", headers=many)).status == 431
    assert (await call("GET", "/none", headers=[("x-long", "x" * 70_000)])).status == 431
    for name in ("authorization", "idempotency-key", "content-type", "x-request-id"):
        twice = await call("GET", "/none", headers=[(name, "a"), (name, "b")])
        assert (twice.status, twice.code) == (400, "validation_error")


GOOD_HOSTS = [
    "sbx",
    "localhost",
    "127.0.0.1:8765",
    "[::1]:8765",
    "a_b.example.",
    "%c3%a9",
    "x:",
    "",
]
BAD_HOSTS = ["a b", "a/b", "a@b", "http://a", "[::1", "::1", "a:b", "a:123456", "é", "a\\b", "%z"]


@pytest.mark.parametrize("host", GOOD_HOSTS)
async def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert (await call("GET", "/none", host=host)).status == 404


@pytest.mark.parametrize("host", BAD_HOSTS)
async def test_another_host_is_refused(host: str) -> None:
    reply = await call("GET", "/none", host=host)
    assert (reply.status, reply.code) == (400, "validation_error")


async def test_http_1_1_needs_one_host_and_http_1_0_none() -> None:
    assert (await call("GET", "/none", host=None)).status == 400
    assert (await call("GET", "/none", headers=[("host", "x")])).status == 400
    assert (await call("GET", "/none", host=None, http_version="1.0")).status == 404


@pytest.mark.parametrize("text", ["", "abc", "-1", "+1", "1.0", "9" * 16, "٣", "1 2"])
async def test_a_malformed_event_id_is_refused(text: str) -> None:
    """It was taken for 0, and the client got all events a second time."""
    reply = await call("GET", "/last", headers=[("last-event-id", text)])
    assert (reply.status, reply.code) == (400, "invalid_event_id")


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 15, 10**15 - 1)])
async def test_an_event_id_is_a_number(text: str, number: int) -> None:
    reply = await call("GET", "/last", headers=[("last-event-id", text)])
    assert (reply.status, json.loads(reply.body)) == (200, number)
    assert json.loads((await call("GET", "/last")).body) == 0


async def test_addresses_are_utf8_and_bounded() -> None:
    for raw in (b"/a%ffb", b"/%c0%ae%c0%ae", b"/%ed%a0%80"):
        reply = await call("GET", "/a�b", raw_path=raw)
        assert (reply.status, reply.code) == (400, "invalid_path")
    reply = await call("GET", "/none", query=b"path=%fe")
    assert (reply.status, reply.code) == (400, "invalid_path")
    reply = await call("GET", "/a\0b", raw_path=b"/a%00b")
    assert (reply.status, reply.code) == (400, "invalid_path")
    assert (await call("GET", "/none", query=b"q=" + b"x" * 20_000)).status == 414
    assert (await call("GET", "/é", raw_path=b"/%c3%a9")).status == 404


async def test_a_stream_tells_ids_types_and_one_line_of_json_each() -> None:
    reply = await call("GET", "/stream/all")
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"
    events = reply.body.split(b"\n\n")
    assert events[0].startswith(b"id: 1\nevent: stdout\ndata: {")
    assert json.loads(events[0].partition(b"data: ")[2])["text"] == "line\n\ud800é"
    assert events[1] == b'id: 2\nevent: run_end\ndata: {"type":"run_end"}'


async def test_what_fails_before_the_first_event_is_an_ordinary_error() -> None:
    reply = await call("GET", "/stream/first")
    assert (reply.status, reply.code) == (404, "not_found")


@pytest.mark.parametrize(("kind", "code"), [("ours", "closed"), ("bug", "internal_error")])
async def test_what_fails_later_is_the_last_event(kind: str, code: str) -> None:
    reply = await call("GET", f"/stream/{kind}")
    last = reply.body.split(b"\n\n")[-2]
    assert last.startswith(b"id: 2\nevent: failure\n")
    assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == code
    assert b"secret" not in reply.body


async def test_a_silent_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.1)
    reply = await call("GET", "/stream/silent")
    assert b"\n\n: \n\n" in reply.body
    assert reply.body.endswith(b'data: {"type":"run_end"}\n\n')


def test_every_error_of_ours_has_a_status() -> None:
    kinds = [one for _, one in inspect.getmembers(errors, inspect.isclass)]
    for kind in (one for one in kinds if issubclass(one, errors.SbxError)):
        assert 400 <= status_of(kind("x")) <= 507


def test_documented_has_what_every_route_may_answer() -> None:
    assert {401, 404, 408, 409, 413, 422, 500} <= set(documented(404, 409))


async def test_a_stream_whose_client_goes_is_closed() -> None:
    closed = asyncio.Event()
    response = await sse.stream(said_again_and_again(closed))
    sent: list[Message] = []

    async def receive() -> Message:
        while len(sent) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(60):
        await response({"type": "http"}, receive, send)
    assert closed.is_set()
    assert sent[-1]["more_body"] is True  # nobody was told an end


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SEND_S", 0.05)
    closed = asyncio.Event()
    response = await sse.stream(said_again_and_again(closed))

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with asyncio.timeout(60) as bound:
        with pytest.raises(TimeoutError):
            await response({"type": "http"}, never, send)
    assert not bound.expired()
    assert closed.is_set()


def test_service_whose_broker_died_is_unavailable_until_it_has_started_again() -> None:
    """Each request that needed a kernel was a 500."""
    reply = error_response(broker_died(), None)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
    assert type(error_of(reply.status_code, bytes(reply.body))) is errors.Broken


def routes() -> list[APIRoute]:
    routers = [
        value
        for name, module in sys.modules.items()
        if name.startswith("sbx.api.")
        for value in vars(module).values()
        if isinstance(value, APIRouter)
    ]
    every = (route for router in routers for route in router.routes)
    return [route for route in every if isinstance(route, APIRoute)]


def numbers() -> Iterator[tuple[str, TypeAdapter[Any]]]:
    """Yield each field of a body and each parameter of a route that takes a float."""
    models: list[type[RequestBody]] = [RequestBody]
    for model in models:
        models += model.__subclasses__()
        for name, field in model.model_fields.items():
            kind: Any = Annotated[field.annotation, field]
            if "float" in str(field.annotation):
                yield f"{model.__name__}.{name}", TypeAdapter(kind, config=model.model_config)
    for route in routes():
        for part in (*route.dependant.query_params, *route.dependant.header_params):
            kind = Annotated[part.field_info.annotation, part.field_info]
            if "float" in str(part.field_info.annotation):
                yield f"{route.path}?{part.name}", TypeAdapter(kind)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "nan"])
def test_no_number_of_a_request_may_be_infinite(value: str) -> None:
    """E2B's `timeout: 1e999` made a sandbox, and then no list of its owner was possible: 500."""
    taken = []
    for name, adapter in numbers():
        with contextlib.suppress(ValidationError):
            taken.append((name, adapter.validate_python(float(value))))
    assert len(dict(numbers())) > 10
    assert taken == []


def test_each_download_answers_head() -> None:
    """HEAD of a signed address of E2B was 405."""
    heads = {route.path for route in routes() if "HEAD" in (route.methods or ())}
    downloads = {
        route.path
        for route in routes()
        if "GET" in (route.methods or ())
        and {"files_response", "send_range"} & {*route.endpoint.__code__.co_names}
    }
    assert len(downloads) == 6
    assert downloads <= heads


async def test_a_body_of_many_values_is_refused_before_it_is_parsed() -> None:
    """15 MiB of `[],` took a second of the loop for each request (holes 2.1f)."""
    limit = 10_000
    for content, status in (
        (b'{"number": 1, "x": [' + b"[]," * 3_000 + b"[]]}", 200),
        (b'{"number": 1, "x": "' + b",[{:" * 20_000 + b'"}', 200),
        (b'{"number": 1, "x": "\\\\", "y": [' + b"[]," * limit + b"[]]}", 413),
        (b'{"number": 1, "x": "\\"", "y": [' + b"[]," * limit + b"[]]}", 413),
        (b"[" * (limit + 1), 413),
    ):
        reply = await call(
            "POST", "/json", headers=[("content-type", "application/json")], body=content
        )
        assert reply.status == status, content[:40]
        assert status == 200 or json.loads(reply.body)["error"]["details"]["field"] == "values"
