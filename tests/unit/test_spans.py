"""Spans: for who collects them, and nothing at all for all others."""

import subprocess
import sys
from pathlib import Path

_NONE = """
import sys
from sbx.telemetry.spans import span
with span("run", kind="python"):
    pass
print([m for m in sys.modules if m.startswith("opentelemetry")])
"""
_SOME = """
import time
from opentelemetry import trace
from contextlib import contextmanager

class Tracer(trace.NoOpTracer):
    @contextmanager
    def start_as_current_span(self, name, *_, attributes=None, **__):
        print(name, attributes)
        yield trace.INVALID_SPAN

    def start_span(self, name, *_, attributes=None, start_time=None, **__):
        print(name, attributes, (time.time_ns() - start_time) // 10**9)
        return trace.INVALID_SPAN

class Provider(trace.NoOpTracerProvider):
    def get_tracer(self, *_, **__):
        return Tracer()

trace.set_tracer_provider(Provider())
from sbx.telemetry.spans import record, span
with span("run", kind="python"):
    pass
record("sbx.run", 7.5, status="ok")
"""


def said(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout.strip()


def test_without_opentelemetry_nothing_is_imported() -> None:
    assert said(_NONE) == "[]"


def test_a_provider_that_is_there_gets_the_spans() -> None:
    assert said(_SOME).splitlines() == [
        "run {'sbx.kind': 'python'}",
        "sbx.run {'sbx.status': 'ok'} 7",
    ]


_FAILING = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sbx.errors import BadRequest
from sbx.telemetry.spans import span
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
try:
    with span("sbx.failing"):
        raise BadRequest("what the user wrote", code="invalid_code")
except BadRequest:
    pass
(failed,) = exporter.get_finished_spans()
print(failed.events, failed.status.is_ok, failed.status.description, dict(failed.attributes))
"""


def test_the_span_of_a_failure_has_its_code_but_not_its_message() -> None:
    assert said(_FAILING) == "() False None {'error.type': 'invalid_code'}"
