"""Whether changes lie below named directories, and how those are spelled. Pure."""

import pytest

from sbx.errors import BadRequest
from sbx.protocol.changes import PREFIXES_MAX, checked_prefixes
from sbx.workspace.snapshots.manifest import FileNode, PlannedChange, within

FILE = FileNode("file", 0o644, 1, 1)


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
    assert within([PlannedChange(path, None, node)], ("tests", "docs/api")) is inside


def test_every_change_has_to_lie_within() -> None:
    one, other = PlannedChange("tests/a", FILE, None), PlannedChange("src/a", None, FILE)
    assert within([one], ("tests",))
    assert not within([one, other], ("tests",))
    assert not within([one], ())
    assert within([PlannedChange("tests/l", link(b"/etc"), None)], ("tests",)), "it is removed"


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
