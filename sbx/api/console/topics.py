"""The topics of the stream that clients can follow. Each yields `(number, event)` until it ends."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from sbx.api.agent_v1 import agents_of
from sbx.api.agent_v1.dependencies import check_runs
from sbx.api.bodies import RequestBody
from sbx.api.v1.bay.sandboxes import usage_of
from sbx.errors import BadRequest, NotFound, SbxError
from sbx.protocol.events import to_json
from sbx.protocol.runs import Event, RunEnd, Stderr, Stdout
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S
from sbx.service.caller import Caller
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

Numbered = AsyncIterator[tuple[int, dict[str, Any]]]
Name = Annotated[str, StringConstraints(min_length=1, max_length=400)]
_SANDBOXES_MAX = 200
_TEXT_MAX = 64 << 10  # characters of one message


class _Follow(RequestBody):
    do: Literal["follow"]
    id: Annotated[str, StringConstraints(min_length=1, max_length=80)]


class FollowOwner(_Follow):
    """Changes of sandboxes, approvals, chats, conversations, projects and uploads."""

    topic: Literal["owner"]


class FollowChat(_Follow):
    """The current run of an agent, or one that ended within the last minute."""

    topic: Literal["chat"]
    conversation_id: Name
    user_id: Name | None = None
    agent_id: Name | None = None
    run_id: Name | None = None
    after: Annotated[int, Field(ge=0)] = 0


class FollowRun(_Follow):
    """A run of code, or one that ended within the last minute."""

    topic: Literal["run"]
    sandbox_id: Name
    run_id: Name
    after: Annotated[int, Field(ge=0)] = 0


class FollowUsage(_Follow):
    """The usage of sandboxes, all that the caller sees without ids. It does not count as a use."""

    topic: Literal["usage"]
    sandbox_ids: Annotated[list[Name], Field(max_length=_SANDBOXES_MAX)] | None = None
    interval_s: Annotated[float, Field(ge=INTERVAL_MIN_S, le=INTERVAL_MAX_S)] = 2.0


class FollowFiles(_Follow):
    """Changes of files of an open sandbox. It does not count as a use."""

    topic: Literal["files"]
    sandbox_id: Name
    conversation: Name = "default"
    path: Annotated[str, StringConstraints(max_length=10_000)] = "."


class Drop(RequestBody):
    """End a topic."""

    do: Literal["drop"]
    id: Annotated[str, StringConstraints(min_length=1, max_length=80)]


Follow = FollowOwner | FollowChat | FollowRun | FollowUsage | FollowFiles
_follows: TypeAdapter[Follow] = TypeAdapter(Annotated[Follow, Field(discriminator="topic")])


def parse(message: Any) -> Follow | Drop:
    """Raise BadRequest `not_a_message`."""
    try:
        if isinstance(message, dict) and message.get("do") == "drop":
            return Drop.model_validate(message)
        return _follows.validate_python(message)
    except (ValidationError, SbxError) as error:
        raise BadRequest(
            "this message is not known",
            code="not_a_message",
            hint='send {"do": "follow", "id", "topic", …} or {"do": "drop", "id"}',
        ) from error


def follow(app: FastAPI, caller: Caller, request: Follow) -> Numbered:
    """Return the events of a topic. They raise the errors of the request."""
    service: Service = app.state.service
    match request:
        case FollowOwner():
            return owner_events(service, caller)
        case FollowChat():
            return _chat_events(app, caller, request)
        case FollowRun():
            return _run_events(service, caller, request)
        case FollowUsage():
            return _usage_events(service, caller, request)
        case FollowFiles():
            return _file_events(service, caller, request)


async def owner_events(service: Service, caller: Caller) -> Numbered:
    """Yield the notices for a caller. End if it does not keep up."""
    subscription = service.notices.follow(caller)
    number = 0
    try:
        while (notice := await subscription.next()) is not None:
            number += 1
            yield number, dict(notice.body)
    finally:
        service.notices.leave(subscription)


async def _chat_events(app: FastAPI, caller: Caller, request: FollowChat) -> Numbered:
    agents = agents_of(app)
    row = await agents.find_chat(
        caller, request.conversation_id, user_id=request.user_id, agent_id=request.agent_id
    )
    check_runs(caller, row.conversation_id)
    run = agents.chats.find(row.key, request.run_id)
    async with aclosing(run.events(request.after)) as events:
        async for number, event in events:
            yield number, event


async def _run_events(service: Service, caller: Caller, request: FollowRun) -> Numbered:
    handle = await service.runs.attach(caller, request.sandbox_id, request.run_id)
    async with aclosing(handle.events(request.after)) as events:
        async for number, event in events:
            for piece in _pieces(event):
                yield number, to_json(piece)


def _pieces(event: Event) -> Iterator[Event]:
    """Split a long output into several events of the same number, and shorten the texts in the end
    of a run, which came before. One message of many megabytes stops a page for a quarter of a
    second."""
    match event:
        case Stdout() | Stderr():
            for begin in range(0, len(event.text), _TEXT_MAX):
                yield replace(event, text=event.text[begin : begin + _TEXT_MAX])
        case RunEnd():
            run = event.run
            texts = {name: getattr(run, name)[-_TEXT_MAX:] for name in ("stdout", "stderr", "text")}
            yield replace(event, run=replace(run, **texts))
        case _:
            yield event


async def _usage_events(service: Service, caller: Caller, request: FollowUsage) -> Numbered:
    number = 0
    while True:
        items = {}
        for sandbox in _observed(service, caller, request.sandbox_ids):
            if (usage := await usage_of(caller, sandbox)) is not None:
                items[sandbox.id] = usage
        number += 1
        yield number, {"type": "usage", "items": items}
        await asyncio.sleep(request.interval_s)


def _observed(service: Service, caller: Caller, ids: list[str] | None) -> list[ServiceSandbox]:
    if not caller.may("execute"):
        return []
    index = service.sandboxes.index
    if ids is None:
        return list(index.visible(caller))[:_SANDBOXES_MAX]
    return [found for each in ids if (found := index.find(caller, each)) is not None]


async def _file_events(service: Service, caller: Caller, request: FollowFiles) -> Numbered:
    sandbox = service.sandboxes.index.get(
        caller, request.sandbox_id, "files:read", conversation=request.conversation
    )
    active = sandbox.active.existing(request.conversation) if sandbox.active is not None else None
    if active is None:
        raise NotFound(
            "this conversation is not open, so its files do not change",
            code="not_open",
            hint="follow it again when the sandbox runs",
        )
    changes: AsyncGenerator[Any, None] = active.files.watch(request.path, recursive=False)
    number = 0
    async with aclosing(changes):
        async for change in changes:
            number += 1
            yield number, {"type": change.kind, "path": change.path}
