"""What `scripts/run` does once all is installed: as whoever runs the tests, and unprivileged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from as_unprivileged import copy_of_the_project, run

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"
RUN = (
    "import os, runpy, sys; os.environ['SBX_DEMO_OUT'] = sys.argv[2]; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
PNG = b"\x89PNG\r\n\x1a\n"

pytest.importorskip("palmerpenguins", reason="the demo's data needs the extra: sbx[data,demo]")


def check(said: str) -> None:
    assert "344 rows" in said
    assert "Gentoo" in said
    assert said.count("refused ") == 4
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/etc/shadow'" in said
    assert "Network is unreachable" in said
    assert "(killed, memory)" in said
    assert "6 * 7 = 42; variables lost: True" in said


def test_the_demo_analyses_and_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO],
        env={**os.environ, "SBX_DEMO_OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    check(done.stdout)
    assert (tmp_path / "penguins.png").read_bytes().startswith(PNG)
    assert "Biscoe" in (tmp_path / "table.csv").read_text()


@pytest.mark.full_tier
@pytest.mark.needs("root")
def test_the_demo_says_what_is_best_effort_for_a_user_without_rights() -> None:
    top = Path(os.environ["TMPDIR"])
    project = copy_of_the_project(top)
    demo = project / "scripts" / DEMO.name
    out = top / "home" / "out"
    done = run(
        [sys.executable, "-c", RUN, str(demo), str(out)], top=top, cwd=project, timeout_s=100
    )
    assert done.returncode == 0, done.stdout
    check(done.stdout)
    assert "best effort on this host: memory by RLIMIT_DATA" in done.stdout
    assert (out / "penguins.png").read_bytes().startswith(PNG)
