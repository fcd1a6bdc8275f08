"""The table of tests/data_matrix.py is complete, its page is current, and each cell has a test."""

import ast
from pathlib import Path

from tests.data_matrix import ACTS, NEVER_MAX, PAGE, TABLE, Cell, Never, page

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"


def test_no_cell_is_empty() -> None:
    for thing, cells in TABLE.items():
        assert [*cells] == [*ACTS], thing
        for act, cell in cells.items():
            if isinstance(cell, Never):
                assert cell.reason, (thing, act)
            else:
                assert cell.answer, (thing, act)
                assert cell.disk, (thing, act)


def test_few_cells_cannot_happen() -> None:
    never = [cell for cells in TABLE.values() for cell in cells.values() if isinstance(cell, Never)]
    assert len(never) <= NEVER_MAX


def test_a_deletion_leaves_nothing() -> None:
    """Except what is not of the thing: the user's directory, and the history of a conversation."""
    others = {"context", "grant", "rule"}
    for thing in TABLE.keys() - others:
        cell = TABLE[thing]["delete"]
        assert not isinstance(cell, Cell) or cell.disk in ("nowhere", "directory"), thing


def test_each_thing_has_a_module_of_tests() -> None:
    tested = {"notebook kernel"}
    for name in ("sessions", "agents", "sandboxes"):
        for node in ast.parse((INTEGRATION / f"test_matrix_{name}.py").read_text()).body:
            if isinstance(node, ast.Assign):
                match node.targets[0]:
                    case ast.Name(id="THINGS"):
                        tested |= set(ast.literal_eval(node.value))
    assert tested == TABLE.keys()


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.data_matrix`"
