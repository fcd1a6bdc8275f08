"""The Connect protocol, in JSON, for the two services that E2B has inside each sandbox.

    unary     the request and the reply are one JSON message each
    streams   envelopes: one byte of flags, four bytes of length (big-endian), a JSON message
    the end   an envelope with the flag 2: {} or {"error": {"code", "message"}}

Messages are those of protobuf in JSON: names in camel case, bytes in base64, null as absent.
"""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from sbx.aio import in_thread
from sbx.api import sse
from sbx.api.bodies import check_values, raw_body
from sbx.api.surfaces import connect_code
from sbx.errors import BadRequest
from sbx.protocol.bundles import ValueCounter
from sbx.protocol.events import decode

STREAM_TYPE = "application/connect+json"
KEEPALIVE_S = 50.0
_PING_MIN_S, _PING_MAX_S = 1.0, 300.0
_END = 2
_ENVELOPE = struct.Struct(">BI")
_MESSAGE_MAX = 4 << 20  # bytes of one message in a stream
_COUNTED_AT_ONCE = 64 << 10  # bytes
_LONG = 1 << 20  # bytes
_DIGITS_MAX = 10  # of a time-out


class Message(BaseModel):
    """A message of a request. Unknown fields are ignored, as protobuf demands."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


AnyMessage = TypeVar("AnyMessage", bound=Message)


async def unary(request: Request, model: type[AnyMessage]) -> AnyMessage:
    """Return the message of a unary call. Raise BadRequest."""
    content = await request.body()
    if len(content) <= _LONG:
        return parse(content, model)
    return await in_thread(parse, content, model)  # 16 MiB take 15 ms


async def first(request: Request, model: type[AnyMessage]) -> AnyMessage:
    """Return the message of a call whose reply is a stream. Raise BadRequest."""
    contents = [content async for content in messages(request)]
    if len(contents) != 1:
        raise BadRequest(f"the request has {len(contents)} messages in place of one")
    return parse(contents[0], model)


async def messages(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the messages of a stream as they arrive. Raise BadRequest."""
    received = bytearray()
    async for chunk in raw_body(request):
        received += chunk
        at = 0
        while len(received) - at >= _ENVELOPE.size:
            flags, length = _ENVELOPE.unpack_from(received, at)
            if flags & 1 or length > _MESSAGE_MAX:
                raise BadRequest("a message is compressed, or too large")
            start, end = at + _ENVELOPE.size, at + _ENVELOPE.size + length
            if len(received) < end:
                break
            content, at = bytes(received[start:end]), end
            if not flags & _END:
                values = ValueCounter()
                for part in range(0, length, _COUNTED_AT_ONCE):
                    values.feed(content[part : part + _COUNTED_AT_ONCE])
                    check_values(values)
                    await asyncio.sleep(0)
                yield content
            await asyncio.sleep(0)  # also for empty messages, of which a chunk has 60,000
        del received[:at]
    if received:
        raise BadRequest("the last message is cut off", code="truncated_body")


def parse(content: bytes, model: type[AnyMessage]) -> AnyMessage:
    try:
        if len(content) > _LONG:
            with suppress(ValueError, RecursionError):  # pydantic names the place of the error
                return model.model_validate(decode(content))
        return model.model_validate_json(content or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"the message has another shape: {where}: {first['msg']}") from None


def timeout_s(request: Request) -> float | None:
    """Return the time-out of a call; None without one."""
    text = request.headers.get("connect-timeout-ms", "")
    return int(text) / 1000 if text.isdecimal() and len(text) <= _DIGITS_MAX else None


def envelope(message: Mapping[str, Any], flags: int = 0) -> bytes:
    content = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _ENVELOPE.pack(flags, len(content)) + content


def end_of_stream(code: str = "", message: str = "") -> dict[str, Any]:
    """Return the end of a stream as an event, with an error if there is a `code`."""
    return {"type": "end", "body": {"error": {"code": code, "message": message}} if code else {}}


LATE = end_of_stream("deadline_exceeded", "the time of the stream is over")


def _encode(_number: int, event: Mapping[str, Any]) -> bytes:
    if event["type"] == "failure":
        code = connect_code(event["error"], event["status"])
        event = end_of_stream(code, event["error"]["message"])
    return envelope(event["body"], _END if event["type"] == "end" else 0)


async def stream(
    request: Request,
    events: AsyncGenerator[dict[str, Any], None],
    *,
    keepalive: Mapping[str, Any],
    deadline: bool = True,
) -> Response:
    """Send messages, and the end after them. `events` yields messages, or `end_of_stream` as the
    last one. An error before the first message is an ordinary error reply. The stream ends with
    `deadline_exceeded` after the time-out of the request, unless `events` do that (`deadline`
    False)."""
    ping = request.headers.get("keepalive-ping-interval", "")
    ping_s = min(_PING_MAX_S, max(_PING_MIN_S, float(ping[:4]))) if ping.isdecimal() else None
    reply = await sse.stream(
        _numbered(events, timeout_s(request) if deadline else None),
        request=request,
        encode=_encode,
        keepalive=(ping_s or KEEPALIVE_S, envelope(keepalive)),
    )
    reply.headers["content-type"] = STREAM_TYPE
    return reply


async def _numbered(
    events: AsyncGenerator[dict[str, Any], None], within_s: float | None
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Yield the events with their numbers. Each wait has its own scope of the deadline: several
    tasks may read a generator, and a time-out cancels the task that entered it."""
    loop = asyncio.get_running_loop()
    until = None if within_s is None else loop.time() + within_s
    number, ended = 0, False
    async with aclosing(events):
        while not ended:
            try:
                async with asyncio.timeout_at(until):
                    event = await anext(events, None)
            except TimeoutError:
                event = LATE
            event = end_of_stream() if event is None else event
            number += 1
            ended = event.get("type") == "end"
            yield number, event if ended else {"type": "message", "body": event}
