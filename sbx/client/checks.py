"""What a call may not ask for, refused before it is sent: what no address and no JSON can carry.

The rest is decided by the service alone.
"""

import unicodedata
from collections.abc import Mapping

from sbx.errors import BadRequest, InvalidPath, TooLarge
from sbx.protocol.runs import CODE_MAX

_NAME_MAX = 255  # bytes


def name(given: str) -> str:
    """A conversation or an upload: one component of an address. Raises InvalidPath."""
    if not isinstance(given, str) or not given:
        raise _invalid("empty_path", "the name is empty")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise _invalid("not_utf8", "the name cannot be written as UTF-8") from None
    if any(unicodedata.category(char) == "Cc" for char in given):
        raise _invalid("control_character", "the name contains a control character")
    if given in (".", ".."):
        raise _invalid("path_traversal", "'.' and '..' cannot name anything")
    if "/" in given or "\\" in given:
        raise _invalid("separator", f"{given!r} must be a plain name, without '/' or '\\'")
    if size > _NAME_MAX:
        raise _invalid("name_too_long", f"a name is at most {_NAME_MAX} bytes long")
    return given


def path(given: str) -> str:
    """Raises InvalidPath for what UTF-8 cannot carry."""
    try:
        given.encode()
    except (UnicodeEncodeError, AttributeError):
        raise _invalid("not_utf8", "the path cannot be written as UTF-8") from None
    return given


def text(given: str, what: str) -> str:
    """Raises BadRequest `invalid_code`, and TooLarge `code_too_large`: what no service takes need
    not go there."""
    try:
        size = len(given.encode())
    except (UnicodeEncodeError, AttributeError):
        raise BadRequest(
            f"the {what} is not text that UTF-8 can carry",
            code="invalid_code",
            hint="decode bytes with the right encoding, and replace what it cannot",
        ) from None
    if size > CODE_MAX:
        raise TooLarge(
            f"the {what} of {size} bytes is longer than the limit of {CODE_MAX} bytes",
            code="code_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": CODE_MAX},
        )
    return given


def timeout(given: float | None) -> float | None:
    """Raises BadRequest `invalid_timeout`. What is too long is for the service to say."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise BadRequest(
            f"a time-out is a number of seconds above 0, not {given!r}",
            code="invalid_timeout",
            hint="leave it out for the policy's wall_time",
        )
    return min(given, 1e9)  # JSON has no infinity


def environment(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Raises BadRequest `invalid_env`."""
    if given is None:
        return None
    for key, value in given.items():
        try:
            (key + value).encode()
        except (TypeError, UnicodeEncodeError):
            raise BadRequest(
                f"no environment can carry the variable {key!r}",
                code="invalid_env",
                hint="names without '=', names and values of text without NUL",
            ) from None
    return dict(given)


def content(given: str | bytes) -> bytes:
    """Raises BadRequest `invalid_content`."""
    try:
        return given.encode() if isinstance(given, str) else bytes(memoryview(given))
    except (UnicodeEncodeError, TypeError) as error:
        raise BadRequest(
            f"the content of a file is text or bytes: {error}",
            code="invalid_content",
            hint="encode the text yourself, with the error handler you want",
        ) from None


def _invalid(reason: str, sentence: str) -> InvalidPath:
    return InvalidPath(
        sentence,
        hint="use a plain name of printable characters",
        details={"field": "path", "reason": reason},
    )
