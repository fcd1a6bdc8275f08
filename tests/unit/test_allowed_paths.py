"""The rule about host directories that no sandbox may see, as tables of facts."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from sbx.errors import Denied
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import (
    DirectoryFacts,
    Home,
    HostFacts,
    OwnPaths,
    Place,
    Source,
    parse_mounts,
    refusal,
)

ANN, BEN = 1000, 1001
DISK = "8:1"


def home(path: str, user: str, uid: int, source: Source | None = None) -> Home:
    return Home(Place(path, source), user, uid, identities=frozenset({(8, hash(path))}))


HOST = HostFacts(
    caller=ANN,
    homes=(
        home("/root", "root", 0),
        home("/home/ann", "ann", ANN, (DISK, "/home/ann")),
        home("/home/ben", "ben", BEN),
        home("/var/lib/jenkins", "jenkins", 110),
        home("/bin", "sync", 4),
    ),
    private=(Place("/srv/sbx/data"), Place("/srv/sbx/run/sbx.sock")),
    code=(Place("/work/policies"), Place("/work/lab/.venv/lib")),
    temporary="/home/ann/.cache/tmp",
)


def directory(
    path: str,
    owner: int = ANN,
    *,
    source: Source | None = None,
    identity: tuple[int, int] | None = None,
    mounts: Iterable[Source] = (),
    shielded: tuple[str, ...] = (),
) -> DirectoryFacts:
    return DirectoryFacts(Place(path, source), owner, identity, tuple(mounts), shielded)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/", "it is the whole host"),
        ("/home", "it contains the home of ann, /home/ann"),
        ("/home/ann", "it is the home of ann"),
        ("/root", "it is the home of root"),
        ("/var/lib", "it contains the home of jenkins, /var/lib/jenkins"),
        ("/home/ann/.ssh", "it is /home/ann/.ssh, and a hidden directory"),
        ("/home/ann/.config/nvim", "it is in /home/ann/.config, and a hidden directory"),
        ("/home/ann/.local/share/x", "it is in /home/ann/.local, and a hidden directory"),
        ("/home/ann/.cursor/worktrees", "it is in /home/ann/.cursor, and a hidden directory"),
        ("/home/ann/.cache", "it is /home/ann/.cache, and a hidden directory"),
        ("/home/ann/.cache/tmp", None),
        ("/srv/sbx", "it contains /srv/sbx/data, which belongs to sbx"),
        ("/srv/sbx/data/sandboxes", "it is in /srv/sbx/data, which belongs to sbx"),
        ("/srv/sbx/run", "it contains /srv/sbx/run/sbx.sock, which belongs to sbx"),
        ("/tmp", "it is a directory of the system that several users or programs share"),
        ("/proc/1", "it is in /proc, a directory of the system"),
        ("/run/user/1000", "it is in /run, a directory of the system"),
    ],
)
def test_a_directory_is_refused_with_its_reason(
    path: str, reason: str | None, read_only: bool
) -> None:
    told = refusal(directory(path), HOST, read_only=read_only)
    if reason is None:
        assert (told is None) is read_only  # a cache may be read, not changed
    else:
        assert (told or "").startswith(reason)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/usr", "it is in /usr"),
        ("/usr/local/bin", "it is in /usr"),
        ("/etc/nginx", "it is in /etc"),
        ("/var/spool/cron", "it is in /var/spool"),
        ("/var/lib/docker/volumes", "it is in /var/lib"),
        ("/home/ann/bin", "it is in /home/ann/bin, whose programs ann executes"),
        ("/work", "it contains /work/policies, which decides what"),
        ("/work/policies/more", "it is in /work/policies, which decides what"),
        ("/work/lab", "it contains /work/lab/.venv/lib, which decides what"),
    ],
)
def test_the_system_and_code_may_be_shown_read_only(path: str, reason: str) -> None:
    assert (refusal(directory(path, 0), HOST) or "").startswith(reason)
    assert refusal(directory(path, 0), HOST, read_only=True) is None


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/home/ann/project",
            "/home/ann/a/.hidden/b",
            "/root/project",
            "/home/ann/.x/worktrees/b",
        ),
        *("/var/www/app", "/var/tmp/x", "/tmp/x", "/srv/app", "/opt/app", "/mnt/disk", "/data"),
        *("/workspaces/app", "/usr/src/app", "/var/lib/jenkins/workspace/app", "/dev/shm/x"),
        *("/run/media/ann/stick", "/home/annette", "/home/ann/.cache/tmp/pytest"),
    ],
)
def test_a_place_where_people_keep_projects_is_allowed(path: str) -> None:
    assert refusal(directory(path), HOST) is None


def test_read_only_code_inside_the_directory_is_no_reason() -> None:
    assert refusal(directory("/work/lab", shielded=(".venv",)), HOST) is None


@pytest.mark.parametrize(
    ("caller", "owner", "allowed"),
    [(ANN, BEN, False), (ANN, ANN, True), (BEN, BEN, True), (0, BEN, True), (ANN, 0, False)],
)
def test_only_its_owner_and_root_use_a_directory_of_another_home(
    caller: int, owner: int, allowed: bool
) -> None:
    host = HostFacts(caller, (home("/home/ben", "ben", BEN),))
    told = refusal(directory("/home/ben/shared", owner), host)
    assert told == (None if allowed else "it is in the home of ben, and belongs to another user")
    assert refusal(directory("/home/ben/shared", owner), host, read_only=True) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (directory("/mnt/x", source=(DISK, "/home/ann")), "the home of ann"),
        (directory("/mnt/x", source=(DISK, "/home")), "the home of ann"),
        (directory("/mnt/x", source=(DISK, "/")), "the home of ann"),
        (directory("/mnt/x", source=(DISK, "/home/ann/.ssh")), "/home/ann/.ssh"),
        (directory("/mnt/x", mounts=[(DISK, "/home/ann")]), "the home of ann"),
        (directory("/mnt/x", mounts=[("0:9", "/"), (DISK, "/")]), "the home of ann"),
        (directory("/mnt/x", identity=(8, hash("/home/ann"))), "by another path"),
        (directory("/mnt/x", source=(DISK, "/home/ann/project")), None),
        (directory("/mnt/x", source=("8:2", "/home/ann")), None),
        (directory("/mnt/x", mounts=[(DISK, "/home/ann/project")]), None),
    ],
)
def test_a_bind_mount_does_not_hide_a_home(facts: DirectoryFacts, reason: str | None) -> None:
    told = refusal(facts, HOST)
    assert (told is None) if reason is None else (reason in (told or ""))


def test_mounts_are_read_with_their_escapes() -> None:
    line = "36 35 98:0 /a\\040b /mnt\\134x rw,noatime master:1 - ext4 /dev/root rw\n"
    [mount] = parse_mounts([line])
    assert (mount.device, mount.root, mount.point) == ("98:0", "/a b", "/mnt\\x")


# -- on the disk -----------------------------------------------------------------------------------


def refused(path: Path, *private: Path) -> str:
    with pytest.raises(Denied) as raised:
        allowed_paths.check(path, OwnPaths(private))
    assert raised.value.code == "directory_forbidden"
    assert raised.value.hint is not None
    return raised.value.message


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    (home / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_a_home_is_known_by_the_environment_and_through_symlinks(
    own_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(own_home)
    for path in (own_home, tmp_path, tmp_path / "link", own_home / ".ssh"):
        assert "cannot be shown to a sandbox" in refused(path)
    (own_home / "project/link").symlink_to(own_home / ".ssh")
    assert ".ssh" in refused(own_home / "project/link")
    allowed_paths.check(own_home / "project", OwnPaths())


def test_the_directories_of_sbx_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a/data").mkdir(parents=True)
    assert "belongs to sbx" in refused(tmp_path / "a", tmp_path / "a/data")
    assert "belongs to sbx" in refused(tmp_path / "a/data", tmp_path / "a/data")


def test_a_missing_directory_is_left_to_the_caller(tmp_path: Path) -> None:
    allowed_paths.check(tmp_path / "missing", OwnPaths())
