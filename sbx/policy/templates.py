"""The policy of each image or template that another product names: the setting `templates`."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from sbx.errors import NotFound

TEMPLATES: Mapping[str, str] = {
    "base": "default",  # of E2B
    "code-interpreter-v1": "default",
    "ubuntu*": "default",  # of OpenSandbox: the images of its documentation
    "python:*": "default",
    "opensandbox/code-interpreter:*": "default",
    "*/opensandbox/code-interpreter:*": "default",
}


def policy_of(templates: Mapping[str, str], name: str) -> str:
    """Return the policy of an image or a template: of the same name, else of the first pattern
    that matches. Raise NotFound `unknown_template`."""
    if (policy := templates.get(name)) is not None:
        return policy
    for pattern, policy in templates.items():
        if fnmatchcase(name, pattern):
            return policy
    raise NotFound(
        f"the image or template {name[:200]!r} has no policy",
        code="unknown_template",
        hint="the operator adds it to the setting templates; '*' there is every other name",
    )


def name_pairs(value: Any) -> Any:
    """Convert `name=policy,name=policy` of a variable. In TOML it is a table already."""
    if not isinstance(value, str):
        return value
    pairs = [part.split("=") for part in value.replace(" ", "").split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("write it as name=policy,name=policy")
    return dict(pairs)
