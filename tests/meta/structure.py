"""Measure the structure of `sbx/`: sizes, names, imports and the words of its texts.

    python -m tests.meta.structure            a table: count before and now, budget, target
    python -m tests.meta.structure --details  also which files, classes and modules are counted

The exit code is 1 if a count is above its budget. Then the places are printed, and the last lines
name the row, its count and its budget. `scripts/check` runs this. A budget only falls, until it
reaches its target. The lines are the exception: their budget has a margin above the size that was
counted last. A change that needs more raises `LINES` in the same commit, whose message gives the
reason.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import grimp
import networkx
import rich
from rich.table import Column, Table

from tests.meta import prose

SBX = Path(__file__).resolve().parents[2] / "sbx"
LINES = 127_520  # in all of sbx/, when this figure was last set
LINES_MARGIN = 1.03
# Code of new features does not count in the other measures.
NEW_ROOMS = (
    *("cluster", "console", "api/opensandbox", "api/e2b", "api/console"),
    "agent/external",
)
FILE_LINES = 400
CLASS_LINES = 300
CLASS_METHODS = 30
BANNED_NAMES = frozenset({"told", "said", "asked", "wanted", "held", "one", "found", "made"})
ALSO_BANNED = frozenset({"known", "given"})
BANNED_WORDS = frozenset({"utils", "helpers", "helper", "common", "manager", "base"})


class Measure(NamedTuple):
    """A count of the structure. `find` returns one text for each thing that counts. `before` is the
    count at commit 67bcdb6, before the layout changed."""

    name: str
    find: Callable[[], list[str]]
    budget: int
    target: int
    before: int | None = None


@cache
def _sources() -> dict[Path, str]:
    """Return each file of today's features, by its path below sbx."""
    paths = ((path.relative_to(SBX), path) for path in sorted(SBX.rglob("*.py")))
    return {name: path.read_text() for name, path in paths if not str(name).startswith(NEW_ROOMS)}


@cache
def _classes() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for path, source in _sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]


@cache
def import_graph() -> grimp.ImportGraph:
    """Return the import graph. It includes imports in functions and below `TYPE_CHECKING`."""
    return grimp.build_graph("sbx", cache_dir=None)


def lines() -> list[str]:
    """Return all lines of sbx/, also those of new features."""
    return [line for path in SBX.rglob("*.py") for line in path.read_text().splitlines()]


def repeated_class_names() -> list[str]:
    """Return the public names of classes that more than one module defines."""
    homes = defaultdict(set)
    for path, node in _classes():
        if not node.name.startswith("_"):
            homes[node.name].add(str(path))
    return [f"{name}: {', '.join(sorted(at))}" for name, at in sorted(homes.items()) if len(at) > 1]


def protocols() -> list[str]:
    """Return the classes of typing.Protocol. asyncio.Protocol is something else."""
    return [
        f"{path}: {node.name}"
        for path, node in _classes()
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
    ]


def modules_with_one_importer() -> list[str]:
    graph = import_graph()
    new = tuple(f"sbx.{room.replace('/', '.')}" for room in NEW_ROOMS)
    modules = (name for name in graph.modules if not name.startswith(new))
    importers = {name: graph.find_modules_that_directly_import(name) for name in modules}
    return [f"{name} ← {min(by)}" for name, by in sorted(importers.items()) if len(by) == 1]


def long_files() -> list[str]:
    sizes = {path: len(source.splitlines()) for path, source in _sources().items()}
    return [f"{path}: {size}" for path, size in sizes.items() if size > FILE_LINES]


def large_classes() -> list[str]:
    """Return the classes that are too large, but those whose docstring gives a reason."""
    found = []
    for path, node in _classes():
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        methods = sum(
            isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body
        )
        reason = "Large because" in (ast.get_docstring(node) or "")
        if (size > CLASS_LINES or methods > CLASS_METHODS) and not reason:
            found.append(f"{path}: {node.name}, {size} lines, {methods} methods")
    return found


def modules_in_cycles() -> list[str]:
    graph = import_graph()
    arrows = networkx.DiGraph(
        (name, other)
        for name in graph.modules
        for other in graph.find_modules_directly_imported_by(name)
    )
    groups = networkx.strongly_connected_components(arrows)
    return [
        f"{name} (cycle of {len(group)})" for group in groups if len(group) > 1 for name in group
    ]


def api_imports_of_store() -> list[str]:
    found = []
    for details in import_graph().find_matching_direct_imports(
        import_expression="sbx.api.** -> sbx.**"
    ):
        if ".store" in details["imported"]:
            found += [
                f"{line['importer']}:{line['line_number']}: {line['line_contents'].strip()}"
                for line in import_graph().get_import_details(**details)
            ]
    return found


def identifiers(banned: frozenset[str]) -> Callable[[], list[str]]:
    """Return the function that finds each use of these identifiers."""

    def find() -> list[str]:
        return [
            f"{path}:{token.start[0]}: {token.string}"
            for path, source in _sources().items()
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.NAME and token.string in banned
        ]

    return find


def vague_names() -> list[str]:
    """Return the modules and classes with a name that describes no purpose, such as `utils`."""
    modules = [path for path in _sources() if BANNED_WORDS & {*path.stem.split("_")}]
    classes = [
        f"{path}: {node.name}"
        for path, node in _classes()
        if BANNED_WORDS & {word.lower() for word in re.findall("[A-Z][a-z]+", node.name)}
    ]
    return [*map(str, modules), *classes]


def habit(name: str) -> Callable[[], list[str]]:
    """Return the function that finds one word habit."""

    def find() -> list[str]:
        return [
            f"{path}:{line}: {words}" for path, matched, line, words in _prose() if matched == name
        ]

    return find


@cache
def _prose() -> list[tuple[Path, str, int, str]]:
    return [
        (path, *match) for path, source in _sources().items() for match in prose.matches(source)
    ]


MEASURES = (
    Measure("lines", lines, round(LINES * LINES_MARGIN), 109_000),
    Measure("public class names in more than one module", repeated_class_names, 0, 10, 87),
    Measure("Protocol classes", protocols, 15, 15, 58),
    Measure(
        "modules that exactly one other module imports", modules_with_one_importer, 145, 90, 182
    ),
    Measure(f"files over {FILE_LINES} lines", long_files, 15, 15, 26),
    Measure(
        f"classes over {CLASS_LINES} lines or {CLASS_METHODS} methods", large_classes, 0, 0, 18
    ),
    Measure("modules in import cycles", modules_in_cycles, 0, 0, 25),
    Measure("imports of store in api", api_imports_of_store, 0, 0, 25),
    Measure("banned identifiers", identifiers(BANNED_NAMES), 0, 0, 5243),
    Measure("banned identifiers: known, given", identifiers(ALSO_BANNED), 0, 0),
    Measure("modules and classes named utils, base, …", vague_names, 0, 0),
    Measure("prose: clause as a noun", habit("clause as a noun"), 184, 184, 1545),
    Measure("prose: docstring begins with What", habit("docstring begins with What"), 51, 51, 289),
    Measure("prose: docstring begins with As", habit("docstring begins with As"), 28, 28, 230),
    Measure("prose: tell, told", habit("tell, told"), 38, 38, 352),
    Measure("prose: say, said", habit("say, said"), 43, 43, 363),
    Measure("prose: nobody, somebody, anybody", habit("nobody, somebody, anybody"), 32, 32, 282),
    Measure("prose: who without a noun", habit("who without a noun"), 28, 28, 211),
    Measure("prose: negated nouns", habit("negated nouns"), 31, 37, 204),
    Measure("prose: possessives apart", habit("possessives apart"), 22, 22, 183),
    Measure("prose: lower-case linux", habit("lower-case linux"), 19, 19, 165),
    Measure("prose: goes on", habit("goes on"), 15, 15, 91),
    Measure("prose: any more", habit("any more"), 8, 8, 80),
    Measure("prose: beside", habit("beside"), 8, 8, 76),
    Measure("prose: anew", habit("anew"), 4, 4, 30),
    Measure("prose: to be had", habit("to be had"), 1, 1, 9),
    Measure("prose: for ever", habit("for ever"), 1, 1, 8),
)


def main(measures: Sequence[Measure] = MEASURES, words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--details", action="store_true", help="print each thing that counts")
    details = parser.parse_args(words).details
    failed = []
    table = Table(
        "measure",
        *(Column(name, justify="right") for name in ("67bcdb6", "now", "budget", "target")),
    )
    for measure in measures:
        places = measure.find()
        above = len(places) > measure.budget
        if above:
            failed.append(f"{measure.name}: {len(places)}, and the budget is {measure.budget}")
        if (details or above) and measure.find is not lines:
            print(measure.name, *places, sep="\n    ")
        style = "red" if above else None
        before = "" if measure.before is None else str(measure.before)
        numbers = map(str, (len(places), measure.budget, measure.target))
        table.add_row(measure.name, before, *numbers, style=style)
    rich.print(table)
    for row in failed:
        print(f"above its budget: {row}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
