"""The core of the suite once more, as a user without any right: how most people will run sbx."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import UID, copy_of_the_project, run
from attacking import attacked_paths, turn

pytestmark = pytest.mark.needs("root")
_SUITES = ("tests/escape", "tests/integration")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="as-user-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.timeout(1220)  # five minutes on a machine with nothing else to do
def test_the_core_tests_pass_for_a_user_without_rights(
    top: Path, pytestconfig: pytest.Config
) -> None:
    project = copy_of_the_project(top)
    paths = attacked_paths(pytestconfig)
    chosen = ["--full"] if len(paths) > 1 else ["--path", *paths]
    if pytestconfig.getoption("--by-turns"):
        chosen += ["--third", str(turn() % 3)]
    pytest_words = ["-q", "-m", "core", "-p", "no:cacheprovider", "--tb=short", "-W", "error"]
    pytest_words += ["--numprocesses=2", "--dist=loadfile"]  # they wait more than they compute
    done = run(
        [
            sys.executable,
            "-m",
            "pytest",
            *pytest_words,
            *chosen,
            "tests/escape",
            "tests/integration",
        ],
        top=top,
        cwd=project,
        timeout_s=1200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary


def test_the_helper_gives_a_user_without_rights(top: Path) -> None:
    look = "import os, sys; print(os.getuid(), os.getgroups(), sys.prefix)"
    done = run([sys.executable, "-c", look], top=top, cwd=top, timeout_s=60)
    assert done.stdout.split() == [str(UID), "[]", sys.prefix]
