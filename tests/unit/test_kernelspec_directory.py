"""Which directory may be a notebook's workspace, and where its connection file may not lie."""

import os
import pwd
import sys
from pathlib import Path

import pytest

from sbx.errors import Denied, NotFound
from sbx.jupyter import directory
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.directory import check_apart, resolve
from sbx.workspace.host_directory import HostDirectory, own_code

CONNECTION = ConnectionInfo(key=b"k")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with Jupyter's directories in it, as they usually lie."""
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("DATA", "CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(home / "jupyter" / name.lower()))
    return home


def refused(path: Path, *private: Path) -> str:
    with pytest.raises(Denied) as raised:
        resolve(path, private)
    assert raised.value.hint
    return raised.value.code


def test_a_project_is_taken_by_the_path_without_symlinks(home: Path) -> None:
    (home / "link").symlink_to(home / "project")
    assert resolve(home / "link", ()) == home / "project"
    assert resolve(home / "project" / ".." / "project", ()) == home / "project"


def test_a_home_and_what_holds_it_is_too_wide(home: Path) -> None:
    (home / "project" / "all").symlink_to("/")
    for path in (home, home.parent, Path("/"), home / "project" / "all"):
        assert refused(path) == "directory_forbidden"


def test_the_real_home_counts_whatever_the_environment_says(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    try:
        real = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pytest.skip("this user has no entry in /etc/passwd")
    assert refused(real) == "directory_forbidden"


def test_a_user_without_any_home_may_have_a_notebook(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 64_123)
    assert resolve(home / "project", ()) == home / "project"


def test_what_decides_how_kernels_run_is_neither_held_nor_lived_in(home: Path) -> None:
    inside = home / "project" / "policies"
    assert refused(home / "project", inside) == "directory_forbidden"
    (home / "jupyter" / "data" / "kernels").mkdir(parents=True)
    assert refused(home / "jupyter") == "directory_forbidden"
    assert refused(home / "jupyter" / "data" / "kernels") == "directory_forbidden"
    assert refused(Path(directory.__file__).parent) == "directory_forbidden"


def test_a_directory_that_is_not_there_is_said_so(home: Path) -> None:
    with pytest.raises(NotFound):
        resolve(home / "project" / "gone", ())


def test_the_environment_that_runs_us_may_lie_within_and_is_read_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .venv in the project is how most people have it; what is in it runs on the host."""
    project, venv = home / "project", home / "project" / "work" / ".venv"
    (venv / "lib").mkdir(parents=True)
    monkeypatch.setattr("sbx.workspace.host_directory._homes_of_ours", lambda: {str(venv)})
    assert resolve(project, (venv / "share",)) == project
    assert own_code(project) == ("work/.venv",)
    assert own_code(venv) == own_code(home / "proj") == ()
    with HostDirectory.open(project, jail_uid=os.geteuid()) as held:
        assert held.find_links().complete
        assert "work/.venv" in held.rules.aliases
        with pytest.raises(Denied):
            held.refuse_change(("work", ".venv", "lib", "sitecustomize.py"))


def test_this_very_environment_is_known(home: Path) -> None:
    above = Path(os.path.realpath(sys.prefix)).parent
    assert os.path.basename(os.path.realpath(sys.prefix)) in own_code(above)


def test_a_connection_file_in_the_workspace_is_refused(home: Path) -> None:
    project = home / "project"
    (home / "link").symlink_to(project)
    check_apart(project, home / "kernel.json", CONNECTION)
    for file in (project / "k.json", project / "new" / "k.json", home / "link" / "k.json"):
        with pytest.raises(Denied) as raised:
            check_apart(project, file, CONNECTION)
        assert raised.value.code == "connection_in_workspace"


def test_sockets_in_the_workspace_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = home / "project"
    monkeypatch.chdir(project)
    for ip in ("kernel-ipc", str(project / "kernel-ipc")):
        with pytest.raises(Denied):
            check_apart(project, home / "k.json", ConnectionInfo(key=b"k", transport="ipc", ip=ip))
    check_apart(project, home / "k.json", ConnectionInfo(key=b"k", transport="ipc", ip=f"{home}/k"))
    check_apart(project, home / "k.json", ConnectionInfo(key=b"k", ip="kernel-ipc"))  # tcp: a host
