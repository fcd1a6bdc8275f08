"""Run tests of the suite a second time, as a user without rights, as most people run sbx.

The CI tier runs the tests of a wall or of a host fact, which are marked `unprivileged`. The full
tier adds those marked `core`, with kernels of all paths.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import UID, copy_of_the_project, run

pytestmark = pytest.mark.needs("root")
_TESTS = Path(__file__).resolve().parents[1]
_CI_TESTS = 60  # functions; with their rows they are more


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="as-user-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.timeout(600)
def test_marked_tests_pass_for_a_user_without_rights(top: Path) -> None:
    files = _files_with("unprivileged")
    # One process: a second one would import and collect everything again.
    passed = _run_as_user(top, "-m", "unprivileged", *files, timeout_s=580)
    assert passed >= _CI_TESTS


@pytest.mark.full_tier
@pytest.mark.timeout(3620)
def test_core_tests_pass_for_a_user_without_rights(top: Path) -> None:
    words = ["--full", "--numprocesses=2", "--dist=loadfile"]
    files = sorted({*_files_with("unprivileged"), *_files_with("core")})
    _run_as_user(top, "-m", "unprivileged or core", *words, *files, timeout_s=3600)


def _files_with(marker: str) -> list[str]:
    """Return the test files that use the marker: collecting all others takes seconds."""
    return sorted(
        str(path.relative_to(_TESTS.parent))
        for folder in ("escape", "integration")
        for path in (_TESTS / folder).rglob("test_*.py")
        if f"pytest.mark.{marker}" in path.read_text()
    )


def _run_as_user(top: Path, *words: str, timeout_s: float) -> int:
    """Run pytest with these words as that user. Return how many tests passed."""
    with tempfile.TemporaryDirectory(dir=top) as place:
        Path(place).chmod(0o755)
        project = copy_of_the_project(Path(place))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        done = run([*command, *words], top=Path(place), cwd=project, timeout_s=timeout_s)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = re.search(r"(\d+) passed", done.stdout.strip().splitlines()[-1])
    assert summary is not None
    return int(summary[1])


def test_the_helper_gives_a_user_without_rights(top: Path) -> None:
    look = "import os, sys; print(os.getuid(), os.getgroups(), sys.prefix)"
    done = run([sys.executable, "-c", look], top=top, cwd=top, timeout_s=60)
    assert done.stdout.split() == [str(UID), "[]", sys.prefix]
