"""Try a command on a frozen copy before the user is asked, so that the user approves its effect."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx.agent.sandbox import SupportsDryRun, ToolDryRun
from sbx.errors import BadRequest, Conflict, Unavailable

_TOOL = "execute_command"

# Programs that always use the network, as a separate word anywhere in the command. A dry run has
# no network and would only show how they fail. Other programs that need it fail in the dry run.
_NETWORK = re.compile(
    r"(?<![\w./-])(?:curl|wget|ssh|scp|sftp|rsync|ftp|telnet|nc|ncat|ping|dig|nslookup"
    r"|git\s+(?:\S+\s+){0,8}?(?:clone|fetch|pull|push|ls-remote)"
    r"|(?:pip[\d.]*|uv|pipx|poetry|npm|npx|pnpm|yarn|cargo|go|gem|apt|apt-get|conda)"
    r"\s+(?:\S+\s+){0,8}?(?:install|download|add|get|sync|update|upgrade|ci|publish)"
    r"|npx)(?![\w.-])"
)


@dataclass(frozen=True, slots=True)
class DryRunCommand:
    text: str
    cwd: str | None
    timeout: float | None


def command_of(tool: str, arguments: Mapping[str, Any]) -> DryRunCommand | None:
    """Return the command that a call would run. Return None if the call is not a command or needs
    the network."""
    if tool != _TOOL or needs_network(arguments["command"]):
        return None
    return DryRunCommand(arguments["command"], arguments.get("cwd"), arguments.get("timeout"))


def needs_network(command: str) -> bool:
    return _NETWORK.search(command) is not None


async def dry_run_or_none(sandbox: SupportsDryRun, command: DryRunCommand) -> ToolDryRun | None:
    """Dry-run the command. Return None if that is impossible: too large, too many, or no means.
    The user is then asked without a dry run, and an error in the call itself shows when it
    runs."""
    try:
        return await sandbox.dry_run(command.text, timeout=command.timeout, cwd=command.cwd)
    except (BadRequest, Conflict, Unavailable):
        return None
