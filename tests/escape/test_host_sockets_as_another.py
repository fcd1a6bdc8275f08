"""test_host_sockets.py, run as a user without any right: there the daemon, the directory and the
processes of the jail have one uid on the host, so no mode of a file keeps them apart."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import copy_of_the_project, run
from attacking import attacked_paths

pytestmark = [pytest.mark.needs("root"), pytest.mark.full_tier]
_TESTS = "tests/escape/test_host_sockets.py"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("path", attacked_paths(metafunc.config))


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="as-user-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.timeout(400)
def test_nothing_of_the_host_is_reached_by_a_user_without_rights(top: Path, path: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "error", "--full"]
    project = copy_of_the_project(top)
    command = [sys.executable, *words, "--path", path, _TESTS]
    done = run(command, top=top, cwd=project, timeout_s=390)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout.strip().splitlines()[-1])
    assert passed is not None
    assert int(passed[1]) >= 100
