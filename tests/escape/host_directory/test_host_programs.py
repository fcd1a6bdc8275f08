"""Code inside plants what a program of the host obeys; then the user runs that program.

Every attack is also made where the policy says `host_executables = "allow"`: there it works, which
shows that the test would see it.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from planting import USER_PATH, Attack, Place, attacked, make_place

from sbx import Runtime
from sbx.linux import mounts
from tests.tiers import rows

MONITOR = "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = \"touch '{marker}'; false\"\n"
HOOK = "#!/bin/sh\ntouch '{marker}'\n"
WHITELIST = '[whitelist]\nprefix = ["/"]\n'
INIT = ("git", "init", "-q", ".")
COMMIT = ("git", "commit", "-q", "--allow-empty", "-m", "x")
EVIL_INIT = (
    "git init -q {where} && git -C {where} config core.fsmonitor \"touch '{{marker}}'; false\""
)

TOUCH = "open('{marker}', 'w')\n"
TEMPLATE = "{{ cycler.__init__.__globals__.os.system(\"touch '{marker}'\") }}"
CELL = '{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "x"}'
NOTEBOOK = f'{{"cells": [{CELL}], "metadata": {{}}, "nbformat": 4, "nbformat_minor": 5}}'
COMMAND = '{"type": "subprocess.Popen", "args": ["touch", "{marker}"]}'
SETTINGS = '{"preprocessors": {"x": ' + COMMAND + "}}"
PACKAGES = {  # of the tests, for the host's interpreter; see `packages`
    "PYTHONPATH": f"{{packages}}/{Path(sysconfig.get_path('purelib')).relative_to(sys.prefix)}",
    "JUPYTER_PATH": "{packages}/share/jupyter",
}
NBCONVERT = ("python3", "-P", "-m", "nbconvert")


def _template(path: str, to: str) -> Attack:
    return Attack(
        f"the template {path} of nbconvert",
        {path: TEMPLATE},
        [(*NBCONVERT, "--to", to, "a.ipynb")],
        files={"a.ipynb": NOTEBOOK},
        env=PACKAGES,
        needs="nbconvert",
        is_slow=True,
    )


def _module(path: str, *command: str) -> Attack:
    name = f"{path}, {' '.join(command)}"
    return Attack(name, {path: TOUCH}, [command], needs="python3", is_slow=True)


ATTACKS = [
    Attack("a repository", EVIL_INIT.format(where="."), [("git", "status")]),
    Attack(
        "a nested repository",
        EVIL_INIT.format(where="sub/deep"),
        [("git", "-C", "sub/deep", "status")],
    ),
    Attack(
        "a repository in a package",
        EVIL_INIT.format(where="node_modules/left"),
        [("git", "-C", "node_modules/left", "status")],
    ),
    Attack(
        "an alias",
        {".git/config": "[alias]\n\tst = \"!touch '{marker}'\"\n"},
        [("git", "st")],
        [INIT],
    ),
    Attack("the configuration", {".git/config": MONITOR}, [("git", "status")], [INIT]),
    Attack(
        "the configuration of a nested repository",
        {"sub/.git/config": MONITOR},
        [("git", "-C", "sub", "status")],
        [("git", "init", "-q", "sub")],
    ),
    Attack(
        "the configuration of a worktree",
        {".git/config.worktree": MONITOR},
        [("git", "status")],
        [INIT, ("git", "config", "extensions.worktreeConfig", "true")],
    ),
    Attack(
        "a hook",
        "printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > .git/hooks/pre-commit;"
        " chmod +x .git/hooks/pre-commit",
        [COMMIT],
        [INIT],
    ),
    Attack(
        "a disabled hook that is made executable",
        "chmod +x .git/hooks/pre-commit",
        [COMMIT],
        [INIT],
        files={".git/hooks/pre-commit": HOOK},
    ),
    Attack(
        "a common directory",
        "mkdir -p evil/objects evil/refs; cp .git/HEAD evil;"
        " git config -f evil/config core.repositoryformatversion 0;"
        " git config -f evil/config core.fsmonitor \"touch '{marker}'; false\";"
        " printf ../evil > .git/commondir",
        [("git", "status")],
        [INIT],
    ),
    Attack(
        "a directory that is a repository by its content",
        "git init -q --bare lib && git -C lib config core.bare false"
        " && git -C lib config core.worktree . "
        "&& git -C lib config core.fsmonitor \"touch '{marker}'; false\"",
        [("git", "-C", "lib", "status")],
    ),
    Attack(
        "a repository that is put together by renames",
        "mkdir -p lib/a lib/b; printf 'ref: refs/heads/x\\n' > lib/c;"
        " git config -f lib/config core.repositoryformatversion 0;"
        " git config -f lib/config core.bare false; git config -f lib/config core.worktree .;"
        " git config -f lib/config core.fsmonitor \"touch '{marker}'; false\";"
        " mv lib/c lib/HEAD; mv lib/a lib/objects; mv lib/b lib/refs",
        [("git", "-C", "lib", "status")],
    ),
    Attack(
        "a .git file",
        EVIL_INIT.format(where="/tmp/r") + "; cp -r /tmp/r/.git store; echo 'gitdir: store' > .git",
        [("git", "status")],
    ),
    Attack(
        "a .git file of a worktree",
        EVIL_INIT.format(where="/tmp/r") + "; cp -r /tmp/r/.git store;"
        " echo 'gitdir: ../store' > w/.git",
        [("git", "-C", "w", "status")],
        [INIT, COMMIT, ("git", "worktree", "add", "-q", "w")],
    ),
    Attack(
        "the common directory of a worktree",
        "mkdir -p evil/objects evil/refs; cp .git/HEAD evil;"
        " git config -f evil/config core.repositoryformatversion 0;"
        " git config -f evil/config core.fsmonitor \"touch '{marker}'; false\";"
        " printf ../../../evil > .git/worktrees/w/commondir",
        [("git", "-C", "w", "status")],
        [INIT, COMMIT, ("git", "worktree", "add", "-q", "w")],
    ),
    Attack(
        "the repository of a submodule",
        {".git/modules/lib/config": MONITOR.replace("[core]", "[core]\n\tworktree = ../../../lib")},
        [("git", "status")],
        [
            INIT,
            ("git", "init", "-q", "lib"),
            ("git", "-C", "lib", *COMMIT[1:]),
            ("git", "submodule", "--quiet", "add", "./lib"),
            ("git", "submodule", "--quiet", "absorbgitdirs"),
        ],
    ),
    Attack(
        "GIT_DIR of .envrc",
        EVIL_INIT.format(where="/tmp/r") + "; cp -r /tmp/r/.git store;"
        " echo 'export GIT_DIR=$PWD/store GIT_WORK_TREE=$PWD' > .envrc",
        [("direnv", "exec", ".", "git", "status")],
        files={"../home/.config/direnv/direnv.toml": WHITELIST},
        needs="direnv",
    ),
    Attack(
        "names that are options of tar",
        "printf \"touch '{marker}'\" > x.sh; : > ./--checkpoint=1;"
        " : > './--checkpoint-action=exec=sh x.sh'",
        [("sh", "-c", "tar cf ../x.tar *")],
        needs="tar",
    ),
    Attack(
        "a filter that the configuration of the user names",
        {"tools/clean": HOOK + "cat\n"},
        [("git", "add", "x.txt")],
        [INIT, ("git", "config", "filter.lint.clean", "sh tools/clean")],
        files={"tools/clean": "cat\n", ".gitattributes": "*.txt filter=lint\n", "x.txt": "x\n"},
    ),
    Attack(
        "attributes that apply a driver of the user",
        {".gitattributes": "* diff=show\n"},
        [("sh", "-c", "echo 2 > f; git diff")],
        [
            INIT,
            ("git", "config", "diff.show.command", "touch '{marker}'; true"),
            ("git", "add", "f"),
        ],
        files={"f": "1\n"},
    ),
    Attack(
        "a hook in a directory that core.hooksPath names",
        "printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > tools/hooks/pre-commit",
        [COMMIT],
        [
            INIT,
            ("git", "config", "core.hooksPath", "tools/hooks"),
            ("chmod", "+x", "tools/hooks/pre-commit"),
        ],
        files={"tools/hooks/pre-commit": "#!/bin/sh\n"},
    ),
    Attack(
        "such a hook after its directory was renamed",
        "mv tools old; mkdir -p tools/hooks;"
        " printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > tools/hooks/pre-commit;"
        " chmod +x tools/hooks/pre-commit",
        [COMMIT],
        [INIT, ("git", "config", "core.hooksPath", "tools/hooks")],
        files={"tools/hooks/pre-commit": "#!/bin/sh\n"},
    ),
    Attack(
        "the second name of a hook",
        "printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > notes.txt",
        [COMMIT],
        [INIT, ("ln", ".git/hooks/pre-commit", "notes.txt"), ("chmod", "+x", "notes.txt")],
        files={".git/hooks/pre-commit": "#!/bin/sh\n"},
    ),
    Attack(
        "the list of commands of a rebase",
        "mkdir -p .git/rebase-merge; cd .git/rebase-merge; git rev-parse HEAD > onto;"
        " git rev-parse HEAD > orig-head; echo refs/heads/master > head-name; : > interactive;"
        " echo \"exec touch '{marker}'\" > git-rebase-todo; : > done; echo 1 > msgnum;"
        " echo 1 > end",
        [("git", "rebase", "--continue")],
        [INIT, COMMIT],
    ),
    Attack(
        ".envrc",
        {".envrc": "touch '{marker}'\n"},
        [("direnv", "exec", ".", "true")],
        files={"../home/.config/direnv/direnv.toml": WHITELIST},
        needs="direnv",
    ),
    Attack(
        "a file that a link of the user leads to",
        {"config/envrc": "touch '{marker}'\n"},
        [("direnv", "exec", ".", "true")],
        [("ln", "-s", "config/envrc", ".envrc")],
        files={"../home/.config/direnv/direnv.toml": WHITELIST, "config/envrc": ""},
        needs="direnv",
    ),
    Attack(
        "a directory in place of the one that a link of the user leads to",
        "mkdir evil; echo \"touch '{marker}'\" > evil/envrc; mv config old; mv evil config",
        [("direnv", "exec", ".", "true")],
        [("ln", "-s", "config/envrc", ".envrc")],
        files={"../home/.config/direnv/direnv.toml": WHITELIST, "config/envrc": ""},
        needs="direnv",
    ),
    Attack(
        ".exrc",
        {".exrc": "silent !touch '{marker}'\n"},
        [("vim.tiny", "--not-a-term", "-c", "qa!")],
        files={"../home/.vimrc": "set exrc\n"},
        needs="vim.tiny",
    ),
    Attack(
        ".pre-commit-config.yaml",
        {
            ".pre-commit-config.yaml": "repos:\n- repo: local\n  hooks:\n  - id: x\n    name: x\n"
            "    entry: touch '{marker}'\n    language: system\n    always_run: true\n"
            "    pass_filenames: false\n"
        },
        [("git", "commit", "-q", "--allow-empty", "-m", "x")],
        [INIT, ("pre-commit", "install")],
        needs="pre-commit",
        is_slow=True,
    ),
    Attack(
        ".npmrc",
        {
            ".npmrc": "node-options=--require ./tool.js\n",
            "tool.js": "require('fs').writeFileSync('{marker}', '')\n",
        },
        [("npm", "run", "hello")],
        files={"package.json": '{"scripts": {"hello": "node -e 1"}}'},
        needs="npm",
        is_slow=True,
    ),
    Attack(
        "sitecustomize.py",
        {"sitecustomize.py": "open('{marker}', 'w')\n"},
        [("python3", "-c", "1")],
        env={"PYTHONPATH": "."},
        needs="python3",
    ),
    Attack(
        "a .pth file in an environment of the user",
        "P=$(echo .venv/lib/python3*/site-packages);"
        " echo \"import os; open('{marker}', 'w')\" > $P/evil.pth",
        [(".venv/bin/python", "-c", "1")],
        [("python3", "-m", "venv", "--without-pip", ".venv")],
        needs="python3",
    ),
    Attack(
        "an environment that code creates",
        "mkdir -p .venv/bin; printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > .venv/bin/python;"
        " chmod +x .venv/bin/python",
        [("sh", "-c", "[ ! -x .venv/bin/python ] || .venv/bin/python -c 1")],
        needs="sh",
    ),
    Attack(
        ".pdbrc",
        {".pdbrc": "import os\nos.close(os.open('{marker}', os.O_CREAT))\nq\n"},
        [("python3", "-m", "pdb", "main.py")],
        files={"main.py": "print(1)\n"},
        needs="python3",
    ),
    _template("lab/index.html.j2", "html"),
    _template("lab/base.html.j2", "html"),
    _template("base/celltags.j2", "html"),
    _template("markdown/index.md.j2", "markdown"),
    _template("script/script.j2", "script"),
    _template("reveal/index.html.j2", "slides"),
    *(
        Attack(
            f"{path} of nbconvert",
            {path: SETTINGS},
            [(*NBCONVERT, "--to", "html", "a.ipynb")],
            files={"a.ipynb": NOTEBOOK},
            env=PACKAGES,
            needs="nbconvert",
            is_slow=True,
        )
        for path in ("conf.json", "lab/conf.json")
    ),
    Attack(
        "the directory of a template of nbconvert, by a link",
        "mkdir made; echo '" + TEMPLATE.replace("'", "") + "' > made/index.html.j2;"
        " ln -s made lab",
        [(*NBCONVERT, "--to", "html", "a.ipynb")],
        files={"a.ipynb": NOTEBOOK},
        env=PACKAGES,
        needs="nbconvert",
        is_slow=True,
    ),
    _module("keyword.py", "python3", "-m", "pip", "--version"),
    _module("pip/__init__.py", "python3", "-m", "pip", "--version"),
    _module("types/__init__.py", "python3", "-m", "venv", "--help"),
    _module("readline/__init__.py", "python3", "-i"),
    _module("rlcompleter.py", "python3", "-i"),
    _module("nt/_getfullpathname.py", "python3", "-m", "json.tool"),
    _module("org/python/core.py", "python3", "-m", "http.server", "--help"),
    _module("ipykernel_launcher.py", "python3", "-m", "ipykernel_launcher", "--version"),
    _module("notebooks/pip.py", "sh", "-c", "cd notebooks; python3 -m pip --version"),
    Attack(
        "a compiled module",
        "printf \"open('{marker}', 'w')\\n\" > /tmp/x.py; /usr/bin/python3 -c"
        " 'import py_compile; py_compile.compile(\"/tmp/x.py\", \"keyword.pyc\")'",
        [("/usr/bin/python3", "-m", "pip", "--version")],
        needs="/usr/bin/python3",
        is_slow=True,
    ),
    Attack(
        "a package that gets the name of a module",
        "mkdir made; printf \"open('{marker}', 'w')\\n\" > made/__init__.py; mv made keyword",
        [("python3", "-m", "pip", "--version")],
        needs="python3",
        is_slow=True,
    ),
    Attack(
        ".pylintrc",
        {".pylintrc": "[MAIN]\ninit-hook=\"open('{marker}', 'w')\"\n"},
        [("pylint", "main.py")],
        files={"main.py": "print(1)\n"},
        needs="pylint",
    ),
    Attack(
        ".python-version",
        "echo ./tool > .python-version; printf \"#!/bin/sh\\ntouch '{marker}'\\n\" > tool;"
        " chmod +x tool",
        [("uv", "python", "find")],
        needs="uv",
    ),
    Attack(
        "ansible.cfg",
        "printf '[defaults]\\ninventory=./hosts\\n' > ansible.cfg;"
        " printf \"#!/bin/sh\\ntouch '{marker}'; echo {}\\n\" > hosts; chmod +x hosts",
        [("ansible-inventory", "--list")],
        needs="ansible-inventory",
    ),
    Attack(
        ".mvn",
        {".mvn/jvm.config": "-Xlog:gc:file={marker}\n"},
        [("mvn", "--version")],
        needs="mvn",
        is_slow=True,
    ),
    Attack(
        ".bashrc of a directory that is HOME",
        {".bashrc": "touch '{marker}'\n"},
        [("bash", "-c", "HOME=$PWD exec bash -i -c true")],
        needs="bash",
    ),
]  # fmt: skip
# The CI tier runs each program for one name of each kind. test_names.py has each name that is
# protected, in both tiers.
FULL_TIER = (
    "of nbconvert", "types/__init__.py", "pip/__init__.py", "rlcompleter.py", "nt/", "org/",
    "ipykernel_launcher.py",
)  # fmt: skip
CI_ATTACKS = [
    attack
    for attack in ATTACKS
    if "lab/index.html.j2" in attack.name or not any(name in attack.name for name in FULL_TIER)
]


@pytest.fixture(scope="module")
def packages(own_temporary_directory: Path) -> Iterator[Path]:
    """The virtual environment of the tests where the user can reach it, also if it lies in the
    home of root."""
    if os.geteuid() != 0:
        yield Path(sys.prefix)
        return
    shown = own_temporary_directory / "packages"
    shown.mkdir()
    mounts.bind(sys.prefix, str(shown))
    yield shown
    mounts.detach(str(shown))
    shown.rmdir()


@pytest.fixture
def place(own_temporary_directory: Path, packages: Path, request: pytest.FixtureRequest) -> Place:
    top = own_temporary_directory / f"place-{abs(hash(request.node.name))}"
    return replace(make_place(top), packages=packages)


def _skip_without(attack: Attack, place: Place) -> None:
    if attack.needs == "nbconvert":
        minor = "import sys; print(*sys.version_info[:2], sep='.')"
        if place.user("python3", "-c", minor).stdout.strip() != sysconfig.get_python_version():
            pytest.skip("python3 of the host does not run the nbconvert of the tests")
    elif shutil.which(attack.needs, path=USER_PATH) is None:
        pytest.skip(f"{attack.needs} is not installed")


def ids(attack: Attack) -> str:
    return attack.name


@pytest.mark.parametrize("attack", rows(ATTACKS, CI_ATTACKS), ids=ids)
async def test_host_program_executes_nothing_that_code_planted(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    _skip_without(attack, place)
    text = await attacked(runtime, place, attack, "redirection", "protect")
    assert not place.executed, text


@pytest.mark.full_tier
@pytest.mark.parametrize("attack", ATTACKS, ids=ids)
async def test_control_shows_that_the_attack_works(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    _skip_without(attack, place)
    text = await attacked(runtime, place, attack, "redirection", "allow")
    assert place.executed, text
