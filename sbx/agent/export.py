"""Export a history as JSON text and import it into another sbx."""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.history import MessageHistory
from sbx.agent.messages import Message, carried, carried_call, from_json, to_json
from sbx.errors import BadRequest, Conflict, TooLarge
from sbx.protocol.events import decode

IMPORT_MAX = 5000  # messages
_FORMAT = 1
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")  # the format that every provider accepts


class _Entry(Struct, frozen=True):
    message: Message
    covers: int | None


async def export_history(history: MessageHistory) -> str:
    """Return the whole history with its times and with the range that each summary covers."""
    messages: list[dict[str, Any]] = []
    for entry in await history.messages():
        message = {**to_json(entry.message), "created_at": entry.created_at}
        messages.append(message if entry.covers is None else {**message, "covers": entry.covers})
    document = {"format": _FORMAT, "messages": messages}
    return await asyncio.to_thread(json.dumps, document, ensure_ascii=False, indent=1)


async def import_history(history: MessageHistory, text: str) -> int:
    """Append an exported history to an empty one. Return the number of messages.

    The messages get the current time. Raise BadRequest `invalid_history`, which names the first
    invalid message, TooLarge for more than 5,000 messages, or Conflict `history_not_empty`. Nothing
    is appended then.
    """
    entries = await asyncio.to_thread(_read, text)
    if not await history.fill([(entry.message, entry.covers) for entry in entries]):
        raise Conflict(
            "a history can only be imported into an empty one",
            code="history_not_empty",
            hint="import it into a new conversation",
        )
    return len(entries)


def _read(text: str) -> Sequence[_Entry]:
    try:
        document = decode(text)
    except (ValueError, RecursionError):
        raise _invalid("the history is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise _invalid("the history has no list of messages")
    if document.get("format") != _FORMAT:
        raise _invalid(f"the history is not of format {_FORMAT}")
    if len(document["messages"]) > IMPORT_MAX:
        raise TooLarge(
            f"the history has more than {IMPORT_MAX} messages",
            code="history_full",
            hint="import its last messages only",
            details={"limit": IMPORT_MAX},
        )
    entries = [_entry(number, fields) for number, fields in enumerate(document["messages"], 1)]
    _check(entries)
    return entries


def _entry(number: int, fields: Any) -> _Entry:
    try:
        message = from_json(fields)
        for image in message.images:
            image.media_type.encode("ascii")
            base64.b64decode(image.data, validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise _invalid(
            f"message {number}: an image must be base64 text with a media type"
        ) from None
    except ValueError as error:
        raise _invalid(f"message {number}: {error}") from None
    covers = fields.get("covers")
    if (message.role == "summary") != (type(covers) is int and 0 < covers < number):
        raise _invalid(f"message {number}: a summary, and no other, must cover messages before it")
    return _Entry(_carried(message), covers)


def _carried(message: Message) -> Message:
    return replace(
        message,
        content=carried(message.content),
        name=None if message.name is None else carried(message.name),
        tool_calls=tuple(map(carried_call, message.tool_calls)),
    )


def _check(entries: Sequence[_Entry]) -> None:
    """Refuse a history that providers would refuse on every request: a call without its result,
    a result without its call, ids in an unusual format, or a first message that is not from the
    user."""
    if entries and entries[0].message.role != "user":
        raise _invalid("message 1 is not from the user")
    seen: set[str] = set()
    waiting: set[str] = set()
    complete = set()  # numbers at which a summary may end: no call is open
    for number, entry in enumerate(entries, 1):
        message = entry.message
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise _invalid(f"message {number} is a result without a call before it")
            waiting.remove(message.tool_call_id)
        elif waiting:
            raise _invalid(f"message {number} comes before the result of a call")
        ids = [call.id for call in message.tool_calls]
        if (ids and message.role != "assistant") or len({*ids} - seen) < len(ids):
            raise _invalid(
                f"message {number} makes calls that are not allowed, or repeats their ids"
            )
        if not all(map(_CALL_ID.fullmatch, ids)):
            raise _invalid(f"message {number} has an invalid call id")
        seen.update(ids)
        waiting.update(ids)
        if not waiting:
            complete.add(number)
        if entry.covers is not None and entry.covers not in complete:
            raise _invalid(f"message {number} covers a call and not its result")


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_history")
