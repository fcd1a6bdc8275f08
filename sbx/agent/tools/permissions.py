"""Allow, ask or deny: by what a call would do, not by its tool's name. Pure.

In a project a call is made on a copy first, and its changes of files are decided by the setting of
the conversation. Outside one nothing inside the walls needs asking, and with the sandbox off the
operator chose to ask nothing: both are `free`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sbx.agent.tools.rules import COMMAND_TOOL, Rule, matches, subject
from sbx.agent.tools.tool import Arguments, Effect, Permission, Ruling, Tool

Mode = Literal["free", "project"]
_BY_EFFECT: Mapping[Mode, Mapping[Effect, Ruling]] = {
    "free": {"read": "allow", "write": "allow", "code": "allow", "command": "allow"},
    "project": {"read": "allow", "write": "changes", "code": "changes", "command": "changes"},
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

    def of(self, tool: Tool, arguments: Arguments) -> Ruling:
        """Of a call whose arguments fit the tool's schema."""
        ruling = self._asked(tool, arguments)
        # The same code or file is another change next time, so no rule answers for its changes.
        may_be_remembered = ruling == "ask" or (ruling == "changes" and tool.name == COMMAND_TOOL)
        if may_be_remembered and self._remembered(tool, arguments):
            return "allow"
        return ruling

    def _asked(self, tool: Tool, arguments: Arguments) -> Ruling:
        override = self.overrides.get(tool.name)
        if "deny" in (override, tool.permission):
            return "deny"
        if (named := override or tool.permission) is not None:
            return named
        effect = tool.effect(arguments)
        if self.mode == "project" and effect == "command" and not tool.confined:
            return "ask"  # it may act on the host, where no copy shows what it does
        return _BY_EFFECT[self.mode][effect]

    def _remembered(self, tool: Tool, arguments: Arguments) -> bool:
        rules = self.rules()
        if not rules:
            return False
        text = subject(tool.name, arguments)
        return any(matches(rule, text, tool.name) for rule in rules)
