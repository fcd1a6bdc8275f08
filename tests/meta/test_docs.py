"""The documentation names files, functions and pages that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.api.server.settings import ServiceSettings
from sbx.doctor.attacks.runner import ALL

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (?:`([\w.]+)`)? ?\|", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]+))?\)")


def definitions(path: Path) -> set[str]:
    """Return the functions and classes of a file, and its methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                found.add(name)
                methods = (ast.FunctionDef, ast.AsyncFunctionDef)
                found |= {f"{name}.{part.name}" for part in body if isinstance(part, methods)}
    return found


def links() -> Iterator[tuple[Path, str, str]]:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))):
        for target, heading in LINK.findall(page.read_text()):
            yield page, target, heading


@pytest.mark.parametrize(("file", "function"), sorted(set(ROW.findall(ARCHITECTURE))))
def test_each_function_of_the_architecture_exists(file: str, function: str) -> None:
    path = ROOT / "sbx" / file
    assert path.is_file()
    assert not function or function in definitions(path)


def test_each_other_file_of_the_architecture_exists() -> None:
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", ARCHITECTURE):
        assert (ROOT / "sbx" / name).exists() or (ROOT / name).exists(), name


def test_each_link_leads_to_a_page_and_its_heading() -> None:
    broken = []
    for page, target, heading in links():
        path = (page.parent / target).resolve()
        if not path.exists() or (heading and heading not in slugs(path)):
            broken.append(f"{page.name}: {target}#{heading}")
    assert not broken


ESCAPES = re.compile(r"^\| (\d+) \|.*\|([^|]+)\|$", re.MULTILINE)


def test_each_published_escape_ends_at_a_test_that_exists() -> None:
    page = (DOCS / "security.md").read_text()
    section = page.partition("## How each published escape ends here")[2].partition("\n## ")[0]
    rows = {int(number): cell.strip() for number, cell in ESCAPES.findall(section)}
    assert [*rows] == [*range(1, 35)]
    attacks, missing = {attack.name for attack in ALL}, []
    for number, cell in rows.items():
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        named = re.findall(r"attack: ((?:[^,`]|, (?!attack: |`))+)", cell)
        for file, function in tests:
            path = ROOT / "tests" / file
            if not path.is_file() or function not in definitions(path):
                missing.append(f"{number}: {file}::{function}")
        missing += [f"{number}: attack {name}" for name in named if name not in attacks]
        assert tests or named, number
    assert not missing


def test_every_setting_is_in_the_reference() -> None:
    names = re.findall(r"^\| `(\w+)` \|", (DOCS / "settings.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(ServiceSettings.model_fields)


def slugs(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in headings}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = set(), {"README.md"}
    while left:
        name = left.pop()
        reached.add(name)
        page = ROOT / name if name == "README.md" else DOCS / name
        targets = {Path(target).name for _, target, _ in links_of(page)}
        left |= {target for target in targets if (DOCS / target).is_file()} - reached
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= reached


def links_of(page: Path) -> list[tuple[Path, str, str]]:
    return [link for link in links() if link[0] == page]
