"""The check of ids of users, agents and conversations.

Ids come from callers and are hostile. They are keys of the store and never paths: any text that a
user, a log or a path cannot mistake for something else.
"""

import unicodedata

from sbx.errors import BadRequest

ID_MAX = 128  # characters


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
