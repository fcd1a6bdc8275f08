"""How the structure of sbx/ and the words of its texts are counted. `scripts/check` holds the
budgets."""

import ast
from pathlib import Path

import pytest

from tests.meta import prose, structure


@pytest.mark.parametrize(("budget", "code"), [(2, 0), (1, 1)])
def test_count_above_its_budget_fails_the_check(
    budget: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = structure.Measure("apples", lambda: ["a red one", "a green one"], budget, 0)
    assert structure.main([measure], []) == code
    printed = capsys.readouterr().out
    assert ("a green one" in printed) == bool(code)
    row = "above its budget: apples: 2, and the budget is 1"
    assert (printed.splitlines()[-1] == row) == bool(code)


@pytest.mark.parametrize(
    ("path", "source"), [("api/utils.py", ""), ("a.py", "class RunManager: ..."), ("base.py", "")]
)
def test_vague_name_is_counted(path: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = [(Path(path), node) for node in ast.parse(source).body]
    monkeypatch.setattr(structure, "_sources", lambda: {Path(path): source})
    monkeypatch.setattr(structure, "_classes", lambda: parsed)
    assert len(structure.vague_names()) == 1


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
