"""Spans of OpenTelemetry, for programs that collect them.

A program that collects spans has imported opentelemetry before (by an SDK, or
`opentelemetry-instrument`). Without that import, these functions import nothing and do nothing. The
API alone, without an SDK, does nothing either.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[None]:
    """Open a span `name` around the block. The name of each attribute gets the prefix `sbx.`."""
    if "opentelemetry.trace" not in sys.modules:
        return _NOTHING
    return _span(name, attributes)


def record(name: str, seconds: float, **attributes: str | int | float | bool) -> None:
    """Record a span `name` that took `seconds` and ends now, in the context of the caller."""
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    now = time.time_ns()
    named = {f"sbx.{key}": value for key, value in attributes.items()}
    trace.get_tracer("sbx").start_span(
        name, attributes=named, start_time=now - int(seconds * 1e9)
    ).end(now)


@contextmanager
def _span(name: str, attributes: dict[str, str | int | float | bool]) -> Iterator[None]:
    from opentelemetry import trace

    named = {f"sbx.{key}": value for key, value in attributes.items()}
    with trace.get_tracer("sbx").start_as_current_span(name, attributes=named):
        yield
