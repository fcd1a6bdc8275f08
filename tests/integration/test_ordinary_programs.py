"""Ordinary programs of developers in a sandbox with the default policy.

These are git, installers of packages, the programs of a virtual environment and pools.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command import in_process

from sbx import Runtime
from sbx.runtime.run.notes import NO_INTERPRETER, NO_REPOSITORY

Make = Callable[[Path, Path], tuple[Path, Path]]

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git on this host")


def git(*words: str | Path) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit, which every user may read."""
    path = tmp_path / "main"
    git("init", "-q", path)
    (path / "a").write_text("a")
    git("-C", path, "add", "a")
    git("-C", path, "commit", "-qm", "first")
    return path


@needs_git
@pytest.mark.unprivileged
async def test_git_has_an_identity_that_settings_of_the_user_replace(runtime: Runtime) -> None:
    commit = "git commit -q --allow-empty -m x && git log -1 --format='%an <%ae>'"
    settings = (
        "git init -q /tmp/r && cd /tmp/r",
        commit,
        "git config --global user.name A && git config --global user.email a@example.org",
        commit,
        "git config user.name B",
        commit,
        "export GIT_AUTHOR_NAME=C",
        commit,
    )
    async with await runtime.create("default") as box:
        run = await box.shell("\n".join(settings))
    expected = ["sandbox <sandbox@localhost>", "A <a@example.org>", "B <a@example.org>"]
    assert run.stdout.splitlines() == [*expected, "C <a@example.org>"], run.stderr


@needs_git
@pytest.mark.unprivileged
async def test_git_reads_a_mounted_repository_of_another_user(
    runtime: Runtime, repository: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "mounting.toml"
    policy.write_text(
        'schema = 1\nextends = "default"\n[[filesystem.mount]]\n'
        f'source = "{repository}"\ntarget = "/srv/repository"\n'
    )
    async with await runtime.create(policy) as box:
        run = await box.shell("git -C /srv/repository log --format=%s")
    assert (run.stdout, run.stderr) == ("first\n", "")


@pytest.mark.unprivileged
@pytest.mark.parametrize(
    "command", ["pip install a", "npm install a", "uv pip install -t /tmp/u a"]
)
async def test_an_installer_fails_fast_without_a_network(runtime: Runtime, command: str) -> None:
    async with await runtime.create("default") as box:
        if (await box.shell(f"command -v {command.split()[0]}")).exit_code:
            pytest.skip(f"no {command.split()[0]} in this environment")
        run = await box.shell(f"cd /tmp && {command}", timeout=60)
        assert run.exit_code, run.text
        assert run.duration_s < 8, run.text  # with retries 9 s to 80 s


def worktree(main: Path, top: Path) -> tuple[Path, Path]:
    git("-C", main, "worktree", "add", "-q", top / "tree")
    return top / "tree", main / ".git"


def shared_clone(main: Path, top: Path) -> tuple[Path, Path]:
    git("clone", "-q", "--shared", main, top / "clone")
    return top / "clone", main / ".git/objects"


def subdirectory(main: Path, top: Path) -> tuple[Path, Path]:
    (main / "sub").mkdir()
    return main / "sub", main


def submodule(main: Path, top: Path) -> tuple[Path, Path]:
    git("init", "-q", top / "super")
    words = ("-c", "protocol.file.allow=always", "-C", top / "super", "submodule", "add", "-q")
    git(*words, main, "module")
    return top / "super/module", top / "super/.git/modules/module"


def separate(main: Path, top: Path) -> tuple[Path, Path]:
    git("clone", "-q", "--separate-git-dir", top / "apart", main, top / "work")
    return top / "work", top / "apart"


def link(main: Path, top: Path) -> tuple[Path, Path]:
    (top / "linked").mkdir()
    (top / "linked/.git").symlink_to(main / ".git")
    return top / "linked", main / ".git"


@needs_git
@pytest.mark.unprivileged
@pytest.mark.parametrize("make", [worktree, shared_clone, subdirectory, submodule, separate, link])
async def test_a_repository_outside_of_the_workspace_is_named(
    runtime: Runtime, repository: Path, tmp_path: Path, make: Make
) -> None:
    workspace, outside = make(repository, tmp_path)
    async with await runtime.create("default", workspace=workspace) as box:
        assert len(box.notes) == 1
        assert f"it needs {outside}, which the sandbox does not see" in box.notes[0]
        run = await box.shell("git log")
        assert run.exit_code
        assert run.stderr.endswith(NO_REPOSITORY)
        assert str(outside) not in NO_REPOSITORY


@needs_git
@pytest.mark.unprivileged
async def test_a_repository_within_the_workspace_has_no_note(
    runtime: Runtime, repository: Path
) -> None:
    async with await runtime.create("default", workspace=repository) as box:
        assert box.notes == ()
        run = await box.shell("git log --format=%s; git -C /tmp log")
    assert (run.stdout, NO_REPOSITORY in run.stderr) == ("first\n", False)


@needs_git
def test_the_command_line_names_what_is_outside(repository: Path, tmp_path: Path) -> None:
    workspace, outside = worktree(repository, tmp_path)
    (workspace / "data").symlink_to(tmp_path)
    (workspace / "bin").symlink_to("/usr/bin")
    done = in_process("run", "--workspace", str(workspace), "-c", "1")
    assert f"it needs {outside}, which the sandbox does not see" in done.stderr
    assert f"data in {workspace} leads to {tmp_path}" in done.stderr
    assert done.stderr.count("note:") == 2  # the sandbox has /usr/bin


@pytest.mark.unprivileged
@pytest.mark.parametrize("way", ["bash", "sh", "env", "cell"])
async def test_a_program_of_a_virtual_environment_has_a_hint(
    runtime: Runtime, tmp_path: Path, way: str
) -> None:
    tool = tmp_path / ".venv/bin/tool"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!{tmp_path}/.venv/bin/python\n")
    tool.chmod(0o755)
    async with await runtime.create("default", workspace=tmp_path) as box:
        if way == "cell":
            run = await box.run("import subprocess; subprocess.run(['.venv/bin/tool'])")
        else:
            prefix = {"bash": "", "sh": "sh -c ", "env": "env "}[way]
            run = await box.shell(f"{prefix}.venv/bin/tool")
        assert run.stderr.endswith(NO_INTERPRETER), run
        assert NO_INTERPRETER not in (await box.shell("/usr/bin/tool; missing")).stderr


@pytest.mark.unprivileged
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_a_pool_reports_that_it_lacks_a_function_of_a_cell(
    runtime: Runtime, method: str
) -> None:
    setup = (
        f"import multiprocessing; pool = multiprocessing.get_context({method!r}).Pool(2)\n"
        "def square(x): return x * x"
    )
    async with await runtime.create("default") as box:
        assert (await box.run(setup)).ok
        run = await box.run("pool.map(square, [1, 2])", timeout=20)
        assert run.error is not None
        assert "'square' is defined in a cell" in run.error.value
        assert (await box.run("pool.map(abs, [-1, 2])", timeout=20)).result == "[1, 2]"


async def test_a_pool_works_next_to_a_package_named_sbx(runtime: Runtime) -> None:
    code = (
        "import pathlib; pathlib.Path('sbx').mkdir(); pathlib.Path('sbx/__init__.py').touch()\n"
        "import multiprocessing\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-1]))"
    )
    async with await runtime.create("default") as box:
        assert (await box.run(code, timeout=20)).stdout == "[1]\n"
