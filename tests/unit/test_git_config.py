"""The syntax of git's configuration files, by whole values."""

import pytest

from sbx.workspace.git_settings import GitSetting, parse

HOOKS = "core.hookspath"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("[core]\n\thooksPath = tools\n", [(HOOKS, "tools")]),
        ("[core] hooksPath = tools\n", [(HOOKS, "tools")]),
        ("[CORE] HOOKSPATH=tools", [(HOOKS, "tools")]),
        ("[core]\nhooksPath = to\\\nols\n", [(HOOKS, "tools")]),
        ("[core]\r\nhooksPath = to\\\r\nols\r\n", [(HOOKS, "tools")]),
        ("[core]\nhooksPath = \\\n  tools\n", [(HOOKS, "tools")]),
        ("[core]\nhooksPath =   a  b   ; comment\n", [(HOOKS, "a  b")]),
        ('[core]\nhooksPath = " a"\\t"b;c" # x\n', [(HOOKS, " a\tb;c")]),
        ("[core]\nhooksPath\n[a] b =\n", [(HOOKS, None), ("a.b", "")]),
        ('[Filter "Li\\"nt.X"] clean = c\n', [('filter.Li"nt.X.clean', "c")]),
        ("[filter.Lint]\nclean = c\n", [("filter.lint.clean", "c")]),
        ("# [core]\n; x = 1\n[core] # y\nx = 1\n", [("core.x", "1")]),
        ("\ufeff[core]\nx = 1\n", [("core.x", "1")]),
        ("[include] path = ../x.gitconfig\n", [("include.path", "../x.gitconfig")]),
        ("[core]\n%%% not git\nhooksPath = tools\n", [(HOOKS, "tools")]),
        ('[core]\nx = "open\nhooksPath = tools\n', [(HOOKS, "tools")]),
        ("", []),
    ],
)
def test_parse_returns_the_settings(text: str, settings: list[tuple[str, str | None]]) -> None:
    assert parse(text) == tuple(GitSetting(*setting) for setting in settings)
