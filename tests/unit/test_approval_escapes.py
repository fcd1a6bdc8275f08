"""Public escapes by the rules of approvals: commands that a list reads as another command."""

from collections.abc import Iterator
from typing import Any

import pytest

from sbx.agent.tools.approval_rules import ApprovalRule, check_prefix, matches
from sbx.agent.tools.registry import Tools, optional
from sbx.errors import BadRequest

RULES = [ApprovalRule("prefix", text) for text in ("git status", "cat", "ls", "echo", "npm test")]
# CVE-2026-22708: built-ins and variables that change a later command, or this one.
BUILTINS = (
    "export PATH=/tmp/x; git status", "export PATH=/tmp/x && git status", "typeset -x A=1; ls",
    "declare -x LD_PRELOAD=/tmp/x.so\nls", "PATH=/tmp/x git status", "LD_PRELOAD=/tmp/x.so ls",
    "BASH_ENV=/tmp/x bash -c true", "PROMPT_COMMAND=evil ls", "PS4='$(evil)' ls",
    "PAGER=evil git status",
    "GIT_PAGER=evil git status", "GIT_SSH_COMMAND=evil git status", "GIT_DIR=/tmp/x git status",
    "GIT_EXTERNAL_DIFF=evil git status", "env GIT_CONFIG_COUNT=1 git status", "env -i ls",
    "alias ls=evil; ls", "ls() { evil; }; ls", "function ls { evil; }", "hash -p /tmp/x ls; ls",
    "enable -f /tmp/x.so ls", "set -x; ls", "shopt -s expand_aliases; ls", "trap evil EXIT; ls",
    "read -r x; ls", "readonly PATH=/tmp/x; ls", "unset PATH; ls", "IFS=/ ls", "builtin eval ls",
    "command -p ls", "exec ls", ". ./ls", "source ls", "coproc ls", "time ls",
)  # fmt: skip
# Snowflake Cortex: `cat < <(sh …)` and others were not seen by the parser.
SUBSTITUTIONS = (
    "cat < <(sh -c evil)", "cat <(evil)", "cat >(evil)", "cat <<E\n$(evil)\nE", "cat <<'E'\nx\nE",
    "cat <<< $(evil)", "cat <<<x", "ls $(evil)", "ls `evil`", 'ls "$(evil)"', "ls ${x:-$(evil)}",
    "echo $((a[$(evil)]))", "echo $[1+1]", "echo ${!x}", "echo ${x@P}", "eval ls", "ls; eval evil",
    "ls | evil", "ls |& evil", "ls && evil", "ls || evil", "ls & evil", "ls\nevil", "ls\revil",
    "ls \\\n; evil", "ls {a,b}", "ls $'\\x24(evil)'", 'ls $"x"', "ls > ~/.bashrc", "ls 2>/tmp/x",
    "ls &> x", "! ls", "[[ -f ls ]]", "((x=ls))", "(ls)", "{ ls; }", "ls !!", "ls #\nevil",
    "ls\x0bevil", "ls\u2028evil", "ls\0evil", "l\\s", "'ls", 'ls "', "l''s", "ls\u200b",
)  # fmt: skip
# Ona: other spellings of the path of a program.
SPELLINGS = (
    "/proc/self/root/usr/bin/ls", "/proc/self/cwd/ls", "/proc/1/root/bin/ls", "/dev/fd/3 ls",
    "/lib64/ld-linux-x86-64.so.2 /bin/ls", "/lib/ld-linux-aarch64.so.1 ls", "ld.so ls", "/bin/ls",
    "/usr/bin/../bin/ls", "//bin/ls", "./ls", "../ls", "~/ls", "LS", "ls.", "ls/", "busybox ls",
    "toybox ls", "python3 -c 'import os'", "perl -e ls", "node -e ls", "awk BEGIN{system(ls)}",
    "sh -c ls", "bash -c ls", "bash -s ls", "find . -exec ls", "xargs ls", "setarch x86_64 ls",
)  # fmt: skip


@pytest.mark.parametrize("command", [*BUILTINS, *SUBSTITUTIONS, *SPELLINGS])
def test_a_command_with_another_meaning_is_asked_about_again(command: str) -> None:
    assert not any(matches(rule, command) for rule in RULES)


NO_PREFIX = (
    "alias", "hash", "enable", "trap", "eval", "exec", "builtin", "command", ".", "source", "env",
    "PATH=x ls",
    "/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1 /bin/ls", "ld.so", "ld-2.31.so",
    "/proc/self/exe", "/proc/self/root/usr/bin/git", "/dev/fd/3", "busybox", "toybox", "setarch",
    "linux64", "gdb", "tmux", "screen", "bwrap", "fakeroot", "prlimit", "python3 -c", "perl -e",
    "bash -c", "bash", "sh", "node -e", "awk", "find", "xargs", "sudo", "nice",
    "//proc/self/exe", "/dev/../proc/self/exe", "../proc/self/exe", "./../proc/1/exe", "/dev//fd/3",
    "uv run", "uv run --quiet", "poetry run", "npm exec", "pnpm dlx", "bun x", "deno eval", "npx",
    "npx -c", "uvx", "go run", "bash5 -c", "python3.11-dbg -c", "julia -e", "yash", "choom", "perf",
    "systemd-inhibit", "logsave", "ssh-agent", "x86_64", "hyperfine", "dbus-run-session",
    "start-stop-daemon",
)  # fmt: skip


@pytest.mark.parametrize("prefix", NO_PREFIX)
def test_a_prefix_that_would_run_any_command_is_refused(prefix: str) -> None:
    """The loader, links of /proc and some built-ins were taken as prefixes."""
    with pytest.raises(BadRequest):
        check_prefix(prefix)
    assert not matches(ApprovalRule("prefix", prefix), f"{prefix} evil")


ORDINARY = (
    "pytest", "git status", "npm test", "npm run build", "make", "ls", "cargo test", "go build",
    "uv run pytest", "uv run --quiet pytest", "poetry run pytest", "npx prettier", "bun test",
    "python -m pytest", "python3 manage.py test", ".venv/bin/python -m pytest", "go test ./...",
    "/usr/bin/git status", "./gradlew test", "./scripts/test", "bundle exec rspec", "deno test",
    "conda run -n x pytest", "bash scripts/x.sh", "julia run.jl", "../tools/check",
)  # fmt: skip


@pytest.mark.parametrize("prefix", ORDINARY)
def test_an_ordinary_prefix_is_taken(prefix: str) -> None:
    assert check_prefix(prefix) == prefix
    assert matches(ApprovalRule("prefix", prefix), f"{prefix} -q")


def properties(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from properties(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from properties(part)


def test_no_argument_of_a_tool_chooses_the_walls() -> None:
    """Snowflake Cortex, Claude Code: the model itself could ask for a run without a sandbox."""
    tools = (*Tools(), *optional())
    assert len(tools) >= 7
    names = {name for tool in tools for name in properties(tool.definition.parameters)}
    assert names == {
        "code", "command", "content", "cwd", "language", "limit", "new_string", "offset",
        "old_string", "path", "pattern", "replace_all", "state", "steps", "text", "timeout",
    }  # fmt: skip
    assert all(tool.definition.parameters["additionalProperties"] is False for tool in tools)
