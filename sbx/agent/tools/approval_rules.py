"""The permissions of tool calls, and the rules that the user created for them. Pure.

`Permissions` decides by the effect of a call and not by the name of its tool. In a project a call
runs on a copy first, and the setting of the conversation decides about its file changes. A project
with `ask_commands` asks before each command and each cell instead. Without a project, calls inside
the jail need no approval. With the sandbox off, the operator chose to allow everything. The last
two cases are `free`.

A rule covers one exact call, or every simple command that begins with a prefix. A prefix rule is a
promise about bash, and an attacker may write the commands. So this module reads a command by a much
smaller grammar than that of bash, on which both agree: words, with quotes around plain text. Any
other syntax with a meaning in bash does not match, and the user is asked again. A prefix allows
everything that its program does with further arguments: `git` allows `git -c alias.x='!…' x`, and
`npm test` allows any script in package.json.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field

from sbx.agent.tools.tool import Arguments, Effect, Permission, Ruling, Tool
from sbx.errors import BadRequest
from sbx.protocol.approvals import RuleKind

COMMAND_TOOL = "execute_command"
PREFIX_MAX = 1000  # characters
RULE_MAX = 16 << 10
_WORKSPACE = (".", "./", "/workspace", "/workspace/")
_COMMAND_MAX = 128 << 10  # characters; the limit of an argument of bash

# Forbidden everywhere, also in quotes: separators, redirections and substitutions of commands.
_NEVER = frozenset(";&|<>`")
_NEVER_PAIRS = ("$(", "${", "$[")
# Forbidden outside quotes: expansions, escapes, grouping, functions, comments, negation, history.
_NEVER_PLAIN = frozenset("$\\(){}#!")
_NEVER_IN_DOUBLE = frozenset("$\\")

_RESERVED = (
    "if then elif else fi time for in until while do done case esac coproc select function [[ ]]"
)
# These run the command in their arguments, so a prefix would not limit anything.
_RUNNERS = (
    ". alias awk builtin busybox bwrap capsh catchsegv cgexec choom chpst chronic chroot chrt"
    " command compgen complete coresched daemonize dbus-launch dbus-run-session doas dumb-init"
    " eatmydata enable entr env eval exec expect faketime fakeroot fc fd find firejail flock"
    " gawk gdb gdbserver gosu hash heaptrack hyperfine i386 ifne ionice linux32 linux64 lldb"
    " logsave ltrace mapfile mawk mpiexec mpirun nice nohup nsenter numactl parallel perf"
    " pkexec prlimit proot proxychains proxychains4 readarray rlwrap rr run0 runcon runuser"
    " screen script setarch setpriv setsid setuidgid sg softlimit source srun ssh ssh-agent"
    " sshpass start-stop-daemon stdbuf strace su su-exec sudo systemd-cat systemd-inhibit"
    " systemd-nspawn systemd-run taskset timeout tini tmux torify torsocks toybox trap"
    " uclampset uname26 unbuffer unshare valgrind watch watchexec x86_64 xargs xvfb-run"
)
# The loader runs the program in its arguments, and a link of /proc leads to any program.
_LOADER = re.compile(r"ld(-[a-z0-9_-]+)?([.-][0-9.]+)?\.so(\.[0-9]+)?")
_MAGIC_LINKS = ("/proc/", "/dev/")
_INTERPRETER = re.compile(
    r"((ash|bash|csh|dash|elvish|fish|ksh|mksh|nu|osh|posh|pwsh|rbash|sh|tcsh|xonsh|yash|zsh"
    r"|python|pypy|perl|ruby|php|lua|node|nodejs|bun|deno|tclsh|wish|guile|julia|ocaml|ipython"
    r")[0-9.]*(-dbg)?|R|Rscript|tsx|ts-node|npx|pnpx|bunx|uvx)"
)
# These run the program that the next word names.
_RUN = re.compile(
    r"(uv|pipx|poetry|pipenv|pdm|hatch|rye|pixi|conda|mamba|micromamba|bun|deno|go) run"
    r"|(npm|pnpm|yarn|bundle|direnv|mise|asdf) exec|(pnpm|yarn) dlx|bun x|deno eval"
)


class ApprovalRule(Struct, frozen=True):
    """`exact` matches calls of `tool` whose `subject` is this text. `prefix` matches commands that
    begin with exactly these words."""

    kind: Literal["exact", "prefix"]
    text: str
    tool: str = COMMAND_TOOL


def subject(tool: str, arguments: Arguments) -> str:
    """Return the text that rules about a call are matched against. For a command it is an
    equivalent command line in /workspace. For other tools it is all arguments as JSON."""
    if tool != COMMAND_TOOL:
        return json.dumps(dict(arguments), sort_keys=True, ensure_ascii=False)
    command = str(arguments["command"])
    cwd = str(arguments.get("cwd") or ".")
    if cwd in _WORKSPACE:
        return command
    place = cwd if cwd.startswith("/") else f"/workspace/{cwd}"
    return f"cd {shlex.quote(place)} || exit; {command}"


def rule_kinds(tool: str, arguments: Arguments) -> tuple[RuleKind, ...]:
    """Return the kinds of rules that can allow further calls like this one."""
    exact: tuple[RuleKind, ...] = ("exact",) if len(subject(tool, arguments)) <= RULE_MAX else ()
    return (*exact, "prefix") if tool == COMMAND_TOOL else exact


def rule_for(
    tool: str, arguments: Arguments, remember: Literal["exact", "prefix"], prefix: str | None = None
) -> ApprovalRule:
    """Return the rule that the user requested when approving this call.

    Raise BadRequest `prefix_missing`, and the errors of `check_prefix`.
    """
    if remember == "exact":
        return ApprovalRule("exact", subject(tool, arguments), tool)
    if prefix is None or not prefix.strip():
        raise BadRequest(
            'remember is "prefix", but there is no prefix',
            code="prefix_missing",
            hint='give the words that commands may begin with, such as "git status"',
            details={"field": "prefix"},
        )
    if tool != COMMAND_TOOL:
        raise _invalid(f"calls of {tool} have no prefix", 'remember "exact" instead')
    return ApprovalRule("prefix", check_prefix(prefix), tool)


def matches(rule: ApprovalRule, text: str, tool: str = COMMAND_TOOL) -> bool:
    """Return whether the rule allows the call of `tool` whose `subject` is `text`."""
    if rule.tool != tool:
        return False
    if rule.kind == "exact":
        return rule.text == text
    if tool != COMMAND_TOOL:
        return False
    prefix, words = simple_words(rule.text), simple_words(text)
    if prefix is None or words is None or _refusal(prefix) is not None:
        return False
    return words[: len(prefix)] == prefix


def check_prefix(text: str) -> str:
    """Return the prefix with single spaces between its words. Raise BadRequest `invalid_prefix`
    for a prefix that cannot match a simple command, or whose further words would be a separate
    command."""
    if len(text) > PREFIX_MAX:
        raise _invalid(f"a prefix may have at most {PREFIX_MAX} characters", "name fewer words")
    words = simple_words(text)
    if words is None:
        raise _invalid(
            "a prefix must be the plain first words of one simple command",
            "leave out ; & | < > ` $ \\ ( ) { } # ! and line breaks",
        )
    if (refusal := _refusal(words)) is not None:
        raise _invalid(*refusal)
    return " ".join(words)


def simple_words(command: str) -> tuple[str, ...] | None:
    """Return the words of a command as written, including quotes. Return None if it is not
    certainly one simple command of plain words."""
    if len(command) > _COMMAND_MAX or not _is_plain_text(command):
        return None
    if any(pair in command for pair in _NEVER_PAIRS):
        return None
    words: list[str] = []
    word = ""
    quote = ""
    for char in command:
        if quote:
            if quote == '"' and char in _NEVER_IN_DOUBLE:
                return None
            if char == quote:
                quote = ""
        elif char in _NEVER_PLAIN:
            return None
        elif char in "'\"":
            quote = char
        elif char == " ":
            if word:
                words.append(word)
            word = ""
            continue
        word += char
    if quote:
        return None
    if word:
        words.append(word)
    return tuple(words)


def _is_plain_text(command: str) -> bool:
    """Return whether the command has no control or format character, no blank except the space, and
    no character that UTF-8 cannot encode."""
    return command.isprintable() and not _NEVER.intersection(command)


def _refusal(prefix: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the reason why these words cannot be a prefix, and a hint. Return None if they can."""
    if not prefix:
        return "the prefix is empty", 'give the words that commands may begin with: "git status"'
    first = prefix[0]
    if any(char in first for char in "'\"=*?[]~^%"):
        return (
            "a prefix must begin with the plain name of a program",
            "leave out quotes, patterns and variables before it",
        )
    if first in _RESERVED.split():
        return f"{first} is a reserved word of the shell, not a program", "name the program"
    name = first.rpartition("/")[2]
    if "/" in first and _in_workspace(first).startswith(_MAGIC_LINKS):
        return f"{first} can lead to any program", "name the program itself"
    if name in _RUNNERS.split() or _LOADER.fullmatch(name):
        return (
            f"{name} can run any command that follows it, so its prefix would allow every command",
            "give the prefix of that command, without the words before it",
        )
    if _RUN.fullmatch(f"{name} {''.join(prefix[1:2])}") and all(w[0] == "-" for w in prefix[2:]):
        return f"{name} {prefix[1]} can run any program", "name the program, too"
    script = prefix[2:] if prefix[1:2] == ("-m",) else prefix[1:]
    if _INTERPRETER.fullmatch(name) and (not script or script[0][0] in "-+'\""):
        return f"a prefix of {name} must name the script", f'such as "{name} build"'
    return None


def _in_workspace(path: str) -> str:
    return "/" + posixpath.normpath(posixpath.join("/workspace", path)).lstrip("/")


def _invalid(sentence: str, hint: str) -> BadRequest:
    details: dict[str, Any] = {"field": "prefix"}
    return BadRequest(sentence, code="invalid_prefix", hint=hint, details=details)


# -- permissions -----------------------------------------------------------------------------------

Mode = Literal["free", "project", "ask_commands"]
_BY_EFFECT: Mapping[Mode, Mapping[Effect, Ruling]] = {
    "free": {"read": "allow", "write": "allow", "code": "allow", "command": "allow"},
    "project": {"read": "allow", "write": "changes", "code": "changes", "command": "changes"},
    "ask_commands": {
        "read": "allow",
        "write": "changes",
        "code": "ask_first",
        "command": "ask_first",
    },
}


def no_rules() -> Sequence[ApprovalRule]:
    return ()


class Permissions(Struct, frozen=True):
    """`rules` is called for each call, because the user may add and revoke rules meanwhile.

    `overrides` are permissions by the name of a tool or of its source. They precede the permission
    of the tool and the rules for its effect. But if either of them denies a call, it is denied.
    """

    mode: Mode = "free"
    rules: Callable[[], Sequence[ApprovalRule]] = no_rules
    overrides: Mapping[str, Permission] = field(default_factory=dict)

    def of(self, tool: Tool, arguments: Arguments) -> Ruling:
        """Return the ruling for a call whose arguments fit the schema of the tool."""
        ruling = self._unremembered(tool, arguments)
        # The same code or file can change other files the next time, so no rule can allow its
        # changes.
        may_be_remembered = ruling in ("ask", "ask_first") or (
            ruling == "changes" and tool.name == COMMAND_TOOL
        )
        if may_be_remembered and self._remembered(tool, arguments):
            return "allow"
        return ruling

    def _unremembered(self, tool: Tool, arguments: Arguments) -> Ruling:
        override = self.overrides.get(tool.name) or self.overrides.get(tool.source or "")
        if "deny" in (override, tool.permission):
            return "deny"
        if (named := override or tool.permission) is not None:
            return named
        effect = tool.effect(arguments)
        if self.mode != "free" and effect == "command" and not tool.confined:
            return "ask"  # it may act on the host, where no copy shows its effect
        return _BY_EFFECT[self.mode][effect]

    def _remembered(self, tool: Tool, arguments: Arguments) -> bool:
        rules = self.rules()
        if not rules:
            return False
        text = subject(tool.name, arguments)
        return any(matches(rule, text, tool.name) for rule in rules)
