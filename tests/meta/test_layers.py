"""The layers of sbx: a module imports its own package and lower rows, never a package on its own
row, and no imports form a cycle. `api` does not import `store`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta import structure

PACKAGE = Path(__file__).resolve().parents[2] / "sbx"
ROWS = (
    {"cli", "adapters"},
    {"sync"},
    {"api", "jupyter", "doctor"},
    {"cluster"},
    {"service", "client"},
    {"agent"},
    {"runtime"},
    {"kernels", "egress", "environments", "store"},
    {"isolation", "workspace"},
    {
        "policy",
        "guest",
        "event_log",
        "run_methods",
        "settings_files",
        "forbidden_directories",
        "own_python",
        "imports",
    },
    {"linux", "protocol", "telemetry", "aio"},
    {"errors", "console", "version"},
)
ONLY: dict[str, set[str]] = {  # tighter than their row
    "linux": set(),
    "guest": {"linux"},
    "client": {"protocol", "aio", "event_log", "run_methods", "errors", "version"},
}
NEVER = {"agent": {"runtime"}, "api": {"store"}}  # an agent receives its sandbox as an argument
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


def offences(path: Path, source: str) -> Iterator[str]:
    """Yield each import of the module that its row does not allow."""
    package = path.parts[0].removesuffix(".py")
    if package not in ROW:
        yield f"{path} is not in a row of ROWS"
        return
    for name in imported(ast.parse(source)):
        if name[0] != "sbx":
            if name[0] in SYSCALLS and package != "linux":
                yield f"{path} imports {name[0]}"
        elif (other := name[1]) in ROW and other != package:
            if ROW[other] <= ROW[package]:
                yield f"{path} imports {name[1]}, not below it"
            elif other not in ONLY.get(package, ROW) or other in NEVER.get(package, ()):
                yield f"{path} may not import {name[1]}"


def test_modules_import_their_own_package_and_lower_rows() -> None:
    assert len(MODULES) > 400
    lines = {line for path in MODULES for line in offences(path, (PACKAGE / path).read_text())}
    assert not lines, "\n".join(sorted(lines))


def test_imports_form_no_cycle() -> None:
    """Imports in functions and below `TYPE_CHECKING` count."""
    assert not structure.modules_in_cycles()


def test_the_broker_imports_only_the_standard_library() -> None:
    """It may run as root, and Python starts it without the packages of the environment."""
    server = "sbx.isolation.broker.server"
    names = {server} | structure.import_graph().find_upstream_modules(server)
    paths = [PACKAGE.parent.joinpath(*name.split(".")) for name in sorted(names)]
    sources = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    tops = {name[0] for path in sources for name in imported(ast.parse(path.read_text()))}
    assert len(sources) > 20
    own = {"sbx", "pyseccomp"}  # pyseccomp only generates the shipped filters
    assert tops - own <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("path", "source", "offence"),
    [
        ("linux/x.py", "from sbx.errors import Broken", "may not import errors"),
        ("runtime/x.py", "from sbx.api import app", "imports api, not below it"),
        ("workspace/x.py", "import sbx.isolation.plan", "imports isolation, not below it"),
        ("agent/x.py", "def f():\n    from sbx import runtime", "may not import runtime"),
        ("kernels/x.py", "import ctypes", "imports ctypes"),
        ("attic/x.py", "", "is not in a row of ROWS"),
    ],
)
def test_forbidden_import_is_reported(path: str, source: str, offence: str) -> None:
    assert list(offences(Path(path), source)) == [f"{path} {offence}"]


def test_allowed_imports_are_not_reported() -> None:
    source = "import os\nfrom sbx.runtime.sandbox import AsyncSandbox\nfrom sbx.linux import procfs"
    assert list(offences(Path("runtime/x.py"), source)) == []
