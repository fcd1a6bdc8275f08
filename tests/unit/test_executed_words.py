"""Which words of hooks and their configuration name something to execute, by whole values."""

import pytest

from sbx.workspace.executed_words import (
    Mention,
    envrc_mentions,
    hook_configuration_mentions,
    script_mentions,
)


def mentions(*pairs: str) -> list[Mention]:
    """Mentions from `kind word`."""
    return [Mention(*pair.split(" ", 1)) for pair in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./tools/check.sh a/b", ["program ./tools/check.sh"]),
        ("A=1 exec tools/check", ["program tools/check"]),
        ("env -i A=1 tools/x", ["program tools/x"]),
        ("python3 -W error s/c.py x", ["option error", "script s/c.py"]),
        ("python -m a.b c", ["module a.b"]),
        ("python -mpre_commit run", ["module pre_commit"]),
        ("node --require ./h.js -r ./i.js m.js", ["option ./h.js", "option ./i.js", "script m.js"]),
        ("node --import=./h.js m.js", ["option ./h.js", "script m.js"]),
        ("bash -eo pipefail c.sh x", ["option pipefail", "script c.sh"]),
        ("awk -f a/b.awk x; sed s/a/b/ x", ["option a/b.awk"]),
        ("uv run python s/c.py", ["script s/c.py"]),
        ("sh -c './a b'", ["program ./a"]),
        ("python -c 'run(\"./a\")'", ["code run", "code ./a", "module "]),
        ("python -I c.py x", ["script c.py"]),
        ("ruby -I lib c.rb x", ["option lib", "script c.rb"]),
        (". tools/lib", ["script tools/lib"]),
        ("PATH=tools:$PATH", ["directory tools", "directory $PATH"]),
        ("PATH=node_modules/.bin:$PATH", ["directory $PATH"]),
        ("#!/bin/sh -e\n./a", ["program ./a"]),
        ("#!/usr/bin/env -S bash -e\n./a", ["program ./a"]),
        ("#!/bin/python3\nrun('./a')", ["code #", "code /bin/python3", "code run", "code ./a"]),
        ("npm test", []),
        ("pytest tests && ruff check src/a.py", []),
    ],
)
def test_of_script_returns_what_is_executed(text: str, expected: list[str]) -> None:
    assert [one for one in script_mentions(text)[0] if counts(one)] == mentions(*expected)


def counts(mention: Mention) -> bool:
    """Whether the mention is more than a word of a command that is executed from PATH."""
    return mention.kind != "word" and (mention.kind != "program" or "/" in mention.word)


def test_of_script_returns_the_directories_of_cd() -> None:
    assert script_mentions("cd a && ./b\npushd c/d\ncd $X")[1] == ["a", "c/d"]


@pytest.mark.parametrize(
    "text",
    [
        "  - id: x\n    entry: ./tools/lint.sh\n    language: system\n",
        "  - entry: ./tools/lint.sh\n    id: src/a\n",
        "    entry: './tools/lint.sh'\n",
        "    entry: >-\n      ./tools/lint.sh\n      --all\n    files: ^src/\n",
        "    entry:\n      ./tools/lint.sh\n",
        "- {id: x, entry: ./tools/lint.sh, language: system}\n",
        "run: |\n  set -e\n  ./tools/lint.sh\n",
        '{"a": {"run": "npm x"}, "b": {"run": "./tools/lint.sh"}}',
        'run = "./tools/lint.sh"\n',
        'run = """\n./tools/lint.sh\n"""\n',
        "entry: bash -c './tools/lint.sh \"$@\"' --\n",
    ],
)
def test_of_hook_configuration_returns_the_command(text: str) -> None:
    programs = [one.word for one in hook_configuration_mentions(text) if one.kind == "program"]
    assert [word for word in programs if "/" in word] == ["./tools/lint.sh"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("args: [tools/x.py, --fix]\n", ["code tools/x.py", "code --fix"]),
        ("    args:\n    - tools/x.py\n    files: src/a.py\n", ["code -", "code tools/x.py"]),
        ("rc: ./rc\n", ["path ./rc"]),
        ("additional_dependencies: [numpy, ./tools/plugin]\n", ["path ./tools/plugin"]),
        ("# entry: ./a\nfiles: ^src/\nexclude: tests/a.py\n", []),
    ],
)
def test_of_hook_configuration_returns_other_files(text: str, expected: list[str]) -> None:
    assert list(hook_configuration_mentions(text)) == mentions(*expected)


@pytest.mark.parametrize(
    ("text", "directories"),
    [
        ("PATH_add a b/c\n", ["a", "b/c"]),
        ("path_add PATH a\n", ["PATH", "a"]),
        ("layout node\nlayout php\n", ["node_modules/.bin", "vendor/bin"]),
        ("layout_node\nuse flake\n", ["node_modules/.bin", "flake.nix", "flake.lock"]),
        ('PATH_add "$(expand_path a)"\n', ["$(expand_path a)", "a"]),
        ("export VIRTUAL_ENV=env\n", ["env"]),
        ("export DEBUG=1\nlayout python3\n", []),
    ],
)
def test_of_envrc_returns_directories(text: str, directories: list[str]) -> None:
    found = {one.word for one in envrc_mentions(text)[0] if one.kind == "directory"}
    assert found == {*directories}


@pytest.mark.parametrize(
    "text", ["export PYTHONPATH=$PWD/src:lib\n", "path_add PYTHONPATH '$PWD/src' lib\n"]
)
def test_of_envrc_keeps_directories_of_python_free_but_for_modules_of_python(text: str) -> None:
    found = {tuple(one) for one in envrc_mentions(text)[0] if one.word in ("./src", "lib")}
    assert found - {("word", "./src"), ("word", "lib")} == {
        ("imports", "./src"),
        ("imports", "lib"),
    }


def test_of_envrc_returns_the_files_that_it_sources() -> None:
    assert envrc_mentions("source_env a\n. ./b\nsource_env_if_exists c/d\n")[1] == [
        "a",
        "./b",
        "c/d",
    ]
