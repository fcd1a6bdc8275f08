"""The log of a service: structlog on top of the standard library, as JSON or for a reader.

Modules log by `logging.getLogger(__name__)`. Context variables add the ids of the request, the
sandbox, the conversation and the run to each line: `with bound(sandbox=id): …`.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars
from structlog.typing import Processor

_QUIET = (
    *("asyncio", "uvicorn", "httpx", "httpcore", "multipart", "python_multipart"),
    *("anthropic", "httpcore2", "httpx2", "mcp", "openai"),  # they would log complete requests
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_TEXT_MAX = 8192


def configure(*, form: str = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line of this process to `stream` (by default stderr).

    `form` is json, console, or auto, which means console on a terminal. A second call replaces the
    first.
    """
    stream = stream or sys.stderr
    as_json = form == "json" or (form == "auto" and not stream.isatty())
    shared: list[Processor] = [
        merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor]
    if as_json:
        last = [
            structlog.processors.format_exc_info,
            _escaped,
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ]
    else:
        last = [_escaped, structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def bound(
    *,
    request: str | None = None,
    sandbox: str | None = None,
    conversation: str | None = None,
    run: str | None = None,
) -> AbstractContextManager[None]:
    """Add these ids to every line within the block, and in the tasks that start there."""
    ids = {"request": request, "sandbox": sandbox, "conversation": conversation, "run": run}
    return bound_contextvars(**{name: value for name, value in ids.items() if value is not None})


def bind(**ids: str) -> None:
    """Add these ids to every later line of this task and of the tasks that it starts."""
    bind_contextvars(**ids)


def _escaped(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, so that text from a sandbox or from HTTP cannot forge lines or
    colours."""
    for name, value in line.items():
        if isinstance(value, str) and name != "exception":
            line[name] = _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}", value.replace("\n", "\\n"))[
                :_TEXT_MAX
            ]
    return line
