"""Allow, ask or deny: by what a call would do, not by its tool's name. Pure.

In a project whatever starts a process is a command, by which tool ever: `run_code` is no way round
it. Outside one nothing inside the walls needs asking, and with the sandbox off the operator chose
to ask nothing: both are `free`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbx.agent.tools.rules import Rule, matches, subject
from sbx.agent.tools.tool import Arguments, Effect, Permission, Tool

Mode = Literal["free", "project"]
_BY_EFFECT: Mapping[Mode, Mapping[Effect, Permission]] = {
    "free": {"read": "allow", "write": "allow", "code": "allow", "command": "allow"},
    "project": {"read": "allow", "write": "allow", "code": "allow", "command": "ask"},
}


def no_rules() -> Sequence[Rule]:
    return ()


@dataclass(frozen=True, slots=True)
class Permissions:
    """`rules` are asked for at each call, since a person may add and revoke some meanwhile.

    `overrides` name tools, and go before what a tool says itself and before the rules for its
    effect; but what either denies stays denied.
    """

    mode: Mode = "free"
    rules: Callable[[], Sequence[Rule]] = no_rules
    overrides: Mapping[str, Permission] = field(default_factory=dict)

    def of(self, tool: Tool, arguments: Arguments) -> Permission:
        """Of a call whose arguments fit the tool's schema."""
        permission = self._asked(tool, arguments)
        if permission == "ask" and self._remembered(tool, arguments):
            return "allow"
        return permission

    def _asked(self, tool: Tool, arguments: Arguments) -> Permission:
        override = self.overrides.get(tool.name)
        if "deny" in (override, tool.permission):
            return "deny"
        return override or tool.permission or _BY_EFFECT[self.mode][tool.effect(arguments)]

    def _remembered(self, tool: Tool, arguments: Arguments) -> bool:
        rules = self.rules()
        if not rules:
            return False
        text = subject(tool.name, arguments)
        return any(matches(rule, text, tool.name) for rule in rules)
