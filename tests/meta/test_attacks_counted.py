"""How many attacks there are: those of the attack set, which are tried on every cell of the matrix,
and the tests of tests/escape, each of which tries one or more of its own.

    python tests/meta/test_attacks_counted.py      lists them
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from sbx.doctor.attacks.attack import Class
from sbx.doctor.attacks.host_executables import FEW_MEANS, HOST_EXECUTABLES
from sbx.doctor.attacks.runner import ALL, TOGETHER
from sbx.doctor.report import PLAN

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = Path(__file__).resolve().parents[1] / "escape"


def test_the_attack_set_has_enough_of_every_class_and_none_twice() -> None:
    counted = Counter(one.kind for one in ALL)
    assert len({(one.code, one.act) for one in ALL}) == len(ALL) >= 150
    assert set(counted) == {*Class}
    assert min(counted.values()) >= 15, counted


def test_the_documented_numbers_are_those_of_the_attack_set() -> None:
    """README, SECURITY.md and docs named a number that was right once."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs/security.md"]
    for page in pages:
        numbers = re.findall(r"more\s+than\s+([\d,]+)\s+attacks", page.read_text())
        assert numbers, page
        for number in numbers:
            assert 0.8 * len(ALL) <= int(number.replace(",", "")) < len(ALL), (page, len(ALL))
    every = sum(len(ALL) + len(TOGETHER) * (len(paths) - 1) for paths in PLAN.values())
    every -= 2 * sum(one.act[0] not in FEW_MEANS for one in HOST_EXECUTABLES)
    sample = re.search(r"(\d+) attacks tried in .*, (\d+) do not apply", pages[2].read_text())
    assert sample
    assert sum(map(int, sample.groups())) == pytest.approx(every, rel=0.2)


def names_in(path: Path) -> list[str]:
    found = ast.walk(ast.parse(path.read_text()))
    functions = (one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return [one.name for one in functions if one.name.startswith("test_")]


if __name__ == "__main__":
    for kind, number in Counter(one.kind for one in ALL).items():
        print(f"{number:5} {kind}")
    print(f"{len(ALL):5} in the attack set")
    for path in sorted(ESCAPE.glob("test_*.py")):
        if "attack" not in path.name:
            print(f"{len(names_in(path)):5} tests in {path.name}")
