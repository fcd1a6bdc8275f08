"""A script in another language, as the service is asked to run it."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbx.client import checks
from sbx.protocol.languages import check_arguments, check_language


def script(
    code: str,
    language: str,
    *,
    args: Sequence[str],
    timeout: float | None,
    env: Mapping[str, str] | None,
    stdin: str | None,
    cwd: str | None,
) -> dict[str, Any]:
    """The body of a run. Raises what need not be sent to be refused: BadRequest, TooLarge,
    InvalidPath."""
    given = {
        "kind": check_language(language),
        "code": checks.text(code, "code"),
        "args": list(check_arguments(args)) or None,
        "timeout": checks.timeout(timeout),
        "cwd": cwd if cwd is None else checks.path(cwd),
        "env": checks.environment(env),
        "stdin": stdin if stdin is None else checks.text(stdin, "stdin"),
    }
    return {name: value for name, value in given.items() if value is not None}
