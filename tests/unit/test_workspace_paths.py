"""The path rule, case by case."""

import pytest

from sbx.errors import InvalidPath
from sbx.workspace.paths import Location, WorkspaceArea, check_name, resolve


def reason(path: str, **how: bool) -> str:
    with pytest.raises(InvalidPath) as refused:
        resolve(path, **how)
    assert set(refused.value.details) == {"field", "reason"}
    assert refused.value.details["field"] == "path"
    return str(refused.value.details["reason"])


@pytest.mark.parametrize(
    ("path", "relative"),
    [
        ("a.txt", ("a.txt",)),
        ("dir/./b", ("dir", "b")),
        ("dir//b/", ("dir", "b")),
        ("a/../b", ("b",)),
        (".", ()),
        ("/workspace", ()),
        ("/workspace/x", ("x",)),
        ("//workspace//x", ("x",)),
        ("/sandbox/workspace/x/y", ("x", "y")),
        ("uploads", ("uploads",)),
        ("uploads/generated/x", ("uploads", "generated", "x")),
        ("temparea/x", ("temparea", "x")),
        (" ", (" ",)),
        ("...", ("...",)),
        ("%2e%2e/x", ("%2e%2e", "x")),
    ],
)
def test_resolve_routes_workspace_paths_to_files(path: str, relative: tuple[str, ...]) -> None:
    assert resolve(path) == Location(WorkspaceArea.FILES, relative)


@pytest.mark.parametrize(
    "path",
    [
        "uploads/temparea/x",
        "/workspace/uploads/temparea/x",
        "/sandbox/workspace/uploads/temparea/x",
        "uploads/./temparea//x",
        "a/../uploads/temparea/x",
        "uploads/temparea/d/../x",
    ],
)
def test_resolve_routes_the_uploads_to_their_own_root(path: str) -> None:
    assert resolve(path) == Location(WorkspaceArea.UPLOADS, ("x",))


def test_resolve_routes_the_uploads_directory_itself() -> None:
    assert resolve("uploads/temparea") == Location(WorkspaceArea.UPLOADS, ())


def test_resolve_routes_shared() -> None:
    assert resolve("shared/a/b") == Location(WorkspaceArea.SHARED, ("a", "b"))
    assert resolve("shared") == Location(WorkspaceArea.SHARED, ())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "empty_path"),
        ("/etc/passwd", "absolute_path"),
        ("/", "absolute_path"),
        ("/workspacex/y", "absolute_path"),
        ("/sandbox/x", "absolute_path"),
        ("/uploads/x", "absolute_path"),
        ("a\0b", "null_byte"),
        ("..", "path_traversal"),
        ("a/../../b", "path_traversal"),
        ("/workspace/../etc", "path_traversal"),
        ("uploads/temparea/../../../x", "path_traversal"),
        ("a\nb", "control_character"),
        ("a\x1b[31m", "control_character"),
        ("a\x7f", "control_character"),
        ("a\x9bb", "control_character"),
        ("\udcff", "not_utf8"),
        ("x" * 256, "name_too_long"),
        ("é" * 128, "name_too_long"),
        ("x/" * 2050, "name_too_long"),
    ],
)
def test_resolve_refuses_with_the_reason(path: str, expected: str) -> None:
    assert reason(path) == expected


@pytest.mark.parametrize(
    "path",
    [
        ".",
        "/workspace",
        "uploads",
        "uploads/temparea",
        "uploads/generated",
        "shared",
        "a/../shared",
    ],
)
def test_changing_a_mount_point_is_reserved(path: str) -> None:
    assert reason(path, changing=True) == "reserved"


def test_changing_an_upload_is_read_only() -> None:
    assert reason("uploads/temparea/x", changing=True) == "read_only"


def test_changing_generated_and_shared_files_is_allowed() -> None:
    assert resolve("uploads/generated/x", changing=True).part is WorkspaceArea.FILES
    assert resolve("shared/x", changing=True).part is WorkspaceArea.SHARED


def test_in_a_host_directory_uploads_lie_apart_and_no_name_is_reserved() -> None:
    assert resolve("/uploads/x", uploads_apart=True) == Location(WorkspaceArea.UPLOADS, ("x",))
    assert reason("/uploads/x", uploads_apart=True, changing=True) == "read_only"
    assert (
        resolve("uploads/temparea", uploads_apart=True, changing=True).part is WorkspaceArea.FILES
    )
    assert resolve("shared/x", uploads_apart=True).part is WorkspaceArea.FILES
    assert reason(".", uploads_apart=True, changing=True) == "reserved"


@pytest.mark.parametrize("name", ["data.csv", "Ünï.txt", " ", "...", "-rf", "x" * 255, "a:b*?"])
def test_check_name_keeps_a_plain_name_as_it_is(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "empty_path"),
        (".", "path_traversal"),
        ("..", "path_traversal"),
        ("a/b", "separator"),
        ("a\\b", "separator"),
        ("a\0", "null_byte"),
        ("a\tb", "control_character"),
        ("\ud800", "not_utf8"),
        ("é" * 128, "name_too_long"),
    ],
)
def test_check_name_refuses_with_the_reason(name: str, expected: str) -> None:
    with pytest.raises(InvalidPath) as refused:
        check_name(name)
    assert refused.value.details == {"field": "path", "reason": expected}
