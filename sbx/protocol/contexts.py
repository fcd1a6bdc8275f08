"""What both sides of the wire know of contexts: how many there may be, and how one is called."""

import unicodedata

from sbx.errors import BadRequest

DEFAULT_CONTEXT = "default"
CONTEXTS_MAX = 8  # of one conversation, `default` included
_NAME_MAX = 128  # characters


def check_context(name: str) -> str:
    """Give back `name` if it can be that of a context: a key, and never a path. Raises BadRequest,
    its `details` naming the field."""
    problem = None
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_MAX:
        problem = f"must be text of 1 to {_NAME_MAX} characters"
    elif name in (".", "..") or "/" in name or "\\" in name:
        problem = "must be no '.' or '..', and have no '/' or '\\'"
    elif any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        problem = "must have no control characters"
    if problem is None:
        return name
    raise BadRequest(
        f"the name of a context {problem}",
        hint="use a plain name, as 'analysis'",
        details={"field": "context"},
    )
