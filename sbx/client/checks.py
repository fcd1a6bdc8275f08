"""Checks before a request is sent: values that no URL and no JSON can carry.

The service makes all other checks.
"""

import unicodedata
from collections.abc import Mapping

from sbx.errors import BadRequest, InvalidPath, TooLarge
from sbx.protocol.runs import CODE_MAX

_NAME_MAX = 255  # bytes


def name(value: str) -> str:
    """Return the name of a conversation or an upload: one component of a URL. Raise InvalidPath."""
    if not isinstance(value, str) or not value:
        raise _invalid("empty_path", "the name is empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _invalid("not_utf8", "the name cannot be written as UTF-8") from None
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise _invalid("control_character", "the name contains a control character")
    if value in (".", ".."):
        raise _invalid("path_traversal", "'.' and '..' cannot name anything")
    if "/" in value or "\\" in value:
        raise _invalid("separator", f"{value!r} must be a plain name, without '/' or '\\'")
    if size > _NAME_MAX:
        raise _invalid("name_too_long", f"a name is at most {_NAME_MAX} bytes long")
    return value


def path(value: str) -> str:
    """Return the path. Raise InvalidPath if UTF-8 cannot encode it."""
    try:
        value.encode()
    except (UnicodeEncodeError, AttributeError):
        raise _invalid("not_utf8", "the path cannot be written as UTF-8") from None
    return value


def text(value: str, what: str) -> str:
    """Return the text. Raise BadRequest `invalid_code`, and TooLarge `code_too_large` for text that
    no service accepts."""
    try:
        size = len(value.encode())
    except (UnicodeEncodeError, AttributeError):
        raise BadRequest(
            f"UTF-8 cannot encode the {what}",
            code="invalid_code",
            hint="decode bytes with the right encoding, and replace invalid characters",
        ) from None
    if size > CODE_MAX:
        raise TooLarge(
            f"the {what} of {size} bytes is longer than the limit of {CODE_MAX} bytes",
            code="code_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": CODE_MAX},
        )
    return value


def timeout(value: float | None) -> float | None:
    """Return the time-out. Raise BadRequest `invalid_timeout`. The service checks its maximum."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadRequest(
            f"a time-out must be a number of seconds above 0, not {value!r}",
            code="invalid_timeout",
            hint="leave it out for the policy's run_timeout",
        )
    return min(value, 1e9)  # JSON has no infinity


def environment(variables: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the variables. Raise BadRequest `invalid_env`."""
    if variables is None:
        return None
    for key, value in variables.items():
        try:
            (key + value).encode()
        except (TypeError, UnicodeEncodeError):
            raise BadRequest(
                f"an environment cannot contain the variable {key!r}",
                code="invalid_env",
                hint="use names without '=', and names and values of text without NUL",
            ) from None
    return dict(variables)


def content(value: str | bytes) -> bytes:
    """Return the bytes. Raise BadRequest `invalid_content`."""
    try:
        return value.encode() if isinstance(value, str) else bytes(memoryview(value))
    except (UnicodeEncodeError, TypeError) as error:
        raise BadRequest(
            f"the content of a file must be text or bytes: {error}",
            code="invalid_content",
            hint="encode the text yourself, with a suitable error handler",
        ) from None


def _invalid(reason: str, sentence: str) -> InvalidPath:
    return InvalidPath(
        sentence,
        hint="use a plain name of printable characters",
        details={"field": "path", "reason": reason},
    )
