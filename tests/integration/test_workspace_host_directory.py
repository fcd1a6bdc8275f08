"""A directory of the user's as workspace: held, protected, and nothing of ours in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import Denied, InvalidPath, NotFound
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory, Protection, protected_paths
from sbx.workspace.tree import Tree

ME = os.geteuid()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[HostDirectory]:
    (tmp_path / "project").mkdir()
    directory = HostDirectory.open(tmp_path / "project", jail_uid=ME)
    yield directory
    directory.close()


def test_a_directory_of_root_is_refused_for_a_jail_that_is_not_root() -> None:
    with pytest.raises(Denied) as raised:
        HostDirectory.open(Path("/usr"), jail_uid=12345)
    assert raised.value.code == "workspace_owned_by_root"
    assert raised.value.hint


def test_a_private_directory_is_no_uploads_for_a_jail_of_another_uid(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(Denied, match="read by its owner only") as raised:
        HostDirectory.open(tmp_path, jail_uid=12345, read_only=True)
    assert raised.value.code == "directory_unreadable"
    HostDirectory.open(tmp_path, jail_uid=ME, read_only=True).close()
    tmp_path.chmod(0o755)
    HostDirectory.open(tmp_path, jail_uid=12345, read_only=True).close()


def test_what_is_missing_or_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound):
        HostDirectory.open(tmp_path / "nothing", jail_uid=ME)
    with pytest.raises(InvalidPath, match="not a directory"):
        HostDirectory.open(tmp_path / "file", jail_uid=ME)


def test_nothing_is_created_in_it(directory: HostDirectory) -> None:
    tree = directory.tree()
    Files(tree, None, uploads_apart=True).list()
    protected_paths(directory)
    assert os.listdir(directory.path) == []
    tree.close()


def test_what_the_caller_writes_is_all_that_appears(directory: HostDirectory) -> None:
    tree = directory.tree()
    Files(tree, None, uploads_apart=True).write("uploads/temparea/x", b"mine")
    assert (directory.path / "uploads/temparea/x").read_bytes() == b"mine"
    assert os.listdir(directory.path) == ["uploads"]
    tree.close()


def test_uploads_of_a_host_directory_are_read_at_slash_uploads(
    directory: HostDirectory, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/x").write_text("up")
    with directory.tree() as tree, Tree.at(tmp_path / "given", view="/uploads") as uploads:
        files = Files(tree, uploads, uploads_apart=True)
        assert files.read("/uploads/x") == b"up"
        assert [entry.path for entry in files.list("/uploads")] == ["/uploads/x"]


def test_protected_paths_pins_parents_of_what_runs_on_the_host(directory: HostDirectory) -> None:
    (directory.path / ".git/hooks").mkdir(parents=True)
    (directory.path / ".git/config").touch()
    (directory.path / ".envrc").touch()
    assert protected_paths(directory) == Protection(
        pinned=(".git",), read_only=(".git/hooks", ".git/config", ".envrc")
    )


def test_protected_paths_of_a_worktree_is_its_git_file(directory: HostDirectory) -> None:
    (directory.path / ".git").write_text("gitdir: /elsewhere")
    assert protected_paths(directory) == Protection(read_only=(".git",))


def test_protected_paths_follows_no_symlink(directory: HostDirectory, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/hooks").mkdir(parents=True)
    (directory.path / ".git").symlink_to(tmp_path / "elsewhere")
    (directory.path / ".vscode").symlink_to(tmp_path)
    assert protected_paths(directory) == Protection(symlinks=(".git", ".vscode"))


def test_protected_paths_of_a_plain_directory_are_none(directory: HostDirectory) -> None:
    assert protected_paths(directory) == Protection()
