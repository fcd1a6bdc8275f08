"""The trace context of W3C (https://www.w3.org/TR/trace-context/) in requests that sbx sends."""

import sys


def trace_headers() -> dict[str, str]:
    """Return the headers that continue the current trace in another process: `traceparent`, and
    `tracestate` if the trace has one. Without a trace, return an empty dict and import nothing."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers
