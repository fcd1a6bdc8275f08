"""Run test_attack_set.py as a user without any right, in all cells of the matrix.

The CI tier tests each wall as that user, by integration/test_unprivileged.py.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import copy_of_the_project, run
from attacking import attacked_cells

pytestmark = [pytest.mark.full_tier, pytest.mark.needs("root")]
_SET = "tests/escape/test_attack_set.py"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = attacked_cells(metafunc.config)
    metafunc.parametrize("cell", cells, ids="-".join)


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="as-user-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.timeout(400)
def test_the_attack_set_is_held_for_a_user_without_rights(top: Path, cell: tuple[str, str]) -> None:
    path, policy = cell
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "error"]
    words += ["--path", path, "--policy", policy, _SET]
    project = copy_of_the_project(top)
    done = run([sys.executable, *words], top=top, cwd=project, timeout_s=390)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout.strip().splitlines()[-1])
    assert passed is not None
    assert int(passed[1]) >= 150
