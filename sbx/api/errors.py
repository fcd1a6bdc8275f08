"""Errors as HTTP: the only table of status codes, and the shape of every error body.

    {"error": {"code", "message", "request_id", "details"?, "hint"?}}

Routing (404, 405), request validation (422, with FastAPI's `detail` next to `error`) and bugs of
sbx (500) have the same shape. The body of a bug has its request id, but not its cause. Below the
prefix of another product, its surface decides the body (surfaces.py).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Scope

from sbx import errors
from sbx.api.surfaces import surface_of
from sbx.telemetry.host_paths import without_host_paths

_log = logging.getLogger(__name__)

_STATUS_OF_CODE = {
    "unauthorized": 401,
    "malformed_key": 401,
    "code_not_valid": 401,
    "forbidden": 403,
    "capability_not_supported": 400,
    "request_timeout": 408,
    "too_many_files": 409,
    "body_too_large": 413,
    "uri_too_long": 414,
    "file_type_not_allowed": 415,
    "unsupported_media_type": 415,
    "range_not_satisfiable": 416,
    "wrong_host": 421,
    "gc_running": 423,
    "queue_full": 429,
    "too_many_attempts": 429,
    "too_many_chats": 429,
    "too_many_codes": 429,
    "too_many_downloads": 429,
    "too_many_followers": 429,
    "too_many_workspaces": 429,
    "too_many_idempotency_keys": 429,
    "too_many_bodies": 429,
    "too_many_sandboxes": 429,
    "too_many_streams": 429,
    "too_many_tokens": 429,
    "too_many_searches": 429,
    "too_many_tasks": 429,
    "too_many_uploads": 429,
    "too_many_watches": 429,
    "quota_exceeded": 413,
    "headers_too_large": 431,
    "api_not_supported": 501,
    "port_not_open": 502,
    "sandbox_not_running": 502,
    "broker_died": 503,  # the service ends, to be started again
    "session_not_ready": 503,
    "start_timeout": 503,
    "timeout": 504,
    "no_space": 507,
}
_STATUS_OF_CLASS: dict[type[errors.SbxError], int] = {
    errors.TooLarge: 413,
    errors.BadRequest: 400,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Denied: 403,
    errors.Unavailable: 503,
    errors.Broken: 500,
}
_CODE_OF_STATUS = {
    400: "validation_error",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "body_too_large",
    415: "unsupported_media_type",
}
_REFERENCE = "#/components/schemas/{model}"
_SHOWN_INPUT = 200  # characters of invalid input


class ErrorDetail(BaseModel):
    """The problem: `code` for programs, `message` and `hint` for people."""

    code: str
    message: str
    request_id: str | None = None
    details: dict[str, Any] | None = None
    hint: str | None = None


class ErrorBody(BaseModel):
    """The body of every reply to a failed request."""

    error: ErrorDetail


class Invalid(BaseModel):
    """One problem of a request, as FastAPI names it."""

    loc: list[str | int]
    msg: str
    type: str


class ValidationBody(ErrorBody):
    """422: the error of sbx, and FastAPI's details."""

    detail: list[Invalid]


def status_of(error: errors.SbxError) -> int:
    """Return the HTTP status of an error: by its code, else by its class."""
    if (status := _STATUS_OF_CODE.get(error.code)) is not None:
        return status
    return next(
        (_STATUS_OF_CLASS[kind] for kind in type(error).__mro__ if kind in _STATUS_OF_CLASS), 500
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route: these statuses and those that every route may answer.

    They refer to `schemas`. FastAPI makes a validator of each model of each route, and 2,000 of
    them took a third of the start of a service.
    """
    always = (400, 401, 403, 404, 408, 413, 414, 431, 500, 503, 507)
    return {
        422: _reply(ValidationBody, "The request has another shape"),
        **{
            status: _reply(ErrorBody, HTTPStatus(status).phrase)
            for status in sorted({*always, *statuses})
        },
    }


def _reply(model: type[BaseModel], description: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def schemas() -> dict[str, Any]:
    """Return the schemas of error bodies, by name, for the OpenAPI document."""
    _, definitions = models_json_schema(
        [(ErrorBody, "serialization"), (ValidationBody, "serialization")], ref_template=_REFERENCE
    )
    return dict(definitions["$defs"])


def error_body(error: errors.SbxError, request_id: str | None) -> dict[str, Any]:
    """Return the JSON body of an error, without paths of the host."""
    shown = without_host_paths(error)
    if isinstance(at := error.details.get("expires_at"), (int, float)):
        shown["details"] = {**shown["details"], "expires_at": iso(at)}
    body = {"code": shown.pop("code"), "message": shown.pop("message")}
    if request_id:
        body["request_id"] = request_id
    return {"error": {**body, **shown}}


def iso(seconds: float) -> str:
    """Return seconds of the epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def error_response(
    error: errors.SbxError, request_id: str | None, scope: Scope | None = None
) -> Response:
    """Return the reply to an error, with `Retry-After` if its details have a time. The path of
    `scope` decides the form of the body."""
    status = status_of(error)
    headers = {}
    if (seconds := _retry_after_s(error.details)) is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="sbx"'
    if status in (408, 413, 431):
        headers["connection"] = "close"  # do not read the rest of such a body
    return _json(status, _body(error, request_id, scope, status), headers)


def _body(
    error: errors.SbxError, request_id: str | None, scope: Scope | None, status: int
) -> dict[str, Any] | str:
    if scope is not None and (surface := surface_of(scope)) is not None:
        return surface.error_body(without_host_paths(error), status)
    return error_body(error, request_id)


def _retry_after_s(details: Mapping[str, Any]) -> float | None:
    """Return when to try again. Bay has it in milliseconds."""
    if "retry_after_s" not in details and "retry_after_ms" in details:
        return float(details["retry_after_ms"]) / 1000
    return details.get("retry_after_s")


def broken() -> errors.Broken:
    """Return the error for a bug. Its cause is only in the log, under the request id."""
    return errors.Broken(
        "sbx failed at this request", hint="the service's log has the cause, under this request id"
    )


def install(app: FastAPI) -> None:
    """Give every error of `app` the same shape."""
    app.add_exception_handler(errors.SbxError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.SbxError)
    if isinstance(error, errors.Broken):
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error, _request_id(request), request.scope)


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer errors of routing, and errors of sbx that FastAPI wrapped while it read a body."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, errors.SbxError):
        return await _on_ours(request, error.__cause__)
    code = _CODE_OF_STATUS.get(error.status_code, "http_error")
    ours = errors.SbxError(str(error.detail), code=code)
    if error.status_code == 404:
        ours = errors.NotFound(
            f"unknown endpoint: {request.method} {request.url.path[:200]}",
            hint="the endpoints are listed at /docs and in /openapi.json",
        )
    body = _body(ours, _request_id(request), request.scope, error.status_code)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(request))
    return _json(error.status_code, body, headers)


def _allowed(request: Request) -> list[str]:
    """Return every method of the path. Routing knows only the methods of the first match."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = request.scope["path"]
    matches = [route.methods or () for route in routes if route.path_regex.match(path)]
    return sorted(set().union(*matches))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem(each) for each in error.errors()[:20]]
    text = "; ".join(f"{_field_of(each['loc'])}: {each['msg']}" for each in problems[:3])
    message = f"the request has another shape: {text}"
    first = problems[0]
    if first["loc"] == ["body"] and first["type"] == "missing":
        message = "a JSON body is required, for example {}"
    elif any(each["loc"] == ["body"] and each["type"] in _NO_OBJECT for each in problems) and (
        "json" not in request.headers.get("content-type", "")
    ):
        message = "the body is not JSON; send Content-Type: application/json"
    elif first["type"] == "json_invalid":
        message = f"the body is not valid JSON, at character {first['loc'][-1]}"
    ours = errors.BadRequest(message, details={"errors": problems})
    body = _body(ours, _request_id(request), request.scope, 422)
    return _json(422, {"detail": problems, **body} if isinstance(body, dict) else body, {})


_NO_OBJECT = ("json_invalid", "model_attributes_type", "model_type", "dict_type")


def _problem(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error without `input`, `ctx` and `url`: they may contain values outside of JSON."""
    where = [part if isinstance(part, int) else _fit(part) for part in error["loc"]]
    return {"loc": where, "msg": _fit(error["msg"]), "type": error["type"]}


def _field_of(where: Sequence[str | int]) -> str:
    """Return `ttl` for the field of a body, and `query.limit` for other places."""
    parts = where[1:] if len(where) > 1 and where[0] == "body" else where
    return ".".join(map(str, parts))


def _fit(text: object) -> str:
    return str(text)[:_SHOWN_INPUT].encode("utf-8", "replace").decode()


def _json(status: int, body: object, headers: Mapping[str, str]) -> Response:
    if isinstance(body, str):
        return PlainTextResponse(body.encode(errors="replace"), status, dict(headers))
    # ASCII with escapes: names of files and ids may contain lone surrogates.
    content = json.dumps(body, default=str).encode("ascii")
    return Response(content, status, dict(headers), "application/json")


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)
