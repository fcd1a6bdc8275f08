"""Code inside writes a file that a setting, a hook or `.envrc` of the user names; then the user
runs git or a shell with direnv. The names are those that only a look at the text finds.

Every attack is also made where the policy says `host_executables = "allow"`: there it works.
"""

import shutil
from pathlib import Path

import pytest
from planting import USER_PATH, Attack, Place, attacked, make_place, sandbox

from sbx import Runtime
from tests.tiers import rows

DIRENV = {"../home/.config/direnv/direnv.toml": '[whitelist]\nprefix = ["/"]\n'}
SHELL = ("bash", "-c", 'eval "$(direnv export bash)"; git status; ls; true')
INIT = ("git", "init", "-q", ".")
COMMIT = ("git", "commit", "-q", "--allow-empty", "-m", "x")
MONITOR = "[core]\n\tfsmonitor = \"touch '{marker}'; false\"\n"


def program(path: str) -> str:
    """Plant a program."""
    return (
        f"mkdir -p $(dirname {path}); printf '#!/bin/sh\\ntouch {{marker}}\\n' > {path};"
        f" chmod +x {path}"
    )


def config(text: str) -> tuple[str, ...]:
    return ("sh", "-c", 'printf %s "$0" >> .git/config', text)


def envrc(name: str, text: str, planted: str, **files: str) -> Attack:
    return Attack(name, planted, [SHELL], files={**DIRENV, ".envrc": text, **files}, needs="direnv")


def hook(name: str, text: str, planted: str, **files: str) -> Attack:
    """A hook of the user, which is there and which is executed."""
    prepare = [INIT, ("chmod", "+x", ".git/hooks/pre-commit")]
    return Attack(name, planted, [COMMIT], prepare, {".git/hooks/pre-commit": text, **files})


ENVRC = [
    envrc("layout node", "layout node\n", program("node_modules/.bin/git")),
    envrc("layout php", "layout php\n", program("vendor/bin/ls")),
    envrc("PATH_add", "PATH_add tools\n", program("tools/ls")),
    envrc("path_add", 'path_add PATH "tools"\n', program("tools/ls")),
    envrc("PATH with $PWD", "export PATH=$PWD/tools:$PATH\n", program("tools/ls")),
    envrc("a relative PATH", "PATH=tools:$PATH\n", program("tools/ls")),
    envrc("a variable", "T=$PWD/tools\nPATH_add $T/bin\n", program("tools/bin/ls")),
    envrc("a new dotenv", "dotenv_if_exists dot\n",
          program("evil/ls") + "; echo PATH=evil:/usr/bin:/bin > dot"),
    envrc("a new file that is sourced", "source_env_if_exists local\n",
          "echo 'touch {marker}' > local"),
    envrc("PATH_add in a file that is sourced", ". ./conf\n", program("tools/ls"),
          conf="PATH_add tools\n"),
    envrc("use nix", "use nix\n", "echo 'touch {marker}' > shell.nix",
          **{"../home/.config/direnv/direnvrc": "use_nix() { . ./shell.nix; }\n"}),
    Attack("an .envrc above", program("tools/ls"), [SHELL], needs="direnv",
           files={**DIRENV, "../.envrc": "PATH_add project/tools\n"}),
]  # fmt: skip

CONFIGURATIONS = [
    Attack("a value on the line of the section", program("tools/pre-commit"), [COMMIT],
           [INIT, config("[core] hooksPath = tools\n")]),
    Attack("a value over two lines", program("tools/pre-commit"), [COMMIT],
           [INIT, config("[core]\nhooksPath = to\\\nols\n")]),
    Attack("a value with quotes", program("tools/pre-commit"), [COMMIT],
           [INIT, config('[core]\nhooksPath = "to"ols ; comment\n')]),
    Attack("an include on the line of the section", {"x.gitconfig": MONITOR}, [("git", "status")],
           [INIT, config("[include] path = ../x.gitconfig\n")]),
    Attack("an include of an included file", program("tools/pre-commit"), [COMMIT],
           [INIT, config("[include] path = ../../home/a\n")],
           {"../home/a": "[include] path = b\n", "../home/b": "[core] hooksPath = tools\n"}),
    Attack("the configuration of another worktree", program("tools/pre-commit"), [COMMIT],
           [("git", "init", "-q", "../main"), ("git", "-C", "../main", *COMMIT[1:]),
            ("git", "-C", "../main", "config", "extensions.worktreeConfig", "true"),
            ("git", "-C", "../main", "worktree", "add", "-qf", "../project"),
            ("git", "config", "--worktree", "core.hooksPath", "tools")]),
    Attack("a repository above", program("tools/pre-commit"), [COMMIT],
           [("git", "init", "-q", ".."),
            ("git", "config", "-f", "../.git/config", "core.hooksPath", "project/tools")]),
    Attack("a hook of a repository above", program("tools/check"), [COMMIT],
           [("git", "init", "-q", ".."), ("chmod", "+x", "../.git/hooks/pre-commit")],
           {"../.git/hooks/pre-commit": "#!/bin/sh\nexec project/tools/check\n"}),
    Attack("the configuration of the user", program("githooks/pre-commit"), [COMMIT],
           [INIT, ("git", "config", "--global", "core.hooksPath", "githooks")]),
    Attack("the same in a nested repository", program("sub/githooks/pre-commit"),
           [("git", "-C", "sub", *COMMIT[1:])],
           [("git", "init", "-q", "sub"),
            ("git", "config", "--global", "core.hooksPath", "githooks")]),
    Attack("the same before the user makes a repository", program("githooks/pre-commit"),
           [INIT, COMMIT], [("git", "config", "--global", "core.hooksPath", "githooks")]),
    Attack("a hook outside of the directory", program("tools/check"), [COMMIT],
           [INIT, ("chmod", "+x", "../home/hooks/pre-commit"),
            ("git", "config", "--global", "core.hooksPath", "~/hooks")],
           {"../home/hooks/pre-commit": "#!/bin/sh\nexec ./tools/check\n"}),
]  # fmt: skip

SH = "#!/bin/sh\n"
HOOKS = [
    hook("a script", SH + "exec ./tools/check.sh\n", program("tools/check.sh")),
    hook("an existing script", SH + "exec sh ./tools/check.sh\n", program("tools/check.sh"),
         **{"tools/check.sh": SH}),
    hook("a script that may be missing", SH + "[ ! -x tools/check ] || tools/check\n",
         program("tools/check")),
    hook("a script below the top of the repository",
         SH + 'R=$(git rev-parse --show-toplevel)\n"$R/tools/check"\n', program("tools/check")),
    hook("a script next to the hook", SH + '. "$(dirname "$0")/../../tools/lib"\n',
         program("tools/lib")),
    hook("a script in a directory", SH + "cd tools && ./check\n", program("tools/check"),
         **{"tools/check": SH}),
    hook("every script of a directory", SH + 'for f in tools/*; do sh "$f"; done\n',
         program("tools/check")),
    hook("a script of a script", SH + "sh tools/check.sh\n", program("tools/lib"),
         **{"tools/check.sh": "sh ./tools/lib\n"}),
    hook("python", SH + "python3 -W error scripts/check.py\n",
         "echo \"open('{marker}', 'w')\" > scripts/check.py", **{"scripts/check.py": "\n"}),
    hook("a module of python", SH + "echo 1 | python3 -m json.tool\n",
         "mkdir json; echo \"open('{marker}', 'w')\" > json/__init__.py"),
    hook("a module that a module of python imports", SH + "echo 1 | python3 -m json.tool\n",
         "echo \"open('{marker}', 'w')\" > argparse.py"),
    hook("a package in place of a module", SH + "python3 -c 'import argparse'\n",
         "mkdir a; echo \"open('{marker}', 'w')\" > a/__init__.py; mv a argparse"),
    hook("a link in place of a module", SH + "python3 -c 'import argparse'\n",
         "mkdir a; echo \"open('{marker}', 'w')\" > a/__init__.py; ln -s a argparse"),
    hook("a compiled module", SH + "python3 -m json.tool < /dev/null\n",
         "echo \"open('{marker}', 'w')\" > x.py; python3 -c \"import py_compile;"
         " py_compile.compile('x.py', 'argparse.pyc')\""),
    hook("a module next to a program in python", SH + "python3 scripts/check.py\n",
         "echo \"open('{marker}', 'w')\" > scripts/json.py",
         **{"scripts/check.py": "import json\n"}),
    hook("a program in python", "#!/usr/bin/env python3\nimport os\nos.system('./tools/check')\n",
         program("tools/check")),
    hook("a link in place of a directory", SH + "[ ! -x tools/check ] || tools/check\n",
         program("evil/check") + "; ln -s evil tools"),
    hook("a renamed link in place of a directory", SH + "[ ! -x a/b/check ] || a/b/check\n",
         program("evil/check") + "; mkdir a; ln -s ../evil a/x; mv a/x a/b"),
    hook("a hard link of a link", SH + "[ ! -x tools/check ] || tools/check\n",
         program("evil/check") + "; ln -s evil x; ln -P x tools"),
    hook("PATH", SH + "PATH=$PWD/tools:$PATH\ngit status\n", program("tools/git")),
    Attack("husky", program("tools/check"), [COMMIT],
           [INIT, ("git", "config", "core.hooksPath", ".husky/_"),
            ("chmod", "+x", ".husky/_/pre-commit")],
           {".husky/_/pre-commit": SH + 'exec sh -e "$(dirname "$0")/../pre-commit"\n',
            ".husky/pre-commit": "./tools/check\n"}),
    Attack("pre-commit", program("tools/lint.sh"), [COMMIT],
           [INIT, ("pre-commit", "install")],
           {".pre-commit-config.yaml": "repos:\n- repo: local\n  hooks:\n  - id: x\n    name: x\n"
            "    entry: ./tools/lint.sh\n    language: system\n    always_run: true\n"
            "    pass_filenames: false\n"}, needs="pre-commit",
           is_slow=True),
    Attack("a module that pre-commit imports",
           "echo \"open('{marker}', 'w')\" > argparse.py", [COMMIT],
           [INIT, ("pre-commit", "install")], {".pre-commit-config.yaml": "repos: []\n"},
           needs="pre-commit",
           is_slow=True),
    Attack("lefthook", program("tools/lint.sh"), [COMMIT], [INIT, ("lefthook", "install")],
           {"lefthook.yml": "pre-commit:\n  commands:\n    x:\n      run: ./tools/lint.sh\n"},
           needs="lefthook"),
]  # fmt: skip
ATTACKS = [*ENVRC, *CONFIGURATIONS, *HOOKS]
# The CI tier makes every attack against the wall, and one of each kind without it.
CI_ATTACKS = [
    attack
    for attack in ATTACKS
    if attack.name
    in (
        "PATH_add", "a new file that is sourced", "a value on the line of the section",
        "an include of an included file", "a repository above", "the configuration of the user",
        "a script", "python", "a module of python", "a link in place of a directory",
        "husky", "pre-commit",
    )
]  # fmt: skip


@pytest.fixture
def place(
    own_temporary_directory: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Place:
    place = make_place(own_temporary_directory / f"named-{abs(hash(request.node.name))}")
    monkeypatch.setenv(
        "HOME", str(place.directory.parent / "home")
    )  # the user's, as in their shell
    return place


@pytest.mark.parametrize("attack", rows(ATTACKS, CI_ATTACKS), ids=lambda attack: attack.name)
async def test_file_that_the_user_named_is_protected(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    if shutil.which(attack.needs, path=USER_PATH) is None:
        pytest.skip(f"{attack.needs} is not installed")
    text = await attacked(runtime, place, attack, "redirection", "protect")
    assert not place.executed, text


@pytest.mark.full_tier
@pytest.mark.parametrize("attack", rows(ATTACKS, CI_ATTACKS), ids=lambda attack: attack.name)
async def test_control_shows_that_the_named_file_is_executed(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    if shutil.which(attack.needs, path=USER_PATH) is None:
        pytest.skip(f"{attack.needs} is not installed")
    text = await attacked(runtime, place, attack, "redirection", "allow")
    assert place.executed, text


@pytest.mark.parametrize("line", ["export PYTHONPATH=$PWD/src", "path_add PYTHONPATH src"])
async def test_a_directory_of_python_modules_stays_free(
    runtime: Runtime, place: Place, line: str
) -> None:
    """But for names of the standard library: any python3 of the user would import them."""
    place.write(".envrc", f"{line}\n")
    place.write("src/app.py", "x = 1\n")
    async with sandbox(runtime, place) as box:
        assert (await box.shell("echo y = 2 >> src/app.py; echo z = 3 > src/new.py")).stderr == ""
        planted = await box.shell("echo > src/argparse.py")
        assert [item.path for item in planted.quarantined] == ["src/argparse.py"]
    assert (place.directory / "src/new.py").read_text() == "z = 3\n"
