"""The path rule holds for any text at all."""

import posixpath

from hypothesis import given
from hypothesis import strategies as st

from sbx.errors import InvalidPath
from sbx.workspace.paths import WorkspaceArea, check_name, resolve

ROOTS = {
    WorkspaceArea.FILES: "/workspace",
    WorkspaceArea.UPLOADS: "/workspace/uploads/temparea",
    WorkspaceArea.SHARED: "/workspace/shared",
}
hostile = st.lists(
    st.sampled_from(
        ["..", ".", "", "/", "a", "workspace", "sandbox", "uploads", "temparea", "shared", "\0"]
    )
    | st.text(max_size=5)
).map("/".join)


@given(hostile | st.text())
def test_resolve_gives_plain_components_or_refuses(path: str) -> None:
    try:
        location = resolve(path)
    except InvalidPath as error:
        assert error.details["reason"]  # noqa: PT017  (most of these paths are refused)
        return
    for part in location.relative:
        assert part not in ("", ".", "..")
        assert not set(part) & {"/", "\0", "\n"}
        assert 1 <= len(part.encode()) <= 255


@given(hostile.filter(lambda path: path.strip("/") == path))
def test_resolve_means_what_a_posix_system_means_by_the_text(path: str) -> None:
    try:
        location = resolve(path)
    except InvalidPath:
        return
    meant = posixpath.normpath(posixpath.join("/workspace", path))
    assert posixpath.join(ROOTS[location.part], *location.relative) == meant
    assert location == resolve(f"/workspace/{path}") == resolve(f"/sandbox/workspace/{path}")


@given(hostile)
def test_what_may_be_changed_may_be_read_in_the_same_place(path: str) -> None:
    try:
        location = resolve(path, changing=True)
    except InvalidPath:
        return
    assert location == resolve(path)
    assert location.part is not WorkspaceArea.UPLOADS
    assert location.relative


@given(st.text())
def test_check_name_gives_one_component_byte_for_byte_or_refuses(name: str) -> None:
    try:
        kept = check_name(name)
    except InvalidPath:
        return
    assert kept == name
    assert posixpath.basename(name) == name
    assert name not in (".", "..")
    assert len(name.encode()) <= 255
