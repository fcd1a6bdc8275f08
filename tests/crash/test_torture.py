"""Clients work on a service under random faults, and its end agrees with every reply."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CI_SECONDS = 60
CI_PAUSE_S = 2.0  # four other processes test meanwhile
FULL_SECONDS = 900
SEED = 7
REST_S = 240  # the start, the wait for the last replies, two surveys and the end
END_S = 60
pytestmark = [
    pytest.mark.needs("namespaces"),
    pytest.mark.timeout(FULL_SECONDS + REST_S + END_S + 30),
]


@pytest.mark.full_tier
def test_torture_finds_nothing(pytestconfig: pytest.Config) -> None:
    """The bench runs in its own process: it adopts orphans and raises limits."""
    full = pytestconfig.getoption("--full")
    seconds = FULL_SECONDS if full else CI_SECONDS
    words = ["torture", "--minutes", str(seconds / 60), "--seed", str(SEED), "--json"]
    words += [] if full else ["--pause", str(CI_PAUSE_S)]
    command = [sys.executable, "-m", "bench", *words]
    # The ledger of a failure outlives this session.
    top = Path(tempfile.mkdtemp(prefix="tests-of-sbx-torture-", dir="/var/tmp"))
    env = {**os.environ, "TMPDIR": str(top)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as bench:
        try:
            output, _ = bench.communicate(timeout=seconds + REST_S)
        except subprocess.TimeoutExpired:
            bench.send_signal(signal.SIGINT)  # then it ends the service and removes its mount
            output, _ = bench.communicate(timeout=END_S)
        finally:
            bench.kill()
    report = json.loads(output.splitlines()[-1])
    assert report["findings"] == [], f"{report['rules']}; ledger and log: {report['kept']}"
    assert sum(report["faults"].values()) >= 3, report["not_made"]
    assert bench.returncode == 0
    assert "/sbx-torture-" not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(top)
