"""The rules for contexts that the service and its clients share: their number and their names."""

import unicodedata

from sbx.errors import BadRequest

DEFAULT_CONTEXT = "default"
CONTEXTS_MAX = 8  # of one conversation, `default` included
_NAME_MAX = 128  # characters


def check_context(name: str) -> str:
    """Return `name` if it is valid for a context. It is a key and never a path.

    Raise BadRequest with the name of the field in its `details`.
    """
    problem = None
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_MAX:
        problem = f"must be text of 1 to {_NAME_MAX} characters"
    elif name in (".", "..") or "/" in name or "\\" in name:
        problem = "must not be '.' or '..', and must not contain '/' or '\\'"
    elif any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        problem = "must not contain control characters"
    if problem is None:
        return name
    raise BadRequest(
        f"the name of a context {problem}",
        hint="use a plain name, such as 'analysis'",
        details={"field": "context"},
    )
