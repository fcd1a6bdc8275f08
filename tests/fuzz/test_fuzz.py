"""The targets over their seeds; and with atheris, where it is installed, for some seconds."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import SEEDS, TARGETS
from tests.tiers import rows

ROOT = Path(__file__).resolve().parents[2]
CI_SECONDS = 1
FULL_SECONDS = 20


@pytest.mark.parametrize(
    ("target", "seed"),
    [(name, seed) for name, seeds in SEEDS.items() for seed in seeds],
    ids=lambda one: one if isinstance(one, str) else repr(one[:20]),
)
def test_a_seed_is_taken(target: str, seed: bytes) -> None:
    TARGETS[target](seed)


@pytest.mark.parametrize("target", rows(TARGETS, [next(iter(TARGETS))]))
def test_some_seconds_of_fuzzing_find_nothing(
    target: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: pip install sbx[fuzz]")
    seconds = FULL_SECONDS if pytestconfig.getoption("--full") else CI_SECONDS
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", target, str(seconds), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stat::number_of_executed_units" in done.stderr


def test_a_target_that_fails_would_be_noticed() -> None:
    """The control: the same checks, with a rule that lets too much pass."""
    from tests.fuzz import targets

    patch = pytest.MonkeyPatch()
    patch.setattr(targets, "check_name", lambda name: name)
    try:
        with pytest.raises(AssertionError):
            TARGETS["paths"](b"\x00../x")
    finally:
        patch.undo()
