"""The spans of a service: one tree for each request, below the span of its client.

The service is a process of its own, and its spans come by OTLP. A provider in the process of the
tests would start threads in each fork of later tests.
"""

import gzip
import http.server
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_calls import PERSON, calls, runs
from model_server import KEY, ModelServer, model_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from places import short_directory
from service_process import Service, service

from sbx.agent.messages import Response

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
Tree = list[tuple[str, "Tree"]]


@dataclass
class Collector:
    """An OTLP collector that keeps what it receives."""

    received: list[ExportTraceServiceRequest] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        received = self.received

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    content = gzip.decompress(content)
                received.append(ExportTraceServiceRequest.FromString(content))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.address = f"http://127.0.0.1:{server.server_address[1]}"
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            try:
                yield
            finally:
                server.shutdown()
                serving.join()

    def spans(self, trace: str) -> list[Span]:
        """All spans of a trace that have ended."""
        return [
            span
            for request in list(self.received)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace
        ]

    def wait_for(self, trace: str, name: str) -> list[Span]:
        """Return the spans of a trace once this one has ended."""
        until(lambda: name in {span.name for span in self.spans(trace)})
        return self.spans(trace)


@dataclass
class Traced:
    """A service whose spans a collector receives, and the model of its agents."""

    served: Service
    collector: Collector
    model: ModelServer
    projects: Path


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    collector = Collector()
    with short_directory() as directory, collector.listening(), model_server() as model:
        projects = directory / "projects"
        projects.mkdir()
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "SBX_PROJECT_DIRS": str(projects),
            "BASE_URL": model.openai_url,
            "API_KEY": KEY,
            "MODEL_NAME": "scripted",
        }
        if os.geteuid() == 0:
            env["SBX_PROJECT_OWNERS"] = str(PERSON)
        with service(directory, env=env) as served:
            yield Traced(served, collector, model, projects)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def new_parent() -> tuple[str, str, str]:
    """A trace, the span of a client, and the header with both."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-01"


def tree(spans: list[Span], parent: str) -> Tree:
    """The names of the spans below a parent, in the order of their beginnings."""
    children = [span for span in spans if span.parent_span_id.hex() == parent]
    children.sort(key=lambda span: span.start_time_unix_nano)
    return [(span.name, tree(spans, span.span_id.hex())) for span in children]


def named(spans: list[Span], name: str) -> list[dict[str, Any]]:
    """The attributes of all spans with this name."""
    return [
        {
            attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value") or "")
            for attribute in span.attributes
        }
        for span in spans
        if span.name == name
    ]


def chat(client: httpx.Client, conversation: str, parent: str, **more: Any) -> Iterator[str]:
    """Send a message, and yield the lines of the events."""
    body = {"user_id": "ann", "agent_id": "helper", "message": "do it", **more}
    headers = {"traceparent": parent}
    with client.stream(
        "POST", "/api/v1/chat", json={**body, "conversation_id": conversation}, headers=headers
    ) as reply:
        assert reply.status_code == 200
        yield from reply.iter_lines()


@pytest.mark.needs("namespaces")
def test_a_chat_is_one_tree_below_the_span_of_its_client(traced: Traced) -> None:
    traced.model.add(calls(("run_code", {"code": "print(6*7)"})), Response("42"))
    trace, parent, header = new_parent()
    with traced.served.client() as client:
        list(chat(client, "traced", header, business_domain_id="sales"))
    spans = traced.collector.wait_for(trace, "POST /api/v1/chat")
    assert tree(spans, parent) == [
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
    assert (run["sbx.kind"], run["sbx.status"]) == ("python", "ok")
    assert (run["sbx.policy"], run["sbx.conversation"]) == ("default", "traced")
    assert [step["sbx.step"] for step in named(spans, "sbx.agent.step")] == [1, 2]
    models = [span.span_id.hex() for span in spans if span.name == "sbx.model"]
    assert [each.headers["traceparent"] for each in traced.model.requests[-2:]] == [
        f"00-{trace}-{model}-01" for model in models
    ]


@pytest.mark.needs("namespaces")
def test_the_wait_for_an_approval_is_a_span_of_its_call(traced: Traced) -> None:
    directory = traced.projects / "p"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    traced.model.add(runs("touch a"), Response("done"))
    trace, parent, header = new_parent()
    with traced.served.client() as client, traced.served.client() as person:
        new = {"name": "p", "working_directory": str(directory)}
        project = client.post("/api/v1/projects", json=new).json()["id"]
        events = chat(client, "approved", header, project_id=project)
        assert any('"tool_pending"' in line for line in events)
        (waiting,) = person.get("/api/v1/approvals").json()["items"]
        call = waiting["tool_call_id"]
        decision = person.post(f"/api/v1/approvals/{call}", json={"approved": True})
        assert decision.status_code == 200
        list(events)
    spans = traced.collector.wait_for(trace, "POST /api/v1/chat")
    [(_, below)] = tree(spans, parent)
    step = next(children for name, children in below if name == "sbx.agent.step")
    assert step[0] == ("sbx.model", [])
    name, made = step[1]
    assert (name, made[-2:]) == ("sbx.tool", [("sbx.run", []), ("sbx.approval", [])])
    (run,) = named(spans, "sbx.run")  # a trial had none
    assert (run["sbx.kind"], run["sbx.status"]) == ("shell", "ok")
    (approval,) = named(spans, "sbx.approval")
    assert (approval["sbx.tool_call"], approval["sbx.approved"]) == (call, True)


_PROGRAM = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sbx import Sandbox
trace.set_tracer_provider(TracerProvider())
with trace.get_tracer("program").start_as_current_span("task") as task:
    with Sandbox(connect=sys.argv[1]) as sandbox:
        assert sandbox.run("1 + 1").result == "2"
    context = task.get_span_context()
    print(f"{context.trace_id:032x} {context.span_id:016x}")
"""


@pytest.mark.needs("namespaces")
def test_our_client_continues_the_trace_of_its_program(traced: Traced) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(traced.served.socket)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    trace, task = ended.stdout.split()
    spans = traced.collector.wait_for(trace, "DELETE /v1/sandboxes/{sandbox_id}")
    requests = tree(spans, task)
    assert [below for _, below in requests if below] == [[("sbx.acquire", []), ("sbx.run", [])]]
    assert ("POST /v1/sandboxes", []) in requests


def test_the_service_names_itself_and_leaves_out_probes(traced: Traced) -> None:
    _, _, header = new_parent()
    trace = header.split("-")[1]
    with traced.served.client() as client:
        client.get("/health", headers={"traceparent": header})
        client.get("/v1/sandboxes", headers={"traceparent": header})
    spans = traced.collector.wait_for(trace, "GET /v1/sandboxes")
    assert [span.name for span in spans] == ["GET /v1/sandboxes"]
    names = {
        attribute.value.string_value
        for request in traced.collector.received
        for resource in request.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert names == {"sbx"}


def test_an_endpoint_that_does_not_answer_disturbs_no_request() -> None:
    with short_directory() as directory, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and no process listens
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with service(directory, env=env) as served, served.client() as client:
            assert client.post("/v1/sandboxes", json={}).status_code == 201
            assert served.stop() == 0
