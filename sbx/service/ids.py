"""The checks of ids of users, agents and conversations, and of the size of what a caller stores.

Ids come from callers and are hostile. They are keys of the store and never paths: any text that a
user, a log or a path cannot mistake for something else.
"""

import json
import unicodedata

from sbx.errors import BadRequest, TooLarge

ID_MAX = 128  # characters
LABELS_MAX = 64 << 10  # bytes of the labels of a sandbox; an owner may have hundreds in memory
_REQUEST_MAX = 256 << 10  # bytes of the limits and variables that a sandbox was requested with


def check_id(field: str, value: str) -> str:
    """Give back `value` if it can be an id. Raises BadRequest, its `details` naming the field."""
    problem = None
    if not 1 <= len(value) <= ID_MAX:
        problem = f"must have 1 to {ID_MAX} characters"
    elif value in (".", "..") or "/" in value:
        problem = "must be no '.' or '..', and have no '/'"
    elif any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
        problem = "must have no control characters"
    if problem is None:
        return value
    raise BadRequest(f"{field} {problem}", details={"field": field})


def check_sizes(labels: object, request: object) -> None:
    """Check the labels and the request of a new sandbox. Raise as `check_text`."""
    check_text("labels", labels, LABELS_MAX)
    check_text("request", request, _REQUEST_MAX)


def check_text(field: str, value: object, limit: int, before: object = None) -> None:
    """Raise TooLarge `metadata_too_large` if `value` takes more than `limit` bytes as JSON, unless
    it is smaller than the value `before`, which an earlier version of sbx may have stored."""
    size = _size(value)
    if size > limit and size > _size(before):
        raise TooLarge(
            f"{field} of a sandbox take {size} bytes, more than the limit of {limit}",
            code="metadata_too_large",
            hint="keep large values in a file of the sandbox",
            details={"field": field, "limit": limit},
        )


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))


def session_id(user_id: str, agent_id: str) -> str:
    """Return the id of a session, which every client can compute."""
    return f"sb-session-{user_id}-{agent_id}"
