"""What an agent may do: no more through a tool than the token that asks it by its own calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from sbx.agent.sandbox import InProject, ToolSandbox
from sbx.agent.tools.permissions import Permissions
from sbx.agent.tools.tool import Arguments, Effect, Ruling, Tool
from sbx.service.auth import Caller

SCOPE_OF: Mapping[Effect, str] = {
    "read": "files:read",
    "write": "files:write",
    "code": "execute",
    "command": "execute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedPermissions(Permissions):
    """As any, and what `caller` may not do is denied. `box` knows whether a person has allowed the
    commands of this conversation meanwhile."""

    caller: Caller
    box: ToolSandbox

    def of(self, tool: Tool, arguments: Arguments) -> Ruling:
        effect = tool.effect(arguments)
        if not self.caller.may(SCOPE_OF[effect]):
            return "deny"
        ruling = Permissions.of(self, tool, arguments)
        asked = ruling == "changes" or (ruling == "ask" and effect == "command")
        return "allow" if asked and commands_allowed(self.box) else ruling


def commands_allowed(box: ToolSandbox) -> bool:
    return isinstance(box, InProject) and box.commands_allowed
