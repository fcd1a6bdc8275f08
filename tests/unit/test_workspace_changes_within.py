"""Whether changes lie below named directories, and how those are spelled. Pure."""

import pytest

from sbx.errors import BadRequest
from sbx.protocol.changes import (
    FILES_MAX,
    PREFIXES_MAX,
    ChangeBudget,
    ChangesSetting,
    checked_budgets,
    checked_prefixes,
    parse_budget,
)
from sbx.workspace.snapshots.manifest import FileNode, PlannedChange, within

FILE = FileNode("file", 0o644, 1, 1)


def outside(*prefixes: str) -> tuple[ChangeBudget, ...]:
    return ChangesSetting(ask_outside=prefixes).allowances


def link(text: bytes) -> FileNode:
    return FileNode("symlink", text=text)


@pytest.mark.parametrize(
    ("path", "node", "inside"),
    [
        ("tests", FILE, True),
        ("tests/a/b", FILE, True),
        ("docs/api/x", FILE, True),
        ("docs/x", FILE, False),
        ("tests2", FILE, False),
        ("src/tests", FILE, False),
        ("tests/l", link(b"a"), True),
        ("tests/l", link(b"./d//a/"), True),
        ("tests/d/l", link(b"../a"), True),
        ("tests/l", link(b"../tests/a"), True),
        ("tests/l", link(b"../docs/api"), True),
        ("tests/l", link(b".."), False),
        ("tests/l", link(b"../src"), False),
        ("tests/l", link(b"../../x"), False),
        ("tests/l", link(b"/workspace/tests/a"), False),
        ("tests/l", link(b"a/../b"), False),
        ("tests", link(b"src"), False),
    ],
)
def test_a_change_lies_within(path: str, node: FileNode, inside: bool) -> None:
    assert within([PlannedChange(path, None, node)], outside("tests", "docs/api")) is inside


def test_every_change_has_to_lie_within() -> None:
    one, other = PlannedChange("tests/a", FILE, None), PlannedChange("src/a", None, FILE)
    assert within([one], outside("tests"))
    assert not within([one, other], outside("tests"))
    assert not within([one], ())
    assert within([PlannedChange("tests/l", link(b"/etc"), None)], outside("tests")), (
        "it is removed"
    )


def test_directories_have_one_spelling() -> None:
    asked = ("tests/", "./tests", "/workspace/tests", "docs//api/.", "é")
    assert checked_prefixes(asked) == ("tests", "docs/api", "é")


@pytest.mark.parametrize(
    "prefix",
    ["", ".", "/", "/workspace", "/workspace/", "..", "a/../b", "/etc", "a\nb", "x" * 1001],
)
def test_what_is_no_directory_of_the_project_is_refused(prefix: str) -> None:
    with pytest.raises(BadRequest) as raised:
        checked_prefixes([prefix])
    assert (raised.value.code, raised.value.details["field"]) == ("invalid_prefix", "ask_outside")


def test_there_are_only_so_many() -> None:
    with pytest.raises(BadRequest):
        checked_prefixes(f"d{number}" for number in range(PREFIXES_MAX + 1))


# -- budgets ---------------------------------------------------------------------------------------


def added(*paths: str) -> list[PlannedChange]:
    return [PlannedChange(path, None, FILE) for path in paths]


REMOVED = PlannedChange("tests/old", FILE, None)
CHANGED = PlannedChange("tests/a", FILE, FILE)


@pytest.mark.parametrize(
    ("changes", "budgets", "inside"),
    [
        (added("tests/a", "tests/b"), ["tests:2"], True),
        (added("tests/a", "tests/b", "tests/c"), ["tests:2"], False),
        ([CHANGED, *added("tests/b")], ["tests:2"], True),
        (added("tests/a", "src/a"), ["tests:2"], False),
        (added("tests/a", "src/a"), ["tests:1", "src:1"], True),
        (added("tests/a", "src/a", "src/b"), ["tests:5", "src:1"], False),
        ([REMOVED], ["tests:5"], False),
        ([REMOVED], ["tests:5:deletions"], True),
        # A file becomes a directory: a removal and an addition.
        ([PlannedChange("tests/a", FILE, None), *added("tests/a")], ["tests:5"], False),
        (added("src/a", "README"), [".:2"], True),
        (added("src/a", "README", "x"), [".:2"], False),
        # The deepest directory counts, also if it allows less.
        (added("src/gen/a", "src/gen/b"), ["src:9", "src/gen:1"], False),
        (added("src/a", "src/gen/a"), ["src:1", "src/gen:1"], True),
        ([PlannedChange("tests/l", None, link(b"../src"))], ["tests:5"], False),
        ([PlannedChange("l", None, link(b"src"))], [".:5"], True),
        ([PlannedChange("l", None, link(b"/etc"))], [".:5"], False),
        (added("tests2/a"), ["tests:5"], False),
        ([], [], True),
    ],
)
def test_a_budget_limits_the_changes_of_one_call(
    changes: list[PlannedChange], budgets: list[str], inside: bool
) -> None:
    checked = checked_budgets(map(parse_budget, budgets))
    assert within(changes, ChangesSetting(budgets=checked).allowances) is inside


def test_a_directory_without_questions_needs_no_budget() -> None:
    setting = ChangesSetting(ask_outside=("tests",), budgets=(ChangeBudget("tests", 1),))
    assert within([REMOVED, *added("tests/a", "tests/b")], setting.allowances)


def test_budgets_have_one_spelling() -> None:
    budgets = map(parse_budget, ["tests/:5", "/workspace/src:1:deletions", ".:100"])
    assert checked_budgets(budgets) == (
        ChangeBudget("tests", 5),
        ChangeBudget("src", 1, deletions=True),
        ChangeBudget("", 100),
    )


@pytest.mark.parametrize(
    "texts",
    [
        ["tests"],
        ["tests:"],
        ["tests:x"],
        [":5"],
        ["tests:0"],
        [f"tests:{FILES_MAX + 1}"],
        ["tests:5:all"],
        ["../x:5"],
        ["/etc:5"],
        ["tests:5", "tests/:6"],
        [f"d{number}:1" for number in range(PREFIXES_MAX + 1)],
    ],
)
def test_a_budget_that_is_none_is_refused(texts: list[str]) -> None:
    with pytest.raises(BadRequest) as raised:
        checked_budgets(map(parse_budget, texts))
    assert (raised.value.code, raised.value.details) == ("invalid_prefix", {"field": "budgets"})
