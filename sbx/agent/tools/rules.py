"""What a person allowed always: one exact call, or every simple command that begins with a prefix.

Pure. A prefix rule is a promise about bash, and who writes the commands may be an attacker. So a
command is read here by a grammar that is much smaller than bash's, and in which both agree: words,
with quotes around plain text. Whatever else bash gives a meaning to makes no match, and the person
is asked again. A prefix allows what its program does with any further arguments: `git` allows
`git -c alias.x='!…' x`, `npm test` whatever package.json says.
"""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from sbx.agent.tools.tool import Arguments
from sbx.errors import BadRequest

COMMAND_TOOL = "execute_command"
PREFIX_MAX = 1000  # characters
_WORKSPACE = (".", "./", "/workspace", "/workspace/")
_COMMAND_MAX = 128 << 10  # characters; bash takes no longer argument

# Nowhere in a command, quoted or not: what joins commands, redirects, expands to other commands.
_NEVER = frozenset(";&|<>`")
_NEVER_PAIRS = ("$(", "${", "$[")
# Not outside quotes: expansions, escapes, grouping, functions, comments, negation, history.
_NEVER_PLAIN = frozenset("$\\(){}#!")
_NEVER_IN_DOUBLE = frozenset("$\\")

_RESERVED = (
    "if then elif else fi time for in until while do done case esac coproc select function [[ ]]"
)
# They can run whatever their arguments say, so that a prefix of them would name nothing.
_RUNNERS = (
    ". alias awk builtin busybox chroot chrt command compgen complete doas enable env eval exec fc"
    " fd find flock gawk hash ionice ltrace mapfile mawk nice nohup nsenter parallel pkexec"
    " readarray runuser script setpriv setsid source ssh start-stop-daemon stdbuf strace su sudo"
    " systemd-run taskset timeout trap unshare watch xargs"
)
_INTERPRETER = re.compile(
    r"(ash|bash|csh|dash|fish|ksh|mksh|rbash|sh|tcsh|zsh"
    r"|(python|pypy|perl|ruby|php|lua|node|nodejs|bun|deno|tclsh)[0-9.]*|ipython3?|R|Rscript)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`exact`: calls of `tool` whose `subject` is this text; `prefix`: commands that begin with
    these words, spelled the same."""

    kind: Literal["exact", "prefix"]
    text: str
    tool: str = COMMAND_TOOL


def subject(tool: str, arguments: Arguments) -> str:
    """What rules about a call are matched with: a command as one would type it in /workspace, to
    the same effect, and of any other tool all arguments, as JSON."""
    if tool != COMMAND_TOOL:
        return json.dumps(dict(arguments), sort_keys=True, ensure_ascii=False)
    command = str(arguments["command"])
    cwd = str(arguments.get("cwd") or ".")
    if cwd in _WORKSPACE:
        return command
    place = cwd if cwd.startswith("/") else f"/workspace/{cwd}"
    return f"cd {shlex.quote(place)} || exit; {command}"


def rule_for(
    tool: str, arguments: Arguments, remember: Literal["exact", "prefix"], prefix: str | None = None
) -> Rule:
    """The rule that a person asked for with a yes to this call.

    Raises BadRequest `prefix_missing`, and as `check_prefix`.
    """
    if remember == "exact":
        return Rule("exact", subject(tool, arguments), tool)
    if prefix is None or not prefix.strip():
        raise BadRequest(
            "a prefix is to be remembered, and none was given",
            code="prefix_missing",
            hint='give the words that commands may begin with, such as "git status"',
            details={"field": "prefix"},
        )
    if tool != COMMAND_TOOL:
        raise _invalid(f"calls of {tool} have no prefix", 'remember "exact" instead')
    return Rule("prefix", check_prefix(prefix), tool)


def matches(rule: Rule, text: str, tool: str = COMMAND_TOOL) -> bool:
    """Whether the rule allows the call of `tool` whose `subject` is `text`."""
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
    """The prefix, its words one space apart. Raises BadRequest `invalid_prefix` for one that could
    match no simple command, or whose further words would be a command of their own."""
    if len(text) > PREFIX_MAX:
        raise _invalid(f"a prefix has at most {PREFIX_MAX} characters", "name fewer words")
    words = simple_words(text)
    if words is None:
        raise _invalid(
            "a prefix is the plain words that one simple command begins with",
            "leave out ; & | < > ` $ \\ ( ) { } # ! and line breaks",
        )
    if (refusal := _refusal(words)) is not None:
        raise _invalid(*refusal)
    return " ".join(words)


def simple_words(command: str) -> tuple[str, ...] | None:
    """The words of a command as they are spelled, quotes included; None where it is not surely one
    simple command of plain words."""
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
    """No control or format character, no blank but the space, nothing that UTF-8 cannot carry."""
    return command.isprintable() and not _NEVER.intersection(command)


def _refusal(prefix: tuple[str, ...]) -> tuple[str, str] | None:
    """Why these words may not be a prefix, and what to do instead."""
    if not prefix:
        return "the prefix is empty", 'give the words that commands may begin with: "git status"'
    first = prefix[0]
    if any(char in first for char in "'\"=*?[]~^%"):
        return (
            "a prefix begins with the plain name of a program",
            "leave out quotes, patterns and variables before it",
        )
    if first in _RESERVED.split():
        return f"{first} is a word of the shell's own, and no program", "name the program"
    name = first.rpartition("/")[2]
    if name in _RUNNERS.split():
        return (
            f"{name} can run whatever command follows it, so its prefix would allow every command",
            "give the prefix of that command, without what is before it",
        )
    script = prefix[2:] if prefix[1:2] == ("-m",) else prefix[1:]
    if _INTERPRETER.fullmatch(name) and (not script or script[0][0] in "-+'\""):
        return f"a prefix of {name} names the script that it runs", f'such as "{name} build"'
    return None


def _invalid(sentence: str, hint: str) -> BadRequest:
    details: dict[str, Any] = {"field": "prefix"}
    return BadRequest(sentence, code="invalid_prefix", hint=hint, details=details)
