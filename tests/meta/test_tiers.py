"""The selection of tests: the tier decides which tests run, and nothing of the checkout does."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
NEEDS_A_GUEST = "vm"  # the one folder without a test of the CI tier
SELECTING = (
    *TESTS.rglob("conftest.py"),
    TESTS / "escape" / "attacking.py",
    TESTS / "integration" / "test_unprivileged.py",
    ROOT / "scripts" / "test",
    ROOT / ".ci" / "run",
)
GIT = re.compile(r"\bgit\b.*(-C|rev-parse|log|diff|show|describe|status)|\.git\b|\bHEAD\b")
EXAMPLE = ["tests/escape/test_terminals.py", "tests/escape/test_host_sockets_as_another.py"]
PATH = re.compile(r"\b(pool|fork|cold)\b")


def has_marker(node: ast.AST, marker: str) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == marker for part in marks(node))


def marks(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a module's own marks, or the decorators of a function."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for decorator in node.decorator_list:
                if not (isinstance(decorator, ast.Call) and "parametrize" in ast.dump(decorator)):
                    yield from ast.walk(decorator)  # parametrize may mark single rows
        case ast.Module():
            for statement in node.body:
                if isinstance(statement, ast.Assign) and "pytestmark" in ast.dump(statement):
                    yield from ast.walk(statement.value)


def counted() -> tuple[Counter[str], Counter[str]]:
    """Return how many test functions each folder has in the CI tier, and in the full tier only."""
    ci_tier, full_tier = Counter[str](), Counter[str]()
    for path in TESTS.glob("**/test_*.py"):
        folder = path.relative_to(TESTS).parts[0]
        module = ast.parse(path.read_text())
        all_full = has_marker(module, "full_tier")
        classes = (node.body for node in module.body if isinstance(node, ast.ClassDef))
        for node in chain(module.body, *classes):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if name.startswith("test_"):
                        full = all_full or has_marker(node, "full_tier")
                        full = full and not has_marker(node, "ci_tier")
                        (full_tier if full else ci_tier)[folder] += 1
    return ci_tier, full_tier


def collected(*words: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_selection_does_not_depend_on_git() -> None:
    found = [
        f"{path}: {line}"
        for path in SELECTING
        for line in path.read_text().splitlines()
        if GIT.search(line)
    ]
    assert not found
    assert GIT.search('words = ["git", "-C", place, "rev-parse", "HEAD"]')
    assert not GIT.search("debian git direnv vim-tiny")


def test_each_folder_has_tests_of_the_ci_tier_and_most_are_in_it() -> None:
    ci_tier, full_tier = counted()
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders - {*ci_tier} == {NEEDS_A_GUEST}
    assert {"escape", "integration", NEEDS_A_GUEST} <= {*full_tier}
    assert ci_tier.total() > 10 * full_tier.total()


def test_full_tier_adds_tests_and_paths_and_drops_none() -> None:
    ci_tier, full_tier = collected(*EXAMPLE), collected(*EXAMPLE, "--full")
    assert ci_tier < full_tier
    assert {path for one in ci_tier for path in PATH.findall(one)} == {"pool"}
    assert {path for one in full_tier for path in PATH.findall(one)} == {"pool", "fork", "cold"}
