"""Prefix rules against bash itself: what a rule lets pass is one simple command that begins so.

Each command that matches is run by a real bash which traces what it runs (`-x`), with a PATH on
which there is `probe` and nothing else, in an empty directory.
"""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from sbx.agent.tools.approval_rules import (
    ApprovalRule,
    check_prefix,
    matches,
    rule_for,
    simple_words,
    subject,
)
from sbx.errors import BadRequest
from tests.tiers import examples

PREFIX = ApprovalRule("prefix", "probe run")
PIECES = (
    *(";", "&", "|", "<", ">", "`", "$(", ")", "(", "\n", "\r", "\0", "\t", "\v", "\f", "\x85"),
    *(
        "$",
        "${",
        "}",
        "{",
        "$'",
        '$"',
        "$[",
        "]",
        "[",
        "\\",
        "\\\n",
        "'",
        '"',
        "''",
        '""',
        "#",
        "!",
    ),
    *("~", "*", "?", "=", "A=1 ", "a,b", "^", "%", "@", "+", "-", "--", ":", "/", ".", "..", "x"),
    *(" ", "  ", "\u00a0", "\u2028", "\u200b", "\ud800", "ä", "日", "\x1b", "\x7f"),
    *(
        "probe",
        " run",
        " probe run ",
        "cd /",
        " && ",
        " || ",
        " 2>&1 ",
        "<<E",
        "<(",
        "@(",
        "$((1))",
    ),
    *(
        "time ",
        "! ",
        "exec ",
        "eval ",
        "if ",
        "then ",
        "function f ",
        "coproc ",
        "[[ ",
        "((",
        "true",
    ),
)
# What is allowed somewhere, so that enough is: it is in combination that it might do harm.
MILD = (
    *(" ", "'", '"', "''", '"a', "'b ", "x", "run", "=", "A=1 ", "~", "*", "?", "[a", "]", "^"),
    *("%", "@", "--", "/", '\\"', "$x", "ä", " probe run "),
)
BEGINNINGS = (*(["probe run "] * 5), "probe run", " probe  run ", "probe 'run' ", "A=1 probe run ")
COMMANDS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(BEGINNINGS),
        st.one_of(
            st.lists(st.sampled_from(MILD), max_size=6),
            st.lists(st.one_of(st.sampled_from(PIECES), st.characters()), max_size=5),
        ).map("".join),
    ),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("traced")
    (place / "bin").mkdir()
    (place / "bin" / "probe").symlink_to("/bin/true")
    (place / "cwd").mkdir()
    return place


def traced(place: Path, command: str) -> list[str]:
    """What bash ran for it, a line each, and what it complained of."""
    done = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-x", "-c", command],
        env={"PATH": str(place / "bin"), "HOME": "/nowhere", "LC_ALL": "C.UTF-8", "PS4": "+ "},
        cwd=place / "cwd",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=20,
    )
    return [*done.stderr.decode().splitlines(), *done.stdout.decode().splitlines()]


@settings(max_examples=examples(800), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMANDS)
@example("probe run 'a  b' \"c\" *.txt ~/x @ ! ")
@example("probe run 'it''s' \"\" ''")
@example("probe run =x A=1 ^a^b %1 -- [!a] ?")
def test_a_prefix_lets_pass_one_simple_command_that_begins_so(place: Path, command: str) -> None:
    if not matches(PREFIX, command):
        event("refused")
        return
    event("allowed")
    ran = traced(place, command)
    assert len(ran) == 1, ran
    assert ran[0] == "+ probe run" or ran[0].startswith("+ probe run ")


PLAIN = st.text("abcXYZ019_-./:,+@%=", min_size=1, max_size=8)
QUOTED = st.text("abc .,*?~#!(){}[]=\\", max_size=8).map(lambda text: f"'{text}'")


@settings(max_examples=examples(200))
@given(st.lists(st.one_of(PLAIN, QUOTED), max_size=5))
def test_plain_and_quoted_words_match_and_are_counted_as_bash_counts_them(words: list[str]) -> None:
    command = " ".join(["probe", "run", *words])
    assert matches(PREFIX, command)
    assert simple_words(command) == ("probe", "run", *words)


@given(st.text(max_size=30), st.text(max_size=30))
def test_an_exact_rule_allows_its_own_text_only(kept: str, asked: str) -> None:
    assert matches(ApprovalRule("exact", kept), kept)
    assert matches(ApprovalRule("exact", kept), asked) is (kept == asked)
    assert not matches(ApprovalRule("exact", kept, "run_code"), kept)


@given(COMMANDS)
def test_a_prefix_that_is_taken_matches_itself_and_no_longer_word(text: str) -> None:
    try:
        prefix = check_prefix(text)
    except BadRequest:
        return
    rule = ApprovalRule("prefix", prefix)
    assert matches(rule, prefix)
    assert matches(rule, f"{prefix} more")
    assert not matches(rule, f"{prefix}more")
    assert not matches(rule, f"sudo {prefix}")
    for joined in (";", "&", "|", "\n", "&&", "||", " >", " <", " `x`", " $(x)", " \\\n"):
        assert not matches(rule, f"{prefix}{joined} evil")


ATTACKS = (
    "git status; evil",
    "git status & evil",
    "git status\nevil",
    "git status\revil",
    "git status || evil",
    "git status > .bashrc",
    "git status <(evil)",
    "git status `evil`",
    "git status $(evil)",
    'git status "$(evil)"',
    "git status '$(evil)'",
    "git status ${x:=`evil`}",
    "git status ${x@P}",
    "git status $[a[0]]",
    "git status $'\\x3b' evil",
    "git status \\; evil",
    "git status\\\n; evil",
    "git status # \n evil",
    "git status() { evil; }",
    "git status 'unclosed",
    'git status "unclosed',
    'git status "$IFS"',
    "git status 'a'\"'; evil",
    "git\tstatus",
    "git\u00a0status",
    "git status\0; evil",
    "git status\u2028evil",
    "git status \ud800",
    "PATH=. git status",
    "GIT_SSH_COMMAND=evil git status",
    "env git status",
    "! git status",
    "time git status",
    "{ git status",
    "(git status)",
    "gitk status",
    "git statusx",
    "git 'status'",
    "'git' status",
    "g\\it status",
    "git st''atus",
    "git  sta tus",
    "./git status",
    "git",
    "",
    " ",
    "git status " + "x" * (128 << 10),
)


@pytest.mark.parametrize("command", ATTACKS)
def test_what_is_more_or_other_than_the_prefix_is_asked_again(command: str) -> None:
    assert not matches(ApprovalRule("prefix", "git status"), command)


@pytest.mark.parametrize(
    "command",
    [
        "git status",
        "  git   status  ",
        "git status --short src/*.py ~/x",
        "git status 'a b' \"c's d!\"",
        "git status HEAD^ A=1 -- ä",
    ],
)
def test_further_arguments_are_allowed(command: str) -> None:
    assert matches(ApprovalRule("prefix", "git status"), command)


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "  ", "a;b", "a\nb", "a $x", "a 'b", "A=1 make", "'git' status", "*", "~/x", "%1"),
        *("if true", "time git", "[[ -f", "! git", "coproc x", "function f"),
        *("sudo apt", "env", "/usr/bin/env git", "xargs rm", "eval x", "exec ls", ". x", "find ."),
        *(
            "bash",
            "bash -c",
            "sh -ec",
            "/bin/sh",
            "python",
            "python3 -c",
            "python3.12",
            "node -e",
            "python -m",
        ),
        "awk",
    ],
)
def test_a_prefix_that_names_no_command_is_refused(prefix: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_prefix(prefix)
    assert caught.value.code == "invalid_prefix"
    assert not matches(ApprovalRule("prefix", prefix), f"{prefix} x"), (
        "nor is it heeded where it is stored"
    )


@pytest.mark.parametrize("prefix", ["bash build.sh", "python -m pytest", "python a.py", "npm test"])
def test_a_prefix_that_names_a_script_is_taken(prefix: str) -> None:
    assert check_prefix(f"  {prefix} ") == prefix


def test_a_rule_is_about_the_directory_and_the_tool_too() -> None:
    here = subject("execute_command", {"command": "make", "cwd": "."})
    there = subject("execute_command", {"command": "make", "cwd": "a b", "timeout": 3})
    assert (here, there) == ("make", "cd '/workspace/a b' || exit; make")
    assert not matches(ApprovalRule("prefix", "make"), there)
    for cwd in ("/", "//", "..", "/workspace/..", "/tmp", "./x", " "):
        text = subject("execute_command", {"command": "make", "cwd": cwd})
        assert not matches(ApprovalRule("prefix", "make"), text), cwd
        assert not matches(ApprovalRule("exact", "make"), text), cwd
    code = {"code": "make", "language": "bash"}
    remembered = rule_for("run_code", code, "exact")
    assert matches(remembered, subject("run_code", dict(reversed(code.items()))), "run_code")
    assert not matches(remembered, subject("run_code", {**code, "language": "go"}), "run_code")
    assert not matches(ApprovalRule("exact", "make"), "make", "run_code")


def test_what_is_remembered_of_another_directory_does_nothing_where_that_is_gone() -> None:
    """`cd b && a; rm -rf *` went on in /workspace: it is another command with the same words."""
    text = subject("execute_command", {"command": "true; echo ran", "cwd": "no-such-directory"})
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_prefix_is_bounded() -> None:
    with pytest.raises(BadRequest, match="at most 1000"):
        check_prefix("x" * 1001)


def test_to_remember_a_prefix_takes_one_and_a_command() -> None:
    with pytest.raises(BadRequest) as caught:
        rule_for("execute_command", {"command": "ls"}, "prefix")
    assert caught.value.code == "prefix_missing"
    with pytest.raises(BadRequest, match="have no prefix"):
        rule_for("run_code", {"code": "ls"}, "prefix", "ls")
    rule = rule_for("execute_command", {"command": "ls | wc"}, "prefix", " ls  -l")
    assert rule == ApprovalRule("prefix", "ls -l")
