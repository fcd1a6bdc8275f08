"""What a call may ask for, checked before anything is started."""

from collections.abc import Mapping

from sbx import errors
from sbx.policy import Policy
from sbx.protocol.runs import CODE_MAX

COMMAND_MAX = (128 << 10) - 1  # one argument of execve(2), with the zero at its end
_PATH_MAX = 4095  # limits.h


def require_capability(policy: Policy, capability: str) -> None:
    """Raises Denied `capability_not_supported`."""
    if capability not in policy.capabilities:
        raise errors.Denied(
            f"the policy {policy.name} does not offer {capability}",
            code="capability_not_supported",
            hint="use a policy that lists it among its capabilities",
            details={"capability": capability, "available": list(policy.capabilities)},
        )


def require_processes(policy: Policy) -> None:
    """Raises Denied `processes_denied`."""
    if not policy.processes:
        raise errors.Denied(
            f"the policy {policy.name} lets nothing start a process",
            code="processes_denied",
            hint="use Python, or a policy with processes = true",
        )


def timeout_s(policy: Policy, asked: float | None) -> float:
    """Seconds; the policy's wall_time when nothing is asked for.

    Raises BadRequest `invalid_timeout`, and `limit_widened` beyond the wall_time.
    """
    most = policy.limits.wall_time
    if asked is None:
        return most
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise errors.BadRequest(
            f"a time-out is a number of seconds above 0, not {asked!r}",
            code="invalid_timeout",
            hint=f"leave it out for the policy's wall_time of {most:g} s",
        )
    if asked > most:
        raise errors.BadRequest(
            f"a time-out of {asked:g} s is longer than the policy's wall_time of {most:g} s",
            code="limit_widened",
            hint="ask for less, or use a policy with a longer wall_time",
            details={"field": "timeout", "limit": most},
        )
    return float(asked)


def check_text(text: str, what: str, size_max: int = CODE_MAX) -> None:
    """Raises BadRequest `invalid_code` for what UTF-8 cannot carry, TooLarge `code_too_large`."""
    try:
        size = len(text.encode())
    except (UnicodeEncodeError, AttributeError):
        raise errors.BadRequest(
            f"the {what} is not text that UTF-8 can carry",
            code="invalid_code",
            hint="decode bytes with the right encoding, and replace what it cannot",
        ) from None
    if size > size_max:
        raise errors.TooLarge(
            f"the {what} of {size} bytes is longer than the limit of {size_max} bytes",
            code="code_too_large",
            hint="put the data in a file of the workspace and read it from there",
            details={"limit": size_max},
        )


def check_command(command: str) -> None:
    """Raises as `check_text`: a command is one argument of execve(2)."""
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
    """What execve(2) and JSON can carry; not checked further, since only the command has it.

    Raises BadRequest `invalid_env`.
    """
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
    """A command's directory: relative to the workspace, or absolute as the code sees it.

    Not checked further: it is resolved inside, where there is nothing to find beyond the walls.
    """
    path = cwd or "/workspace"
    if "\0" in path:
        raise errors.InvalidPath("a directory's name has no NUL", details={"reason": "null_byte"})
    check_text(path, "cwd", _PATH_MAX)
    return path if path.startswith("/") else f"/workspace/{path}"
