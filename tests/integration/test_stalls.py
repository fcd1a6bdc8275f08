"""The largest inputs of each route, measured: `python -m bench stalls`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 1500.0


@pytest.mark.full_tier
@pytest.mark.timeout(_DEADLINE_S + 60)
def test_no_input_stops_the_event_loop_for_50_ms() -> None:
    """Other tests use the machine too, so that only the CPU time of the service counts."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "stalls", "--rounds", "2", "--busy", "--stacks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
