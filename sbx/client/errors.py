"""Errors of a service: its error bodies as exceptions, and replies that the client cannot read."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from sbx import errors

T = TypeVar("T")

# By its code where one status stands for several classes; see sbx/api/errors.py for the other way.
_CLASS_OF_CODE: dict[str, type[errors.SbxError]] = {
    "invalid_path": errors.InvalidPath,
    "invalid_policy": errors.PolicyError,
    "interpreter_unavailable": errors.PolicyError,
    "environment_unavailable": errors.PolicyError,
    "mount_unavailable": errors.PolicyError,
    "start_timeout": errors.Broken,
    "broker_died": errors.Broken,
    "policy_shadows": errors.PolicyError,
    "closed": errors.Closed,
    "cannot_enforce": errors.CannotEnforce,
    "capability_not_supported": errors.Denied,
    "gc_running": errors.Conflict,
    "too_many_files": errors.Conflict,
}
_CLASS_OF_STATUS: dict[int, type[errors.SbxError]] = {
    401: errors.Denied,
    403: errors.Denied,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.TooLarge,
    421: errors.Denied,
    423: errors.Conflict,
    429: errors.Unavailable,
    501: errors.Unavailable,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
    507: errors.Unavailable,
}


def error_of(status: int, body: bytes) -> errors.SbxError:
    """Return the error with the class and the code that it had in the service.

    `details["request_id"]` identifies the request in the log of the service.
    """
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return _foreign(status)
    return _error_from(error, status)


def failure(data: str) -> errors.SbxError:
    """Return the error of a stream whose last event reports a failure."""
    try:
        event = json.loads(data)
        return _error_from(event["error"], int(event["status"]))
    except (ValueError, KeyError, TypeError):
        return _foreign(500)


def decode(what: str, read: Callable[[Any], T], data: Any) -> T:
    """Return `read(data)`. Raise Broken `foreign_reply` for data that `read` does not accept."""
    try:
        return read(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.Broken(
            f"the service sent an invalid {what}: {error}",
            code="foreign_reply",
            hint="the client and the service may be of different versions",
        ) from error


def _error_from(error: Any, status: int) -> errors.SbxError:
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return _foreign(status)
    code = error["code"]
    hint, details = error.get("hint"), error.get("details")
    details = dict(details) if isinstance(details, dict) else {}
    if isinstance(request_id := error.get("request_id"), str):
        details["request_id"] = request_id
    return _class_of(code, status)(
        str(error.get("message")),
        code=code,
        hint=hint if isinstance(hint, str) else None,
        details=details,
    )


def _class_of(code: str, status: int) -> type[errors.SbxError]:
    default = errors.Broken if status >= 500 else errors.BadRequest
    return _CLASS_OF_CODE.get(code) or _CLASS_OF_STATUS.get(status) or default


def _foreign(status: int) -> errors.SbxError:
    return errors.Broken(
        f"the service answered {status} with a body that is not an error body of sbx",
        code="foreign_reply",
        hint="is something else listening at this address?",
    )
