"""The rows of the bench, as they are told to its users."""

from pathlib import Path

from bench.__main__ import BENCHES

README = Path(__file__).parents[2] / "README.md"


def test_every_row_is_in_the_readme() -> None:
    told = README.read_text()
    assert [name for name in BENCHES if f"`{name}`" not in told] == []


def test_a_row_that_stands_in_for_a_ratio_is_bound_by_it_at_the_speed_it_was_set_on() -> None:
    """A start through Jupyter takes a tenth of ipykernel's at most, a cell no more than its."""
    bounds = {name: (BENCHES[name].must, BENCHES[name].usual) for name in BENCHES}
    for name, share in {"jupyter_start": 0.1, "jupyter_pandas": 0.1, "jupyter_cell": 1.0}.items():
        must, usual = bounds[name]
        assert must is not None
        assert usual is not None
        assert must == usual * share
