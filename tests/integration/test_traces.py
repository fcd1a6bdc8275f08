"""The spans of a service: one tree for each request, below the span of its client."""

import asyncio
import gzip
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any, ClassVar

import pytest
from agent_calls import (
    asked_for,
    body,
    calls,
    decide,
    desk,
    following,
    project,
    runs,
    say,
    the_rest,
)
from live_app import live
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from places import short_directory
from service_process import service

import sbx
from sbx import Sandbox
from sbx.agent.messages import Response
from sbx.errors import BadRequest
from sbx.telemetry.spans import span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARENT_SPAN = int("b7ad6b7169203331", 16)
TRACE = int("0af7651916cd43dd8448eb211c80319c", 16)
Tree = list[tuple[str, "Tree"]]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The provider of a process cannot be replaced, and nothing here ends it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def of_trace(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    spans = exporter.get_finished_spans()
    return [each for each in spans if each.context and each.context.trace_id == TRACE]


def named(spans: list[ReadableSpan], name: str) -> list[dict[str, Any]]:
    """The attributes of all spans with this name."""
    return [dict(each.attributes or {}) for each in spans if each.name == name]


def tree(spans: list[ReadableSpan], parent: int) -> Tree:
    """The names of the spans below a parent, in the order of their beginnings."""
    children = [each for each in spans if each.parent is not None and each.parent.span_id == parent]
    ordered = sorted(children, key=lambda each: each.start_time or 0)
    return [(each.name, tree(spans, each.context.span_id)) for each in ordered if each.context]


async def test_a_chat_is_one_tree_below_the_span_of_its_client(
    exporter: InMemorySpanExporter,
) -> None:
    with short_directory() as directory:
        answers = (calls(("run_code", {"code": "print(6*7)"})), Response("42"))
        async with desk(directory, *answers) as at, at.served.client() as client:
            exporter.clear()
            client.headers["traceparent"] = PARENT
            await say(client, "traced", business_domain_id="sales")
            asked = at.model.requests
    spans = of_trace(exporter)
    assert tree(spans, PARENT_SPAN) == [
        (
            "POST /api/v1/chat",
            [
                ("sbx.ensure", []),
                (
                    "sbx.agent.step",
                    [
                        ("sbx.model", []),
                        ("sbx.tool", [("sbx.acquire", []), ("sbx.run", [])]),
                    ],
                ),
                ("sbx.agent.step", [("sbx.model", [])]),
            ],
        )
    ]
    assert named(spans, "sbx.ensure") == [
        {
            "sbx.session_id": "sb-session-ann-helper",
            "sbx.user_id": "ann",
            "sbx.agent_id": "helper",
            "sbx.business_domain_id": "sales",
            "sbx.action": "created",
        }
    ]
    (tool,), (run,) = named(spans, "sbx.tool"), named(spans, "sbx.run")
    assert (tool["sbx.tool"], tool["sbx.is_error"]) == ("run_code", False)
    assert (run["sbx.kind"], run["sbx.status"], run["sbx.conversation"]) == (
        *("python", "ok"),
        "traced",
    )
    assert [step["sbx.step"] for step in named(spans, "sbx.agent.step")] == [1, 2]
    models = [f"{each.context.span_id:016x}" for each in spans if each.name == "sbx.model"]
    assert [each.headers["traceparent"] for each in asked] == [
        f"00-{TRACE:032x}-{model}-01" for model in models
    ]


async def test_the_wait_for_an_approval_is_a_span_of_its_call(
    exporter: InMemorySpanExporter,
) -> None:
    with short_directory() as directory:
        async with (
            desk(directory, runs("touch a"), Response("done")) as at,
            at.served.client() as client,
        ):
            asked = body("approved", project_id=await project(client, at.directory("p")))
            exporter.clear()
            client.headers["traceparent"] = PARENT
            async with aclosing(following(client, asked)) as events:
                call = (await asked_for(events))["tool_call_id"]
                del client.headers["traceparent"]
                assert (await decide(client, call, True)).status_code == 200
                await the_rest(events)
    spans = of_trace(exporter)
    [(_, below)] = tree(spans, PARENT_SPAN)
    step = next(children for name, children in below if name == "sbx.agent.step")
    assert step == [("sbx.model", []), ("sbx.tool", [("sbx.acquire", []), ("sbx.approval", [])])]
    (approval,) = named(spans, "sbx.approval")
    assert (approval["sbx.tool_call"], approval["sbx.approved"]) == (call, True)


async def test_our_client_continues_the_trace_of_its_program(
    exporter: InMemorySpanExporter,
) -> None:
    def run() -> int:
        with trace.get_tracer("program").start_as_current_span("task") as task:
            with Sandbox(connect=served.socket) as sandbox:
                sandbox.run("1 + 1")
            sbx.close()
            return task.get_span_context().span_id

    with short_directory() as directory:
        async with live(directory) as served:
            exporter.clear()
            task = await asyncio.to_thread(run)
    requests = tree(list(exporter.get_finished_spans()), task)
    assert [below for _, below in requests if below] == [[("sbx.acquire", []), ("sbx.run", [])]]
    assert ("POST /v1/sandboxes", []) in requests


def test_the_span_of_a_failure_has_its_code_but_not_its_message(
    exporter: InMemorySpanExporter,
) -> None:
    exporter.clear()
    with pytest.raises(BadRequest), span("sbx.failing"):
        raise BadRequest("what the user wrote", code="invalid_code")
    (failed,) = exporter.get_finished_spans()
    assert (failed.events, failed.status.is_ok, failed.status.description) == ((), False, None)
    assert dict(failed.attributes or {}) == {"error.type": "invalid_code"}


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP collector that keeps what it receives."""

    received: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        self.received.append(ExportTraceServiceRequest.FromString(content))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """The endpoint of a collector in a thread of its own."""
    Collector.received.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def test_sbx_serve_exports_its_spans_by_otlp() -> None:
    with short_directory() as directory, collector() as endpoint:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with service(directory, env=env, executed=True) as served, served.client() as client:
            reply = client.post("/v1/sandboxes", json={}, headers={"traceparent": PARENT})
            assert reply.status_code == 201, reply.text
            assert served.stop() == 0
    resources = [each for one in Collector.received for each in one.resource_spans]
    names = {
        attribute.value.string_value
        for resource in resources
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert names == {"sbx"}
    exported = {
        span.name: span
        for resource in resources
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert "GET /health" not in exported  # the test asks until the service answers
    assert exported["POST /v1/sandboxes"].trace_id.hex() == f"{TRACE:032x}"
    assert exported["POST /v1/sandboxes"].parent_span_id.hex() == f"{PARENT_SPAN:016x}"


def test_an_endpoint_that_does_not_answer_disturbs_no_request() -> None:
    with short_directory() as directory, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and nobody listens
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with service(directory, env=env, executed=True) as served, served.client() as client:
            assert client.post("/v1/sandboxes", json={}).status_code == 201
            assert served.stop() == 0
