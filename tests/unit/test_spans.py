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
