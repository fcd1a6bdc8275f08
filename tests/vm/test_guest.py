"""Run the cgroup tests in a guest with cgroup v2 and systemd: in a login session, in a delegated
scope, and as root.

SBX_TEST_GUEST is a command that boots the guest. It takes `-p DIRECTORY`, a project that the guest
copies, `-t SECONDS`, `-u USER` (dev or root), `-d` for a scope of systemd with Delegate=yes, and
the command to run there. Its exit status is that of the command. The guest needs Python 3.11 and
pytest.
"""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import copy_of_the_project

GUEST = shlex.split(os.environ.get("SBX_TEST_GUEST", ""))
LIMIT_S = 900  # an emulated machine starts a process in 20 ms or more
pytestmark = [
    pytest.mark.full_tier,
    pytest.mark.skipif(not GUEST, reason="SBX_TEST_GUEST names no command that boots a guest"),
]


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    """Copy the project without its virtual environments."""
    with tempfile.TemporaryDirectory(prefix="sbx-guest-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield copy_of_the_project(Path(directory))


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "words",
    [["-u", "dev"], ["-u", "dev", "-d"], ["-u", "root"]],
    ids=["login session", "delegated scope", "root"],
)
def test_cgroup_tests_pass_in_a_guest_with_cgroup_v2(project: Path, words: list[str]) -> None:
    inside = ["python3", "tests/vm/cgroups_v2.py"]
    command = [*GUEST, "-p", str(project), "-t", str(LIMIT_S), *words, *inside]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S + 30,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-4000:]
