"""The checks of a request, before it starts anything."""

from collections.abc import Mapping

from sbx import errors
from sbx.policy import Policy
from sbx.protocol.runs import CODE_MAX

COMMAND_MAX = (128 << 10) - 1  # one argument of execve(2), with the zero at its end
PATH_MAX = 4095  # limits.h


def require_capability(policy: Policy, capability: str) -> None:
    """Raise Denied `capability_not_supported`."""
    if capability not in policy.capabilities:
        raise errors.Denied(
            f"the policy {policy.name} does not offer {capability}",
            code="capability_not_supported",
            hint="use a policy that lists it among its capabilities",
            details={"capability": capability, "available": list(policy.capabilities)},
        )


def require_processes(policy: Policy) -> None:
    """Raise Denied `processes_denied`."""
    if not policy.processes:
        raise errors.Denied(
            f"the policy {policy.name} does not allow processes",
            code="processes_denied",
            hint="use Python, or a policy with processes = true",
        )


def timeout_s(policy: Policy, timeout: float | None, granted_s: float = 0.0) -> float:
    """Return the time-out in seconds; without a `timeout` the policy's run_timeout.

    Raise BadRequest `invalid_timeout`, and `limit_widened` beyond the wall_time, or `granted_s`,
    if that is longer.
    """
    if timeout is None:
        return policy.limits.default_timeout_s
    limit = max(policy.limits.wall_time, granted_s)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise errors.BadRequest(
            f"a time-out is a number of seconds above 0, not {timeout!r}",
            code="invalid_timeout",
            hint=f"leave it out for the policy's default of {policy.limits.default_timeout_s:g} s",
        )
    if timeout > limit:
        raise errors.BadRequest(
            f"a time-out of {timeout:g} s is longer than the policy's wall_time of {limit:g} s",
            code="limit_widened",
            hint="ask for less, or use a policy with a longer wall_time",
            details={"field": "timeout", "limit": limit},
        )
    return float(timeout)


def check_text(text: str, what: str, size_max: int = CODE_MAX) -> None:
    """Raise BadRequest `invalid_code` for text without a UTF-8 form, TooLarge `code_too_large`."""
    if not isinstance(text, str):
        raise errors.BadRequest(
            f"the {what} must be a str, not {type(text).__name__}",
            code="invalid_code",
            hint="decode bytes with the right encoding, and pass text",
        )
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise errors.BadRequest(
            f"the {what} is not text that UTF-8 can carry",
            code="invalid_code",
            hint="decode bytes with the right encoding, and replace invalid characters",
        ) from None
    if size > size_max:
        raise errors.TooLarge(
            f"the {what} of {size} bytes is longer than the limit of {size_max} bytes",
            code="code_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": size_max},
        )


def check_command(command: str) -> None:
    """Raise as `check_text`. A command is one argument of execve(2)."""
    check_text(command, "command", COMMAND_MAX)
    if "\0" in command:
        raise errors.BadRequest(
            "a command has no NUL character",
            code="invalid_code",
            hint="hand it data by stdin= or in a file",
        )


def check_shell(
    policy: Policy, command: str | None, cwd: str | None, env: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """Check a shell command, or a shell without one. Return its directory and its environment.
    Raise Denied, and as the other checks of this module."""
    require_capability(policy, "shell")
    require_processes(policy)
    if command is not None:
        check_command(command)
    return directory(cwd), environment(env or {})


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that execve(2) and JSON can carry. Only the command gets them. Raise
    BadRequest `invalid_env`."""
    for name, value in env.items():
        try:
            carried = "\0" not in (name + value) and "=" not in name and name != ""
            (name + value).encode()
        except (TypeError, UnicodeEncodeError):
            carried = False
        if not carried:
            raise errors.BadRequest(
                f"no environment can carry the variable {name!r}",
                code="invalid_env",
                hint="names without '=', names and values of text without NUL",
            )
    return dict(env)


def directory(cwd: str | None) -> str:
    """Return the directory of a command: relative to the workspace, or absolute as the code sees
    it. The path is resolved inside the jail, so it needs no other check."""
    path = cwd or "/workspace"
    if "\0" in path:
        raise errors.InvalidPath(
            "a directory's name has no NUL", details={"field": "cwd", "reason": "null_byte"}
        )
    check_text(path, "cwd", PATH_MAX)
    return path if path.startswith("/") else f"/workspace/{path}"
