"""What asyncio offers and we do not use, because it has cost hours."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sbx"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_waits_by_wait_for(path: Path) -> None:
    """Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with the end of
    the wait: who cancels then waits for ever. asyncio.timeout does not."""
    used = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "wait_for"
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
    ]
    assert not used, f"{path.name}: lines {used}"
