"""JSON bodies that several surfaces share, and how a route reads a body by itself.

FastAPI reads and parses the body of a route before it asks for the caller. A large body would then
occupy memory for a client without a key.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from sbx.errors import BadRequest, TooLarge
from sbx.policy.problems import nearest
from sbx.protocol.bundles import ValueCounter
from sbx.protocol.files import FileEntry
from sbx.service.models import ConversationView

# The ignored fields of the current request; the middleware sends them in a header.
IGNORED: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
_IGNORED_MAX, _NAME_MAX = 20, 100
VALUES_MAX = 10_000  # in a JSON body, keys among them: each may be an error that takes 2 µs
_LONG = 1 << 20  # bytes
_NARROWING = ("policy", "narrower", "env", "timeout", "limits")
Model = TypeVar("Model", bound=BaseModel)
RAW_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class RequestBody(BaseModel):
    """A body of our own routes. Raise BadRequest `unknown_field` for a field that it does not have:
    a misspelled limit must not be dropped. JSON has no infinite number, but `1e999` is read as one,
    and no time or size of a request is infinite."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _looks_for_unknown_fields(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for name in data:
                if name not in cls.model_fields:
                    cls._meet_unknown(str(name))
        return data

    @classmethod
    def _meet_unknown(cls, name: str) -> None:
        fields = cls.model_fields
        similar = nearest(name, fields)
        raise BadRequest(
            f"{name[:_NAME_MAX]!r} is not a field of this body",
            code="unknown_field",
            hint=f"did you mean {similar}?" if similar else f"the fields are {', '.join(fields)}",
            details={"field": name[:_NAME_MAX], **({"nearest": similar} if similar else {})},
        )


class ForeignBody(RequestBody):
    """A body whose fields another product defines. The header `Sbx-Ignored` of the reply names
    fields that it does not have. One that narrows raises BadRequest `unknown_field`."""

    @classmethod
    def _meet_unknown(cls, name: str) -> None:
        if name in _NARROWING:
            super()._meet_unknown(name)
        if (ignored := IGNORED.get()) is not None and len(ignored) < _IGNORED_MAX:
            ignored.append(quote(name[:_NAME_MAX], errors="replace"))


class OkBody(BaseModel):
    status: Literal["ok"] = "ok"


class InterruptReply(BaseModel):
    """`interrupted` is false if nothing ran."""

    interrupted: bool


class RunErrorBody(BaseModel):
    name: str
    value: str
    traceback: str
    traceback_ansi: str
    exit_text: str | None = None


class ConversationBody(BaseModel):
    """`files` and `bytes` count the uploads and the files of the code together."""

    conversation_id: str
    created_at: int
    status: Literal["idle", "ready", "busy"]
    files: int
    bytes: int

    @classmethod
    def of(cls, view: ConversationView) -> Self:
        return cls(
            conversation_id=view.name,
            created_at=int(view.created_at),
            status=view.status,
            files=view.files,
            bytes=view.bytes,
        )


def entry_form(entry: FileEntry) -> dict[str, Any]:
    """Return an entry of a directory as Bay has it."""
    return {
        "name": entry.name,
        "path": entry.path,
        "is_file": entry.kind == "file",
        "is_dir": entry.kind == "directory",
        "size": entry.size,
        "modified_time": entry.modified_s,
    }


class NotRecorded(BaseModel):
    """The revocation is in force, and the store does not have it yet. The service retries until it
    does. If the service is killed before that, the revocation is lost at the next start."""

    recorded: Literal[False] = False


REVOKED: dict[int | str, dict[str, Any]] = {
    200: {"model": NotRecorded, "description": "Revoked, and not recorded yet"},
    204: {"description": "Revoked"},
}


def revoked(recorded: bool) -> Response:
    """Return the reply to a revocation, which is in force in either case."""
    if recorded:
        return Response(status_code=204)
    content = NotRecorded().model_dump_json()
    return Response(content, status_code=200, media_type="application/json")


def check_values(values: ValueCounter, limit: int = VALUES_MAX) -> None:
    """Raise TooLarge `body_too_large` for a JSON body of more values and keys."""
    if values.count > limit:
        raise TooLarge(
            f"the JSON of the body has more than {limit} values and keys",
            code="body_too_large",
            hint="send large data as a file",
            details={"limit": limit, "field": "values"},
        )


async def _of_long(body: bytes, model: type[Model]) -> Model:
    """Return a long body as `model`. msgspec decodes texts with many escapes in half of the time of
    pydantic, 15 ms for 16 MiB."""
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return model.model_validate_json(body)  # it knows the place of the error
    new = model.model_validate(content)
    await asyncio.sleep(0)
    return new


async def body_of(request: Request, model: type[Model]) -> Model:
    """Return the body as `model`. Raise RequestValidationError, as FastAPI does for a parameter."""
    body = await request.body()
    try:
        if len(body) <= _LONG:
            return model.model_validate_json(body)
        await asyncio.sleep(0)  # the joined body took some ms, and what follows takes more
        return await _of_long(body, model)
    except ValidationError as error:
        details = [
            {**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)
        ]
        raise RequestValidationError(details) from None


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads `model` by itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def raw_body(request: Request) -> AsyncIterator[bytes]:
    """Yield the bytes of a body. Raise BadRequest `truncated_body` if it is cut off."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise BadRequest(
            "the body ended before its end", code="truncated_body", hint="send it again"
        ) from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. Its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
