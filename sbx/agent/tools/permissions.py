"""Allow, ask or deny, by the effect of a call and not by the name of its tool. Pure.

In a project a call runs on a copy first, and the setting of the conversation decides about its file
changes. Without a project, calls inside the jail need no approval. With the sandbox off, the
operator chose to allow everything. Both cases are `free`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbx.agent.tools.approval_rules import COMMAND_TOOL, ApprovalRule, matches, subject
from sbx.agent.tools.tool import Arguments, Effect, Permission, Ruling, Tool

Mode = Literal["free", "project"]
_BY_EFFECT: Mapping[Mode, Mapping[Effect, Ruling]] = {
    "free": {"read": "allow", "write": "allow", "code": "allow", "command": "allow"},
    "project": {"read": "allow", "write": "changes", "code": "changes", "command": "changes"},
}


def no_rules() -> Sequence[ApprovalRule]:
    return ()


@dataclass(frozen=True, slots=True)
class Permissions:
    """`rules` is called for each call, because the user may add and revoke rules meanwhile.

    `overrides` are permissions by the name of a tool. They precede the permission of the tool and
    the rules for its effect. But if either of them denies a call, it is denied.
    """

    mode: Mode = "free"
    rules: Callable[[], Sequence[ApprovalRule]] = no_rules
    overrides: Mapping[str, Permission] = field(default_factory=dict)

    def of(self, tool: Tool, arguments: Arguments) -> Ruling:
        """Return the ruling for a call whose arguments fit the schema of the tool."""
        ruling = self._unremembered(tool, arguments)
        # The same code or file can change other files the next time, so no rule can allow its
        # changes.
        may_be_remembered = ruling == "ask" or (ruling == "changes" and tool.name == COMMAND_TOOL)
        if may_be_remembered and self._remembered(tool, arguments):
            return "allow"
        return ruling

    def _unremembered(self, tool: Tool, arguments: Arguments) -> Ruling:
        override = self.overrides.get(tool.name)
        if "deny" in (override, tool.permission):
            return "deny"
        if (named := override or tool.permission) is not None:
            return named
        effect = tool.effect(arguments)
        if self.mode == "project" and effect == "command" and not tool.confined:
            return "ask"  # it may act on the host, where no copy shows its effect
        return _BY_EFFECT[self.mode][effect]

    def _remembered(self, tool: Tool, arguments: Arguments) -> bool:
        rules = self.rules()
        if not rules:
            return False
        text = subject(tool.name, arguments)
        return any(matches(rule, text, tool.name) for rule in rules)
