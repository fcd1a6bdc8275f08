"""The events of a run as OpenSandbox's SDK reads them: `data: {json}`, one line each, in ASCII.

    init, output …, then `error` or `execution_complete`

The SDK joins pieces of text with a line end, so a piece holds whole lines. The beginning of a line
waits for its end, for the end of the run, or for a pause. ASCII: the SDK of the interpreter also
splits at U+2028 and U+0085, and loses the event.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from sbx.api import sse
from sbx.api.encoding import encoded_if_long
from sbx.api.line_events import LineBuffer, with_pauses
from sbx.protocol.events import encode as to_ascii
from sbx.protocol.events import to_json
from sbx.protocol.runs import Display, Result, Run, RunEnd, Status, Stderr, Stdout
from sbx.service.run import RunHandle

PING_S = 3.0
_TRACEBACK_LINES = 5000  # the rest is one line: a message may have millions
Event = dict[str, Any]


def event(kind: str, **fields: Any) -> Event:
    return {"type": kind, "timestamp": int(time.time() * 1000), **fields}


def encode(_number: int, data: Mapping[str, Any]) -> bytes:
    """Return the bytes of one event. A failure of the stream is an `error` event."""
    if data["type"] == "failure":
        error = data["error"]
        data = event(
            "error", error={"ename": error["code"], "evalue": error["message"], "traceback": []}
        )
    return b"data: %b\n\n" % to_ascii(data)


async def reply(
    events: AsyncIterator[tuple[int, Event]] | AsyncIterator[tuple[int, Event | bytes]],
    request: Request,
) -> Response:
    """Send the events. If the client disconnects, the run continues."""
    ping = encode(0, event("ping", text="pong"))
    response = await sse.stream(events, request=request, encode=encode, keepalive=(PING_S, ping))
    response.headers["content-type"] = sse.MEDIA_TYPE
    return response


async def run_events(
    handle: RunHandle, *, command: bool
) -> AsyncGenerator[tuple[int, Event | bytes], None]:
    """Yield the events of a run, numbered, the terminal one last."""
    number = 0
    async with aclosing(_events(handle, command=command)) as events:
        async for each in events:
            number += 1
            yield number, await encoded_if_long(each, encode)


async def _events(handle: RunHandle, *, command: bool) -> AsyncGenerator[Event, None]:
    lines, counted = LineBuffer(), False
    yield event("init", text=handle.run_id)
    async with aclosing(with_pauses(handle, lines, PING_S)) as events:
        async for each in events:
            match each:
                case None:
                    for stream, text in lines.flush():
                        yield event(stream, text=text)
                case Stdout(text=text) | Stderr(text=text):
                    if whole := lines.feed(each.type, text):
                        yield event(each.type, text=whole)
                case Result() | Display():
                    for stream, text in lines.flush():
                        yield event(stream, text=text)
                    count = getattr(each, "execution_count", None)
                    if count and not counted:
                        counted = True
                        yield event("execution_count", execution_count=count)
                    yield event("result", results=_results(to_json(each)["data"]))
                case RunEnd(run=run):
                    for stream, text in lines.flush():
                        yield event(stream, text=text)
                    if run.execution_count and not counted:
                        yield event("execution_count", execution_count=run.execution_count)
                    yield _command_end(run) if command else _code_end(run)


def _results(data: Mapping[str, Any]) -> dict[str, Any]:
    plain = data.get("text/plain")
    others = {kind: value for kind, value in data.items() if kind != "text/plain"}
    return {"text": plain, **others} if isinstance(plain, str) else others


def _complete(run: Run) -> Event:
    return event("execution_complete", execution_time=round(run.duration_s * 1000))


def _command_end(run: Run) -> Event:
    """Return the end of a command. The SDK reads the exit code from `evalue`."""
    if run.ok:
        return _complete(run)
    code = -1 if run.exit_code in (None, 0) else run.exit_code
    reason = run.error.value if run.error is not None else f"exit status {code}"
    return event(
        "error", error={"ename": "CommandExecError", "evalue": str(code), "traceback": [reason]}
    )


def _code_end(run: Run) -> Event:
    if run.ok and run.error is None:
        return _complete(run)
    error = run.error
    if run.status is Status.INTERRUPTED or error is None:
        name, value = "KeyboardInterrupt", error.value if error is not None else ""
        traceback = error.traceback_ansi if error is not None else ""
    else:
        name, value, traceback = error.name, error.value, error.traceback_ansi
    lines = traceback.split("\n", _TRACEBACK_LINES) if traceback else [f"{name}: {value}"]
    return event("error", error={"ename": name, "evalue": value, "traceback": lines})
