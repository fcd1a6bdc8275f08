"""A directory of the user's as workspace: held, protected, and nothing of ours in it."""

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import Denied, InvalidPath, NotFound
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory
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
    with pytest.raises(Denied, match="readable only for its owner") as raised:
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
    directory.find_links()
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


def write(directory: HostDirectory, path: str, text: str = "") -> Path:
    file = directory.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "path",
    [".envrc", "sub/.envrc", ".git/hooks/pre-commit", ".git/config", "a/b/.vscode/tasks.json"],
)
def test_a_call_of_the_host_changes_no_host_executable(directory: HostDirectory, path: str) -> None:
    parts = tuple(path.split("/"))
    with pytest.raises(Denied) as raised:  # a new one
        directory.refuse_change(parts)
    write(directory, path)
    with pytest.raises(Denied):  # and one that is there
        directory.refuse_change(parts)
    assert (raised.value.code, bool(raised.value.hint)) == ("runs_on_the_host", True)


@pytest.mark.parametrize("path", ["main.py", "a/envrc", "x.pth"])
def test_a_call_of_the_host_changes_other_files(directory: HostDirectory, path: str) -> None:
    (directory.path / ".git").mkdir()
    directory.refuse_change(tuple(path.split("/")))


def test_links_protects_the_target_of_a_protected_symlink(directory: HostDirectory) -> None:
    write(directory, "config/envrc")
    (directory.path / ".envrc").symlink_to("config/envrc")
    links = directory.find_links()
    assert (links.aliases, links.protected) == ({"config/envrc"}, [".envrc"])
    with pytest.raises(Denied):
        directory.refuse_change(("config", "envrc"))


def test_links_ignores_a_target_outside_of_the_directory(
    directory: HostDirectory, tmp_path: Path
) -> None:
    (directory.path / ".vscode").symlink_to(tmp_path)
    assert directory.find_links().aliases == set()


def test_links_protects_the_second_name_of_a_protected_file(directory: HostDirectory) -> None:
    hook = write(directory, ".git/hooks/pre-commit")
    os.link(hook, directory.path / "notes.txt")
    found = hook.stat()
    assert directory.find_links().linked == {(found.st_dev, found.st_ino)}


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("[core]\n\thooksPath = tools/hooks\n", "tools/hooks"),
        ("[core]\n\tfsmonitor = ./tools/monitor --fast\n", "tools/monitor"),
        ('[filter "lint"]\n\tclean = python tools/clean.py %f\n', "tools/clean.py"),
        ("[include]\n\tpath = ../tools/gitconfig\n", "tools/gitconfig"),
        ("[core]\n\tbare = false\n", ""),
    ],
)
def test_links_protects_files_that_the_configuration_of_git_names(
    directory: HostDirectory, setting: str, path: str
) -> None:
    write(directory, ".git/config", setting)
    names = ("tools/hooks/pre-commit", "tools/monitor", "tools/clean.py", "tools/gitconfig")
    for name in names:
        write(directory, name)
    assert directory.find_links().aliases == ({path} if path else set())


@pytest.mark.parametrize(
    "hook",
    [
        "npm test && make check && pytest tests && cargo test\n",
        "ruff check src/a.py; black src; mypy -p src\n",
        "cd src && pytest .\n",
        "cd ..; cd .; cd /; pytest\n",
        'cd "$(git rev-parse --show-toplevel)" && exec make -C src\n',
        "python -c 'import src.a'\nsh src\n./src tests/ .\n",
        "PATH=$PWD:$PWD/node_modules/.bin:$PATH npx lint-staged\n",
        "for f in *; do cat $f; done\n",
    ],
)
def test_links_leaves_the_code_of_the_project_writable(directory: HostDirectory, hook: str) -> None:
    for name in ("src/a.py", "tests/a.py", "Makefile", "package.json", "a.txt"):
        write(directory, name)
    write(directory, ".git/hooks/pre-commit", hook)
    write(directory, ".pre-commit-config.yaml", "entry: ruff check src/a.py\nfiles: ^src/a.py\n")
    directory.find_links()
    for path in (("src", "b.py"), ("src", "a.py"), ("tests", "a.py"), ("Makefile",), ("a.txt",)):
        directory.refuse_change(path)


@pytest.mark.parametrize(
    ("path", "text", "aliases"),
    [
        (".lefthook.yml", "x:\n  run: python src/a.py\n", {"src/a.py"}),
        (".husky/pre-commit", '. "$(dirname "$0")/../tools/x"\n', {"tools/x"}),
        (".husky/_/pre-commit", "tools/x\n", {"tools/x"}),
        (".git/hooks/pre-commit", "tools/new\n", {"tools/new"}),
        (".git/hooks/pre-commit.sample", "tools/new\n", set()),
        (".git/hooks/pre-commit", "python src\n", {"src/__main__.py", "src/index.js"}),
        (".git/hooks/pre-commit", "flock x tools/x\n", {"tools/x"}),
        (".git/hooks/pre-commit", "$UNKNOWN/tools/x; $UNKNOWN/y/z\n", {"tools/x"}),
        (".git/hooks/pre-commit", "\0./x/y\n", set()),
    ],
)
def test_links_protects_files_that_hooks_execute(
    directory: HostDirectory, path: str, text: str, aliases: set[str]
) -> None:
    write(directory, "src/a.py")
    write(directory, "tools/x").chmod(0o755)
    write(directory, path, text)
    assert directory.find_links().aliases == aliases


@pytest.mark.parametrize("name", [".gitconfig", ".config/git/config"])
def test_links_applies_the_configuration_of_the_owner(
    directory: HostDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A service of root has another home than the owner of the directory."""
    home = tmp_path / "home"
    (home / name).parent.mkdir(parents=True)
    (home / name).write_text(
        "[core]\nhooksPath = hooks\nfsmonitor = tools/monitor\neditor = src\n"
        '[init]\ndefaultBranch = src\n[filter "lfs"]\nclean = git-lfs clean -- %f\n'
    )
    entry = pwd.struct_passwd(("owner", "x", ME, ME, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    write(directory, "src/a.py")
    links = directory.find_links()
    assert (links.aliases, links.drivers) == ({"hooks", "tools/monitor"}, False)


def test_a_link_above_a_file_that_is_not_there_yet_is_refused(directory: HostDirectory) -> None:
    write(directory, ".git/hooks/pre-commit", "tools/x\n")
    directory.find_links()
    directory.refuse_link(("other",))
    with pytest.raises(Denied):
        directory.refuse_link(("tools",))


def test_links_protects_hooks_of_the_directory_itself(directory: HostDirectory) -> None:
    write(directory, ".git/config", "[core] hooksPath = .\n")
    directory.find_links()
    directory.refuse_change(("main.py",))
    with pytest.raises(Denied):
        directory.refuse_change(("pre-commit",))


def test_links_keeps_an_alias_that_a_later_walk_does_not_find(
    directory: HostDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, "a/b/.git/config", "[core] hooksPath = tools\n")
    assert directory.find_links().aliases == {"a/b/tools"}
    monkeypatch.setattr("sbx.workspace.host_executable_links.ENTRIES_MAX", 0)
    links = directory.find_links()
    assert (links.aliases, links.complete) == ({"a/b/tools"}, False)


@pytest.mark.parametrize("turn", [1, 2, 5])
def test_links_looks_at_each_entry_of_a_large_directory(
    directory: HostDirectory, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    monkeypatch.setattr("sbx.workspace.host_executable_links._TURN", turn)
    for number in range(7):
        write(directory, f"{number}/a/.envrc.{number}")
        write(directory, f"{number}/.git/config")
    links = directory.find_links()
    expected = {
        f"{number}/{name}" for number in range(7) for name in (".git", f"a/.envrc.{number}")
    }
    assert (set(links.protected), len(links.protected)) == (expected, 14)
    assert links.complete


def test_links_protects_attributes_where_git_has_a_driver(directory: HostDirectory) -> None:
    directory.refuse_change((".gitattributes",))
    write(directory, ".git/config", '[filter "lint"]\n\tclean = lint %f\n')
    assert directory.find_links().drivers
    for path in ((".gitattributes",), ("sub", ".gitattributes")):
        with pytest.raises(Denied):
            directory.refuse_change(path)


def test_links_protects_each_symlink_on_the_way(directory: HostDirectory) -> None:
    write(directory, ".git/config", "[core]\n\thooksPath = tools/hooks\n")
    write(directory, "v1/hooks/pre-commit")
    (directory.path / "tools").symlink_to("v1")
    assert directory.find_links().aliases == {"tools", "v1/hooks"}


def test_links_protects_the_files_that_an_envrc_reads(directory: HostDirectory) -> None:
    write(directory, ".envrc", "dotenv\nsource_env_if_exists ./.private/env\n")
    assert directory.find_links().aliases == {".env", ".private/env"}


def test_links_protects_an_environment_by_its_path(directory: HostDirectory) -> None:
    write(directory, "a/env/pyvenv.cfg")
    assert directory.find_links().aliases == {"a/env"}


def test_links_reports_a_walk_that_met_its_limit(
    directory: HostDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write(directory, f"{number}.txt")
    monkeypatch.setattr("sbx.workspace.host_executable_links.ENTRIES_MAX", 10)
    assert not directory.find_links().complete
