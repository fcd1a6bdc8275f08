"""The error body of a service, turned back into the error that was raised there."""

import json
from typing import Any

from sbx import errors

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
    423: errors.Conflict,
    429: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
    507: errors.Unavailable,
}


def error_of(status: int, body: bytes) -> errors.SbxError:
    """The same class and code as there; `details["request_id"]` finds it in the service's log."""
    try:
        told = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return _foreign(status)
    return _error_from(told, status)


def failure(data: str) -> errors.SbxError:
    """The same of a stream whose last event tells that it failed."""
    try:
        told = json.loads(data)
        return _error_from(told["error"], int(told["status"]))
    except (ValueError, KeyError, TypeError):
        return _foreign(500)


def _error_from(told: Any, status: int) -> errors.SbxError:
    if not isinstance(told, dict) or not isinstance(told.get("code"), str):
        return _foreign(status)
    code = told["code"]
    hint, details = told.get("hint"), told.get("details")
    details = dict(details) if isinstance(details, dict) else {}
    if isinstance(request_id := told.get("request_id"), str):
        details["request_id"] = request_id
    return _class_of(code, status)(
        str(told.get("message")),
        code=code,
        hint=hint if isinstance(hint, str) else None,
        details=details,
    )


def _class_of(code: str, status: int) -> type[errors.SbxError]:
    if (known := _CLASS_OF_CODE.get(code)) is not None:
        return known
    if (known := _CLASS_OF_STATUS.get(status)) is not None:
        return known
    return errors.Broken if status >= 500 else errors.BadRequest


def _foreign(status: int) -> errors.SbxError:
    return errors.Broken(
        f"the service answered {status} with a body that is not its own",
        code="foreign_reply",
        hint="is something else listening at this address?",
    )
