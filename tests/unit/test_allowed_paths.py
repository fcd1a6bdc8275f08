"""The rule about host directories that no sandbox may see, as tables of facts."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from sbx.errors import Denied
from sbx.forbidden_directories import (
    DATA_MARKER,
    SYSTEM_PATHS,
    DirectoryFacts,
    ForbiddenPlace,
    HomeDirectory,
    HostDirectoryFacts,
    look,
    refusal,
)
from sbx.linux import mountinfo
from sbx.linux.mountinfo import MountInfo, Source
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import OwnPaths
from sbx.workspace.host_directory import executed_paths

ANN, BEN = 1000, 1001
DISK = "8:1"


def home(path: str, user: str, uid: int, source: Source | None = None) -> HomeDirectory:
    return HomeDirectory(
        ForbiddenPlace(path, source), user, uid, identities=frozenset({(8, hash(path))})
    )


HOST = HostDirectoryFacts(
    caller=ANN,
    homes=(
        home("/root", "root", 0),
        home("/home/ann", "ann", ANN, (DISK, "/home/ann")),
        home("/home/ben", "ben", BEN),
        home("/var/lib/jenkins", "jenkins", 110),
        home("/bin", "sync", 4),
    ),
    private=(ForbiddenPlace("/srv/sbx/data"), ForbiddenPlace("/srv/sbx/run/sbx.sock")),
    code=(ForbiddenPlace("/work/policies"), ForbiddenPlace("/work/lab/.venv/lib")),
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
    below = tuple(
        DirectoryFacts(ForbiddenPlace(f"{path}/m{at}", mount), owner)
        for at, mount in enumerate(mounts)
    )
    return DirectoryFacts(ForbiddenPlace(path, source), owner, identity, below, shielded)


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
    answer = refusal(directory(path), HOST, read_only=read_only)
    if reason is None:
        assert (answer is None) is read_only  # a cache may be read, not changed
    else:
        assert (answer or "").startswith(reason)


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
    host = HostDirectoryFacts(caller, (home("/home/ben", "ben", BEN),))
    answer = refusal(directory("/home/ben/shared", owner), host)
    assert answer == (None if allowed else "it is in the home of ben, and belongs to another user")
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
    answer = refusal(facts, HOST)
    assert (answer is None) if reason is None else (reason in (answer or ""))


# A host whose / is one file system, with another one for the home of a third user.
ONE_DISK = replace(
    HOST,
    programs=(
        ForbiddenPlace("/home/ann/tools", (DISK, "/home/ann/tools")),
        ForbiddenPlace("/", (DISK, "/")),
    ),
    sources={
        **{path: (DISK, path) for path in SYSTEM_PATHS},
        **dict.fromkeys(("/dev", "/dev/shm"), ("0:6", "/")),
        "/dev/shm": ("0:23", "/"),
        "/proc": ("0:21", "/"),
        "/run": ("0:24", "/"),
    },
)
REFUSED_SOURCES: dict[str, tuple[Source, str]] = {
    "cron": ((DISK, "/etc/cron.d"), "in /etc, a directory of the system"),
    "ssh": ((DISK, "/etc/ssh"), "in /etc, a directory of the system"),
    "a program": ((DISK, "/usr/local/bin"), "in /usr, a directory of the system"),
    "the host": ((DISK, "/"), "the whole host"),
    "all of var": ((DISK, "/var"), "several users or programs share"),
    "processes": (("0:21", "/"), "in /proc, a directory of the system"),
    "devices": (("0:6", "/"), "in /dev, a directory of the system"),
    "sockets": (("0:24", "/user/1000"), "in /run, a directory of the system"),
    "keys": ((DISK, "/home/ann/.ssh"), "/home/ann/.ssh, and a hidden directory"),
    "start-up files": ((DISK, "/home/ann/.config/x"), "in /home/ann/.config, and a hidden"),
    "programs": ((DISK, "/home/ann/tools/x"), "in /home/ann/tools, a directory of PATH"),
    "home programs": ((DISK, "/home/ann/bin"), "in /home/ann/bin, whose programs ann executes"),
}
ALLOWED_SOURCES: dict[str, Source] = {
    "a project of /srv": (DISK, "/srv/app"),
    "a project of a home": (DISK, "/home/ann/src/app"),
    "another file system": ("8:2", "/"),
    "the same path of another file system": ("8:2", "/etc"),
    "a tmpfs": ("0:77", "/"),
    "shared memory": ("0:23", "/x"),
    "a service's project": (DISK, "/var/www/app"),
}


@pytest.mark.parametrize("what", REFUSED_SOURCES)
@pytest.mark.parametrize("place", ["/srv/rp", "/home/ann/rp"])
def test_a_mount_is_judged_by_its_source(what: str, place: str) -> None:
    """`mount --bind /etc/cron.d rp/e` gave code in rp write access to root's cron."""
    source, reason = REFUSED_SOURCES[what]
    answer = refusal(directory(place, mounts=[source]), ONE_DISK)
    assert answer is not None
    assert answer.startswith(f"it contains the mount {place}/m0, which ")
    assert reason in answer
    assert reason in (refusal(directory(place, source=source), ONE_DISK) or "")


@pytest.mark.parametrize("what", ALLOWED_SOURCES)
def test_a_mount_of_a_project_is_allowed(what: str) -> None:
    source = ALLOWED_SOURCES[what]
    for facts in (directory("/srv/rp", mounts=[source]), directory("/srv/rp", source=source)):
        assert refusal(facts, ONE_DISK) is None


def test_a_directory_on_the_file_system_of_the_root_is_allowed() -> None:
    for path in ("/srv/app", "/home/ann/app", "/tmp/x", "/var/tmp/x", "/data"):
        assert refusal(directory(path, source=(DISK, path)), ONE_DISK) is None


def test_in_a_container_the_volumes_of_the_host_are_allowed() -> None:
    overlay = replace(
        HostDirectoryFacts(0, (home("/root", "root", 0, ("0:50", "/root")),)),
        sources={path: ("0:50", path) for path in SYSTEM_PATHS},
    )
    volume = (DISK, "/var/lib/docker/volumes/x/_data")
    assert refusal(directory("/work", source=volume), overlay) is None
    assert refusal(directory("/work/app", source=("0:50", "/work/app")), overlay) is None
    assert refusal(directory("/work", source=("0:50", "/etc")), overlay) is not None


@pytest.mark.parametrize(
    ("path", "shielded", "reason"),
    [
        ("/home/ann/tools", (), "it is in /home/ann/tools, a directory of PATH"),
        ("/home/ann/tools/pg", (), "it is in /home/ann/tools, a directory of PATH"),
        ("/home/ann/lab", (), "it contains /home/ann/lab/bin, a directory of PATH"),
        ("/home/ann/lab", ("bin",), None),
        ("/home/ann/other", (), None),
    ],
)
def test_a_directory_of_path_is_refused_or_shielded(
    path: str, shielded: tuple[str, ...], reason: str | None
) -> None:
    """`~/tools` was on PATH and a workspace: code inside wrote the user's next `pg`."""
    programs = (
        ForbiddenPlace("/home/ann/tools"),
        ForbiddenPlace("/home/ann/lab/bin"),
        ForbiddenPlace("/home/ann"),
    )
    host = replace(HOST, programs=programs)
    answer = refusal(directory(path, shielded=shielded), host)
    assert (answer is None) if reason is None else (answer or "").startswith(reason)
    assert refusal(directory(path, shielded=shielded), host, read_only=True) is None


def test_a_mount_on_shielded_code_is_no_reason() -> None:
    code = (ForbiddenPlace("/work/lab/.venv/lib", ("8:9", "/lib")),)
    mounted = directory("/work/lab", mounts=[("8:9", "/")], shielded=("m0", ".venv"))
    assert refusal(mounted, replace(HOST, code=code)) is None
    assert refusal(replace(mounted, shielded=()), replace(HOST, code=code)) is not None


def test_facts_survive_their_json() -> None:
    facts = json.loads(json.dumps(ONE_DISK.to_json()))
    assert HostDirectoryFacts.from_json(facts) == ONE_DISK


MOUNTS = (
    MountInfo("/", "8:1", "/"),
    MountInfo("/srv/rp/e", "8:1", "/etc/cron.d"),
    MountInfo("/home", "8:2", "/"),
    MountInfo("/home", "8:3", "/@home"),
)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/srv/rp", ("8:1", "/srv/rp")),
        ("/srv/rp/e/daily", ("8:1", "/etc/cron.d/daily")),
        ("/home/ann", ("8:3", "/@home/ann")),
        ("/", ("8:1", "/")),
    ],
)
def test_a_path_has_the_source_of_the_last_mount_above(path: str, source: Source) -> None:
    assert mountinfo.source_of(path, MOUNTS) == source
    assert path in mountinfo.paths_of(source, MOUNTS)


def test_a_source_is_seen_at_each_of_its_paths_that_no_mount_hides() -> None:
    assert list(mountinfo.paths_of(("8:1", "/etc/cron.d"), MOUNTS)) == ["/etc/cron.d", "/srv/rp/e"]
    assert list(mountinfo.paths_of(("8:2", "/ann"), MOUNTS)) == []


def test_mounts_are_read_with_their_escapes() -> None:
    line = "36 35 98:0 /a\\040b /mnt\\134x rw,noatime master:1 - ext4 /dev/root rw\n"
    assert mountinfo.parse([line]) == (MountInfo("/mnt\\x", "98:0", "/a b", "ext4", "/dev/root"),)


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


def test_a_data_directory_is_known_by_its_marker(tmp_path: Path) -> None:
    """`data_dir` in ~/.config/sbx/sbx.toml was not known to `sbx run --workspace`."""
    inside = tmp_path / "data/sandboxes/x"
    inside.mkdir(parents=True)
    allowed_paths.check(inside, OwnPaths())
    (tmp_path / "data" / DATA_MARKER).touch()
    for path in (inside, tmp_path / "data"):
        assert f"it is in {tmp_path}/data, a data directory of sbx" in refused(path)
    fd = os.open(inside, os.O_PATH)
    try:
        mounts = (MountInfo("/", "8:1", "/"), MountInfo(str(inside), "8:1", f"{tmp_path}/data"))
        assert look(fd, mounts).data_directory == f"{tmp_path}/data"
    finally:
        os.close(fd)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with entries of PATH: plain, by symlinks, missing, relative and empty."""
    top = tmp_path / "project"
    (top / "node_modules/.bin").mkdir(parents=True)
    (top / "tools/linked").mkdir(parents=True)
    (top / "first").symlink_to("second")
    (top / "second").symlink_to(top / "tools")
    names = ("node_modules/.bin", "first/linked", "missing/bin")
    entries = [*(str(top / name) for name in names), "", ".", "bin", os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(entries))
    return top


def test_a_directory_of_path_in_a_workspace_is_protected(on_path: Path) -> None:
    shielded = executed_paths(on_path)
    assert shielded == ("first", "missing/bin", "node_modules/.bin", "second", "tools/linked")
    allowed_paths.check(on_path, OwnPaths())
    for below in ("node_modules/.bin", "tools/linked"):
        assert "a directory of PATH" in refused(on_path / below)
    with pytest.raises(Denied):
        allowed_paths.check(on_path, OwnPaths(), guarded=False)
    allowed_paths.check(on_path / "tools/linked", OwnPaths(), read_only=True)
