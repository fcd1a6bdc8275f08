"""The structure of sbx/ keeps its budgets: sizes, names, imports and the words of its texts."""

import pytest

from tests.meta import prose, structure


@pytest.mark.parametrize("measure", structure.MEASURES, ids=lambda measure: measure.name)
def test_structure_is_within_its_budget(measure: structure.Measure) -> None:
    places = measure.find()
    assert len(places) <= measure.budget, "\n".join(places[:200])


def test_every_habit_has_a_budget() -> None:
    measured = {measure.name.removeprefix("prose: ") for measure in structure.MEASURES}
    assert set(prose.HABITS) <= measured


@pytest.mark.parametrize(
    ("source", "habit"),
    [
        ('"""What is here."""', "docstring begins with What"),
        ('"""Return the words of it, whoever wrote."""', "who without a noun"),
        ("x = 1  # linux kills it", "lower-case linux"),
        ('raise ValueError("the name is no name")', "negated nouns"),
        ("def f():\n    x = f'{f} was said by {f}'", "say, said"),
    ],
)
def test_habit_is_counted(source: str, habit: str) -> None:
    assert habit in {name for name, _, _ in prose.matches(source)}


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the pending frames. `what is told` is code."""',
        "told = 1",
        '"""See /usr/include/linux/seccomp.h."""',
    ],
)
def test_plain_text_has_no_habit(source: str) -> None:
    assert list(prose.matches(source)) == []
