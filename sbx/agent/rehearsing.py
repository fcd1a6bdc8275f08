"""A command tried on a frozen copy before a person is asked: the effect is what is approved."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx.agent.sandbox import Rehearsal, Rehearses
from sbx.errors import BadRequest, Conflict, Unavailable

_TOOL = "execute_command"

# What reaches out by its nature, as a word of its own anywhere in the command. A rehearsal has no
# network, and would only show how these fail; whatever else tries to reach out shows it that way.
_NETWORK = re.compile(
    r"(?<![\w./-])(?:curl|wget|ssh|scp|sftp|rsync|ftp|telnet|nc|ncat|ping|dig|nslookup"
    r"|git\s+(?:\S+\s+){0,8}?(?:clone|fetch|pull|push|ls-remote)"
    r"|(?:pip[\d.]*|uv|pipx|poetry|npm|npx|pnpm|yarn|cargo|go|gem|apt|apt-get|conda)"
    r"\s+(?:\S+\s+){0,8}?(?:install|download|add|get|sync|update|upgrade|ci|publish)"
    r"|npx)(?![\w.-])"
)


@dataclass(frozen=True, slots=True)
class Command:
    text: str
    cwd: str | None
    timeout: float | None


def command_of(tool: str, arguments: Mapping[str, Any]) -> Command | None:
    """The command that a call would run; None where it is no command, or needs the network."""
    if tool != _TOOL or needs_network(arguments["command"]):
        return None
    return Command(arguments["command"], arguments.get("cwd"), arguments.get("timeout"))


def needs_network(command: str) -> bool:
    return _NETWORK.search(command) is not None


async def rehearsed(sandbox: Rehearses, command: Command) -> Rehearsal | None:
    """None where it cannot be rehearsed: too large, too many, no means. It is plainly asked then,
    and what is wrong with the call itself shows when it runs."""
    try:
        return await sandbox.rehearse(command.text, timeout=command.timeout, cwd=command.cwd)
    except (BadRequest, Conflict, Unavailable):
        return None
