"""Spans of OpenTelemetry, for programs that collect them.

These functions do nothing and import nothing until the process has a provider of spans: its own,
that of `opentelemetry-instrument`, or that of `exporting`. The spans of HTTP requests come from
FastAPI.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from sbx.errors import needs_extra

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_NOTHING = nullcontext()
_SEND_S = 5
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Attribute = str | int | float | bool | None


def span(name: str, **attributes: Attribute) -> AbstractContextManager[None]:
    """Open a span `name` around the block. The name of each attribute gets the prefix `sbx.`, and
    an attribute of None is left out."""
    tracer = _tracer()
    return _NOTHING if tracer is None else _span(tracer, name, attributes)


def annotate(**attributes: Attribute) -> None:
    """Add attributes to the current span."""
    if _tracer() is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_named(attributes))


def record(name: str, seconds: float, **attributes: Attribute) -> None:
    """Record a span `name` that took `seconds` and ends now, in the context of the caller."""
    if (tracer := _tracer()) is not None:
        now = time.time_ns()
        began = now - int(seconds * 1e9)
        tracer.start_span(name, attributes=_named(attributes), start_time=began).end(now)


@contextmanager
def exporting() -> Iterator[None]:
    """Send the spans of this process to a collector, by OTLP over HTTP, until the block ends.

    The variables of OpenTelemetry configure it (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER and others). Without an endpoint, or if the process already has a provider,
    this does nothing. A thread sends the spans. Raise Unavailable `extra_missing`.
    """
    if not any(map(os.environ.get, _ENDPOINTS)) or _tracer() is not None:
        yield
        return
    with needs_extra("the export of spans", "telemetry"):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({"service.name": "sbx"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_SEND_S)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()  # sends the last spans; an absent collector delays it by the time-out


def _tracer() -> "Tracer | None":
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    tracer: Tracer = trace.get_tracer("sbx")
    return tracer


@contextmanager
def _span(tracer: "Tracer", name: str, attributes: dict[str, Attribute]) -> Iterator[None]:
    from opentelemetry.trace import StatusCode

    # Neither the message of an exception nor its traceback: they may contain what users sent.
    with tracer.start_as_current_span(
        name, attributes=_named(attributes), record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except Exception as error:
            current.set_status(StatusCode.ERROR)
            current.set_attribute("error.type", str(getattr(error, "code", type(error).__name__)))
            raise


def _named(attributes: dict[str, Attribute]) -> dict[str, str | int | float | bool]:
    return {f"sbx.{key}": value for key, value in attributes.items() if value is not None}
