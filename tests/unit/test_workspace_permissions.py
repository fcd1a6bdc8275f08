"""Permissions of files in a workspace, and files of another user that would give rights."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sbx.errors import BadRequest, Denied, InvalidPath, SbxError, TooLarge, Unavailable
from sbx.guest.guarded_paths import ITEMS
from sbx.guest.path_rules import PathRules
from sbx.workspace import host_executable_trees, rights
from sbx.workspace.edit import chmod
from sbx.workspace.host_executable_trees import find_below
from sbx.workspace.host_executables import path_rules
from sbx.workspace.tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree.at(tmp_path, view="/workspace")
    yield tree
    tree.close()


def code(tree: Tree, name: str, mode: Any, **how: bool) -> str:
    with pytest.raises(SbxError) as raised:
        chmod(tree, (name,), mode, **how)
    return raised.value.code


def test_mode_of_files_and_directories_is_set(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for name in ("file", "directory"):
        chmod(tree, (name,), 0o750)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o750


@pytest.mark.parametrize("mode", [True, -1, 0o10000, "644"])
def test_number_that_is_no_mode_is_refused(tree: Tree, mode: Any) -> None:
    assert code(tree, "file", mode) == BadRequest("", code="invalid_mode").code


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777])
def test_bits_that_give_rights_are_refused(tree: Tree, tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").touch(0o600)
    assert code(tree, "file", mode) == "set_id_refused"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_what_is_no_file_of_the_sandbox_keeps_its_mode(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InvalidPath, match="symlink"):
        chmod(tree, ("link",), 0o777)
    with pytest.raises(SbxError, match="fifo"):
        chmod(tree, ("fifo",), 0o777)
    foreign = Tree.at(tmp_path, view="/workspace", owner=(os.geteuid() + 1, os.getegid()))
    assert code(foreign, "file", 0o777) == "file_not_permitted"
    foreign.close()
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    assert code(tree, "file", 0o777, in_host_directory=True) == "file_not_permitted"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "fifo").stat().st_mode) == 0o600


# -- files that give rights ------------------------------------------------------------------------


def first(top: Path, deadline_s: float = 60.0) -> tuple[str, bool] | None:
    fd = os.open(top, os.O_PATH)
    try:
        found = rights._first(fd, os.geteuid(), time.monotonic() + deadline_s)
    finally:
        os.close(fd)
    return None if found is None else (os.fsdecode(found.name), found.is_socket)


def test_plain_files_and_links_give_no_rights(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/file").touch(0o755)
    (tmp_path / "link").symlink_to("/usr/bin/su")
    os.mkfifo(tmp_path / "fifo")
    assert first(tmp_path) is None


@pytest.mark.parametrize("bit", [stat.S_ISUID, stat.S_ISGID])
def test_file_with_a_set_id_bit_is_found(tmp_path: Path, bit: int) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/file").touch()
    (tmp_path / "below/file").chmod(0o755 | bit)
    assert first(tmp_path) == ("below/file", False)


def test_file_with_capabilities_and_one_that_cannot_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "getxattr", lambda *_, **__: b"capabilities")
    assert first(tmp_path) == ("file", False)

    def damaged(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EIO, "damaged")

    monkeypatch.setattr(os, "getxattr", damaged)
    with pytest.raises(OSError, match="damaged"):
        first(tmp_path)


def test_file_system_without_attributes_has_no_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "no attributes")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "getxattr", unsupported)
    assert first(tmp_path) is None


def test_directory_that_takes_too_long_to_look_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as raised:
        first(tmp_path, deadline_s=-1)
    assert raised.value.code == "workspace_too_large"


# -- host executables below a directory ------------------------------------------------------------


def below(tree: Tree, of: str, at: str | None = None) -> str | None:
    """Return the first path that the table protects."""
    place = None if at is None else tuple(at.split("/"))
    found = find_below(tree, tuple(of.split("/")), RULES, lambda parts: False, at=place)
    return None if found is None else "/".join(found[0])


RULES: PathRules = path_rules()


def test_name_counts_at_the_place_where_the_directory_will_lie(tree: Tree, tmp_path: Path) -> None:
    package = tmp_path / "node_modules/x"
    package.mkdir(parents=True)
    (package / ".envrc").touch()
    assert below(tree, "node_modules/x") is None
    assert below(tree, "node_modules/x", at="y") == "y/.envrc"
    assert below(tree, "node_modules/x/.envrc") is None


def test_link_to_the_quarantine_is_free_where_it_is(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/.envrc").symlink_to(f"{ITEMS}/{'0' * 16}")
    assert below(tree, "d") is None
    assert below(tree, "d", at="e") == "e/.envrc"


def test_link_may_not_lead_out_from_its_new_place_nor_name_a_parent(
    tree: Tree, tmp_path: Path
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/up").symlink_to("../x")
    (tmp_path / "a/b/absolute").symlink_to("/usr/bin/env")
    assert below(tree, "a/b", at="c") is None
    (tmp_path / "link").symlink_to("../x")
    (tmp_path / "inner").symlink_to("x")
    for of, at, answer in (
        ("link", "other", "symlink_leads_out"),
        ("a/b/up", "up", "symlink_leads_out"),
        ("inner", "org", "runs_on_the_host"),
    ):
        with pytest.raises(Denied) as raised:
            below(tree, of, at=at)
        assert raised.value.code == answer


def test_directory_with_too_many_entries_is_refused(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_executable_trees, "ENTRIES_MAX", 2)
    (tmp_path / "d").mkdir()
    for number in range(4):
        (tmp_path / f"d/{number}").touch()
    with pytest.raises(TooLarge) as raised:
        below(tree, "d")
    assert raised.value.code == "tree_too_large"
