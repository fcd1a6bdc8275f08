"""A directory of the host as /workspace, and one as the uploads: seen live, and left unharmed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbx
from sbx import Sandbox
from sbx.errors import Conflict, Denied, NotFound

OWNER = 4242


@pytest.fixture(scope="module", autouse=True)
def closed_after() -> Iterator[None]:
    yield
    sbx.close()


@pytest.fixture
def project(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Path:
    """A project of an ordinary user, with what would run on the host some day."""
    top = own_temporary_directory / f"project-{abs(hash(request.node.name))}"
    (top / ".git" / "hooks").mkdir(parents=True)
    (top / ".git" / "config").write_text("[core]\n")
    (top / ".envrc").write_text("")
    (top / "main.py").write_text("print('mine')\n")
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER)
    return top


@pytest.mark.full_tier
def test_code_works_on_the_host_s_own_files(project: Path) -> None:
    with Sandbox(workspace=project) as box:
        run = box.run("%run main.py\nopen('new.txt', 'w').write('made inside')")
        assert run.stdout == "mine\n"
        assert (project / "new.txt").read_text() == "made inside"
        (project / "later.txt").write_text("made outside")
        assert box.run("open('later.txt').read()").result == "'made outside'"
        assert box.files.read("later.txt") == "made outside"
        box.files.write("by_api.txt", "x")
    owners = {path.stat().st_uid for path in (project / "new.txt", project / "by_api.txt")}
    assert owners == {project.stat().st_uid}


def test_nothing_of_ours_is_written_into_it(project: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (project, *project.rglob("*"))}
    with Sandbox(workspace=project) as box:
        box.run("import json, matplotlib; x = 1")
        box.shell("true")
        assert box.run("import os; os.environ['HOME']").result == "'/home/sandbox'"
        assert box.run("open(os.path.expanduser('~/x'), 'w').write('ok')").ok
    after = {path: path.stat().st_mtime_ns for path in (project, *project.rglob("*"))}
    assert after == before


@pytest.mark.full_tier
@pytest.mark.parametrize("path", [".git/hooks/post-checkout", ".git/config", ".envrc"])
def test_what_would_run_on_the_host_is_read_only(project: Path, path: str) -> None:
    with Sandbox(workspace=project) as box:
        run = box.run(f"open({path!r}, 'w').write('planted')")
        assert run.error is not None
        assert run.error.name == "OSError"
        assert box.run("import os; os.rename('.git', 'moved')").status == "error"
        assert box.run("open('.git/index', 'w')").status == "error"  # git trusts its paths


def test_uploads_lie_beside_it(project: Path) -> None:
    with Sandbox(workspace=project) as box:
        box.uploads.put_bytes("a.csv", b"1,2\n")
        assert box.run("open('/uploads/a.csv').read()").result == "'1,2\\n'"
        assert box.run("open('/uploads/b.csv', 'w')").status == "error"
    assert not (project / "uploads").exists()


def test_uploads_never_lie_within_it(project: Path) -> None:
    """A directory `uploads/temparea` of the project used to be the mount point. Code inside renamed
    its parent and made a false one."""
    place = project / "uploads" / "temparea"
    place.mkdir(parents=True)
    with Sandbox(workspace=project) as box:
        upload = box.uploads.put_bytes("a.csv", b"1,2\n")
        assert upload.path == "/uploads/a.csv"
        assert box.run(f"open({upload.path!r}).read()").result == "'1,2\\n'"
    assert list(place.iterdir()) == []


def test_a_directory_as_uploads_is_read_only_for_all(project: Path) -> None:
    with Sandbox(uploads=project) as box:
        path = "/workspace/uploads/temparea/main.py"
        assert box.run(f"open({path!r}).read()").result == "\"print('mine')\\n\""
        assert box.run(f"open({path!r}, 'a')").status == "error"
        assert box.files.read("uploads/temparea/main.py") == "print('mine')\n"
        with pytest.raises(Denied) as raised:
            box.uploads.put_bytes("a", b"")
        assert (raised.value.code, bool(raised.value.hint)) == ("uploads_mounted", True)


def test_it_has_one_conversation(project: Path) -> None:
    with Sandbox(workspace=project) as box:
        with pytest.raises(Conflict) as raised:
            box.conversation("other")
        assert raised.value.code == "workspace_not_shared"


def test_a_link_out_of_it_leads_nowhere(project: Path) -> None:
    (project / "link").symlink_to("/etc/shadow")
    (project / "out").symlink_to("/")
    with Sandbox(workspace=project) as box:
        assert box.run("open('link')").status == "error"
        for path in ("link", "out/etc/passwd"):
            with pytest.raises(sbx.SbxError):
                box.files.read(path)


def test_a_directory_that_is_not_there(project: Path) -> None:
    with pytest.raises(NotFound):
        Sandbox(workspace=project / "missing")
    with pytest.raises(NotFound):
        Sandbox(uploads=project / "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root has what it takes: test_root_owned.py")
def test_a_directory_of_root_is_refused_where_another_user_runs_sbx() -> None:
    with pytest.raises(Denied) as raised:
        Sandbox(workspace="/usr/share")
    assert (raised.value.code, bool(raised.value.hint)) == ("workspace_owned_by_root", True)


def test_a_directory_that_is_replaced_before_its_jail_starts_is_not_mounted(
    project: Path, own_temporary_directory: Path
) -> None:
    other = own_temporary_directory / f"{project.name}-other"
    other.mkdir()
    with Sandbox(workspace=project) as box:
        project.rename(other / "original")
        other.rename(project)
        with pytest.raises(sbx.SbxError):
            box.run("1")
