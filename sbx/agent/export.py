"""A history as JSON text: out of one sbx and into another."""

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from sbx.agent.history import History
from sbx.agent.messages import Message, carried, carried_call, from_json, to_json
from sbx.errors import BadRequest, Conflict

_FORMAT = 1
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")  # what every provider takes


@dataclass(frozen=True, slots=True)
class _Told:
    message: Message
    covers: int | None


async def export_history(history: History) -> str:
    """All of it, with its times and with what each summary covers."""
    told: list[dict[str, Any]] = []
    for one in await history.messages():
        message = {**to_json(one.message), "created_at": one.created_at}
        told.append(message if one.covers is None else {**message, "covers": one.covers})
    return json.dumps({"format": _FORMAT, "messages": told}, ensure_ascii=False, indent=1)


async def import_history(history: History, text: str) -> int:
    """Append what was exported to an empty history; returns how many messages that were.

    Its times are those of now. Raises BadRequest `invalid_history`, naming the first message that
    is wrong, and then nothing was appended; Conflict `history_not_empty`.
    """
    told = _read(text)
    _check(told)
    if await history.messages(limit=1):
        raise Conflict(
            "a history is imported into an empty one only",
            code="history_not_empty",
            hint="import it into a new conversation",
        )
    for covers, group in groupby(told, key=lambda one: one.covers):
        await history.append([one.message for one in group], covers=covers)
    return len(told)


def _read(text: str) -> Sequence[_Told]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid("the history is no JSON") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("messages"), list):
        raise _invalid("the history has no list of messages")
    if whole.get("format") != _FORMAT:
        raise _invalid(f"the history is not of format {_FORMAT}")
    return [_one(number, told) for number, told in enumerate(whole["messages"], 1)]


def _one(number: int, told: Any) -> _Told:
    try:
        message = from_json(told)
        for image in message.images:
            image.media_type.encode("ascii")
            base64.b64decode(image.data, validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise _invalid(f"message {number}: a picture is base64 text, of a named type") from None
    except ValueError as error:
        raise _invalid(f"message {number}: {error}") from None
    covers = told.get("covers")
    if (message.role == "summary") != (type(covers) is int and 0 < covers < number):
        raise _invalid(f"message {number}: a summary, and no other, covers messages before it")
    return _Told(_carried(message), covers)


def _carried(message: Message) -> Message:
    return replace(
        message,
        content=carried(message.content),
        name=None if message.name is None else carried(message.name),
        tool_calls=tuple(map(carried_call, message.tool_calls)),
    )


def _check(told: Sequence[_Told]) -> None:
    """Providers refuse a call without its result and a result without its call, ids that they would
    not give themselves, and what does not begin with a user's message: each time anew."""
    if told and told[0].message.role != "user":
        raise _invalid("message 1 is no user's")
    seen: set[str] = set()
    waiting: set[str] = set()
    whole = set()  # where a summary may end: no call is open
    for number, one in enumerate(told, 1):
        message = one.message
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise _invalid(f"message {number} is the result of no call before it")
            waiting.remove(message.tool_call_id)
        elif waiting:
            raise _invalid(f"message {number} comes before the result of a call")
        ids = [call.id for call in message.tool_calls]
        if (ids and message.role != "assistant") or len({*ids} - seen) < len(ids):
            raise _invalid(f"message {number} makes calls that it may not, or repeats their ids")
        if not all(map(_CALL_ID.fullmatch, ids)):
            raise _invalid(f"message {number} has what cannot be the id of a call")
        seen.update(ids)
        waiting.update(ids)
        if not waiting:
            whole.add(number)
        if one.covers is not None and one.covers not in whole:
            raise _invalid(f"message {number} covers a call and not its result")


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_history")
