"""Code inside plants what a program of the host obeys; then the user runs that program.

Every attack is also made where the policy says `host_executables = "allow"`: there it works, which
shows that the test would see it.
"""

import shutil
from pathlib import Path

import pytest
from planting import METHODS, Attack, Place, make_place, sandbox

from sbx import Runtime

pytestmark = pytest.mark.asyncio(loop_scope="module")

MONITOR = "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = \"touch '{marker}'; false\"\n"
HOOK = "#!/bin/sh\ntouch '{marker}'\n"
WHITELIST = '[whitelist]\nprefix = ["/"]\n'
INIT = ("git", "init", "-q", ".")
COMMIT = ("git", "commit", "-q", "--allow-empty", "-m", "x")
EVIL_INIT = (
    "git init -q {where} && git -C {where} config core.fsmonitor \"touch '{{marker}}'; false\""
)

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
    Attack(
        ".bashrc of a directory that is HOME",
        {".bashrc": "touch '{marker}'\n"},
        [("bash", "-c", "HOME=$PWD exec bash -i -c true")],
        needs="bash",
    ),
]  # fmt: skip


@pytest.fixture
def place(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Place:
    return make_place(own_temporary_directory / f"place-{abs(hash(request.node.name))}")


async def attacked(runtime: Runtime, place: Place, attack: Attack, method: str, mode: str) -> str:
    """Prepare, plant inside, and trigger on the host; the output of the sandbox."""
    for path, text in attack.files.items():
        place.write(path, text.replace("{marker}", str(place.marker)))
    for command in attack.prepare:
        words = [word.replace("{marker}", str(place.marker)) for word in command]
        done = place.user(*words, env=attack.env)
        assert done.returncode == 0, (words, done.stderr)
    assert not place.executed
    script = attack.planted_by(METHODS[method], place.marker)
    async with sandbox(runtime, place, mode) as box:
        run = await box.shell(script)
        place_is_used_by_the_user(place, attack)  # while the sandbox lives
    place_is_used_by_the_user(place, attack)
    return run.text


def place_is_used_by_the_user(place: Place, attack: Attack) -> None:
    for command in attack.trigger:
        if Path(place.directory / attack.cwd).is_dir():
            place.user(*command, cwd=attack.cwd, env=attack.env)


def ids(attack: Attack) -> str:
    return attack.name


@pytest.mark.parametrize("attack", ATTACKS, ids=ids)
async def test_host_program_executes_nothing_that_code_planted(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    if shutil.which(attack.needs) is None:
        pytest.skip(f"{attack.needs} is not installed")
    text = await attacked(runtime, place, attack, "redirection", "protect")
    assert not place.executed, text


@pytest.mark.parametrize("attack", ATTACKS, ids=ids)
async def test_control_shows_that_the_attack_works(
    runtime: Runtime, place: Place, attack: Attack
) -> None:
    if shutil.which(attack.needs) is None:
        pytest.skip(f"{attack.needs} is not installed")
    text = await attacked(runtime, place, attack, "redirection", "allow")
    assert place.executed, text
