"""Permission is by effect: no tool is a way round the yes that a change of files needs."""

import json
from typing import Any

import pytest

from sbx.agent.tools.approval_rules import ApprovalRule, Mode, Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Effect, Permission, Ruling, Tool, ToolDefinition

TOOLS = Tools()
CODE: dict[str, Any] = {"code": "1"}
SCRIPT: dict[str, Any] = {"code": "1", "language": "bash"}
COMMAND: dict[str, Any] = {"command": "git status"}
PATH: dict[str, Any] = {"path": "x"}


@pytest.mark.parametrize(
    ("mode", "tool", "arguments", "permission"),
    [
        ("free", "run_code", CODE, "allow"),
        ("free", "run_code", SCRIPT, "allow"),
        ("free", "execute_command", COMMAND, "allow"),
        ("project", "run_code", CODE, "changes"),
        ("project", "run_code", {**CODE, "language": "python"}, "changes"),
        ("project", "run_code", SCRIPT, "changes"),
        ("project", "run_code", {"code": "", "language": "javascript"}, "changes"),
        ("project", "execute_command", COMMAND, "changes"),
        ("project", "read_file", PATH, "allow"),
        ("project", "write_file", PATH, "changes"),
        ("project", "edit_file", PATH, "changes"),
        ("project", "list_files", {}, "allow"),
    ],
)
def test_permission_of_a_built_in_tool(
    mode: Mode, tool: str, arguments: dict[str, Any], permission: Ruling
) -> None:
    assert Permissions(mode).of(TOOLS.get(tool), arguments) == permission


def own(permission: Permission | None, effect: Effect = "command") -> Tool:
    async def act(call: object, arguments: object) -> str:
        return ""

    return Tool(ToolDefinition("own", "", {}), act, lambda _: effect, permission)


def test_a_command_of_a_tool_that_may_act_on_the_host_is_asked_about_before() -> None:
    permissions = Permissions("project")
    assert permissions.of(own(None), {}) == "ask"
    assert permissions.of(own(None, "code"), {}) == "changes"
    assert Permissions().of(own(None), {}) == "allow"


@pytest.mark.parametrize(
    ("said", "override", "permission"),
    [
        (None, None, "ask"),
        ("allow", None, "allow"),
        ("allow", "ask", "ask"),
        ("ask", "allow", "allow"),
        ("deny", "allow", "deny"),
        ("allow", "deny", "deny"),
    ],
)
def test_what_either_denies_stays_denied(
    said: Permission | None, override: Permission | None, permission: Permission
) -> None:
    overrides = {} if override is None else {"own": override}
    assert Permissions("project", overrides=overrides).of(own(said), {}) == permission


def test_a_remembered_rule_turns_ask_into_allow_and_nothing_else() -> None:
    rules = [ApprovalRule("prefix", "git status")]
    permissions = Permissions("project", rules=lambda: rules)
    command = TOOLS.get("execute_command")
    assert permissions.of(command, COMMAND) == "allow"
    assert permissions.of(command, {**COMMAND, "cwd": "elsewhere"}) == "changes"
    assert permissions.of(command, {"command": "git status; rm -r ."}) == "changes"
    script = {"code": "git status", "language": "bash"}
    assert permissions.of(TOOLS.get("run_code"), script) == "changes"
    rules.append(ApprovalRule("exact", json.dumps(script, sort_keys=True), "run_code"))
    assert permissions.of(TOOLS.get("run_code"), script) == "changes", "its changes are asked about"
    denied = Permissions("project", lambda: rules, {"execute_command": "deny"})
    assert denied.of(command, COMMAND) == "deny"
    rules.clear()
    assert permissions.of(command, COMMAND) == "changes", "revoked"
