"""Values of the store that another program changed."""

import ast
import sqlite3
from pathlib import Path

import pytest

import sbx.store
from sbx.errors import Unavailable
from sbx.store.errors import decoded, translated

# These texts are not columns, or their reader handles the error.
OTHER_TEXTS = {"errors.py", "idempotency.py", "marks.py"}


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000])
def test_a_value_that_is_not_json_is_a_damage_of_the_store(text: str) -> None:
    with pytest.raises(Unavailable, match="the store is damaged: a value is not JSON") as damage:
        decoded(text)
    assert damage.value.code == "store_corrupt"


def test_a_value_that_sqlite_cannot_read_as_json_is_a_damage_of_the_store() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE present (text)")
    connection.execute("INSERT INTO present VALUES ('{')")
    with pytest.raises(sqlite3.Error) as error:
        connection.execute("SELECT json_extract(text, '$.a') FROM present").fetchall()
    connection.close()
    damage = translated(error.value, "/data/sbx.sqlite")
    assert (type(damage), damage.code) == (Unavailable, "store_corrupt")
    assert damage.hint is not None
    assert "repair" in damage.hint


def test_each_column_with_json_is_read_by_decoded() -> None:
    """A bad value of one row was a traceback at the start, and an internal error of lists."""
    readers = [
        f"{path.name}:{node.lineno}"
        for path in Path(sbx.store.__path__[0]).glob("*.py")
        if path.name not in OTHER_TEXTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads"
    ]
    assert not readers
