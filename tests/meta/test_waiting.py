"""What asyncio offers and we do not use, because it has cost hours."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "sbx"


def waits_in(source: str) -> list[int]:
    """Return the lines that use asyncio.wait_for."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr == "wait_for"
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
    ]


def test_nothing_waits_by_wait_for() -> None:
    """Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with the end of
    the wait: who cancels then waits for ever. asyncio.timeout does not."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 400
    found = {str(path): lines for path in paths if (lines := waits_in(path.read_text()))}
    assert not found


def test_wait_for_of_asyncio_is_found_and_other_waits_are_not() -> None:
    source = "async def f(x):\n    await x.wait_for(1)\n    await asyncio.wait_for(x, 1)\n"
    assert waits_in(source) == [3]
