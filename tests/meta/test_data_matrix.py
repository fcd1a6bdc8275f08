"""The table of tests/data_matrix.py is complete, its page is current, and each cell has a test."""

import ast
from contextlib import suppress
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


def constants(module: str) -> dict[str, object]:
    """Return the literals that a module assigns to names in capital letters."""
    found = {}
    for node in ast.parse((INTEGRATION / module).read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                with suppress(ValueError):
                    found[name] = ast.literal_eval(value)
    return found


def test_each_thing_has_a_module_of_tests() -> None:
    modules = [f"test_matrix_{name}.py" for name in ("sessions", "agents", "sandboxes")]
    tested = [thing for module in modules for thing in constants(module)["THINGS"]]  # type: ignore[attr-defined]
    assert sorted([*tested, constants("test_matrix_jupyter.py")["THING"]]) == sorted(TABLE)


def test_each_act_has_a_module_of_tests() -> None:
    names = ("killed", "backup", "older_backup")
    of_modules = {constants(f"test_matrix_{name}.py")["ACT"] for name in names}
    source = (INTEGRATION / "matrix_acts.py").read_text()
    assert {act for act in ACTS if f'    "{act}": _' in source} | of_modules == ACTS.keys() - {
        "create"
    }


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.data_matrix`"
