"""Spans of OpenTelemetry, where somebody wants them.

Who collects spans has imported opentelemetry before (by an SDK, or `opentelemetry-instrument`), so
where nobody has, nothing is imported and nothing happens. The API alone, without an SDK, does
nothing either.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[None]:
    """A span `name` around the block. Attributes are named `sbx.` and what is given here."""
    if "opentelemetry.trace" not in sys.modules:
        return _NOTHING
    return _span(name, attributes)


def record(name: str, seconds: float, **attributes: str | int | float | bool) -> None:
    """A span `name` that took so long and ends now, in the context of the caller."""
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
