"""The rows of the house: a module imports its own package and lower rows, never a sibling."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sbx"
ROWS = (
    {"cli", "adapters"},
    {"sandbox"},  # the face that is embedded or connected
    {"api", "client", "jupyter"},
    {"agent"},
    {"runtime"},
    {"kernels"},
    {"isolation", "workspace"},
    {"policy", "guest", "blocking"},
    {"linux", "protocol", "telemetry", "lately"},
    {"errors", "clock"},
)
ONLY: dict[str, set[str]] = {  # tighter than their row
    "linux": set(),
    "guest": {"linux"},
    "client": {"protocol", "errors", "blocking"},
    "blocking": {"protocol", "errors"},
}
NEVER = {"agent": {"runtime"}}  # it is handed a sandbox
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
SYSCALLS = {"ctypes", "fcntl"}
FACES = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}  # they may import anything
MODULES = [path.relative_to(PACKAGE) for path in sorted({*PACKAGE.rglob("*.py")} - FACES)]


def imported(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            source = tuple((node.module or "").split("."))
            yield from ((*source, alias.name) for alias in node.names)


def home(name: str) -> str:
    """`blocking_contexts` and the like are parts of `blocking`."""
    return "blocking" if name.startswith("blocking_") else name


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_its_own_package_and_lower_rows(path: Path) -> None:
    package = home(path.parts[0].removesuffix(".py"))
    assert package in ROW, f"{path} is in no row of the house"
    for name in imported(ast.parse((PACKAGE / path).read_text())):
        if name[0] != "sbx":
            assert name[0] not in SYSCALLS or package == "linux", f"{path} imports {name[0]}"
        elif (other := home(name[1])) in ROW and other != package:
            assert ROW[other] > ROW[package], f"{path} imports {name[1]}, not below it"
            assert other in ONLY.get(package, ROW), f"{path} may not import {name[1]}"
            assert other not in NEVER.get(package, ()), f"{path} may not import {name[1]}"
