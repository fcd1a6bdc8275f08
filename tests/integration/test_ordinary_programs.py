"""Ordinary programs of developers in a sandbox with the default policy: git, installers of packages,
the environment of a project, pools of processes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sbx import Runtime

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
