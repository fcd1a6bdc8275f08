"""Directories of root as a workspace: through idmapped mounts, and the refusals around them."""

import asyncio
import os
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from persistent_sandboxes import open_service

from sbx import Runtime, Settings
from sbx.errors import BadRequest, Broken, Denied
from sbx.isolation import userns
from sbx.linux import renameat2
from sbx.runtime import sandbox as sandboxes
from sbx.runtime.sandbox import AsyncSandbox
from sbx.service.projects.sessions import OpenSession
from sbx.service.service import Service
from tests.tiers import rows

pytestmark = pytest.mark.needs("root")
OTHER = 4242
PATIENCE_S = 60.0
PLAIN = {".": 0o700, "main.py": 0o644, "sub": 0o755, "sub/data": 0o600}


@contextmanager
def mounted(top: Path, kind: str) -> Iterator[Path]:
    """A new file system of this kind, below `top`."""
    place = top / f"of-{kind}"
    place.mkdir()
    words = ["-t", kind, "-o", "mode=0755", "sbx-test"]
    if kind == "overlay":
        for name in ("lower", "upper", "work"):
            (top / name).mkdir()
        layers = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
        words = ["-t", kind, "-o", layers, "sbx-test"]
    done = subprocess.run(["mount", *words, place], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def top(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Not below /tmp of every user: a directory that only root may pass, as root's home is."""
    place = own_temporary_directory / f"of-root-{os.urandom(4).hex()}"
    place.mkdir(mode=0o700)
    yield place
    subprocess.run(["rm", "-rf", place], check=True)


def filled(directory: Path) -> Path:
    """A project of root, with what would run later on the host."""
    (directory / "sub").mkdir(parents=True)
    (directory / "main.py").write_text("print('of root')\n")
    (directory / "sub" / "data").write_text("1")
    for name, mode in PLAIN.items():
        (directory / name).chmod(mode)
    return directory


@pytest.fixture
def project(top: Path) -> Path:
    return filled(top / "project")


@asynccontextmanager
async def sandbox(workspace: Path, start: str = "fork") -> AsyncIterator[AsyncSandbox]:
    async with (
        Runtime(Settings(fast_path=start != "cold")) as runtime,
        await runtime.create(workspace=workspace) as box,
        asyncio.timeout(PATIENCE_S),
    ):
        while (await box.start()).path != start:
            await box.stop()  # the pool fills after the first start
        yield box


def owned(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Uid, gid and mode of everything there, on disk."""
    every = (directory, *directory.rglob("*"))
    seen = {str(one.relative_to(directory)): one.lstat() for one in every}
    return {
        name: (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))
        for name, found in seen.items()
    }


WORK = """
import os, pathlib
assert open('/workspace/sub/data').read() == '1'
open('made', 'w').close()
os.chmod('made', 0o640)
os.makedirs('new/below')
open('sub/data', 'a').write('2')
os.rename('main.py', 'new/main.py')
os.symlink('made', 'link')
sorted({(path.lstat().st_uid, path.lstat().st_gid) for path in pathlib.Path().rglob('*')})
"""
AFTER = {
    ".": (0, 0, 0o700),
    "made": (0, 0, 0o640),
    "new": (0, 0, 0o755),
    "new/below": (0, 0, 0o755),
    "new/main.py": (0, 0, 0o644),
    "sub": (0, 0, 0o755),
    "sub/data": (0, 0, 0o600),
    "link": (0, 0, 0o777),
}


@pytest.mark.parametrize("start", rows(["pool", "fork", "cold"], ci_tier=["fork", "cold"]))
async def test_code_works_on_files_of_root_by_every_path_of_a_start(
    project: Path, start: str
) -> None:
    async with sandbox(project, start) as box:
        assert (await box.run(WORK)).result == "[(1000, 1000)]"
        assert (await box.shell("cat sub/data")).stdout == "12"
        assert box.receipt is not None
        assert box.receipt.host_uid != 0
    assert owned(project) == AFTER


@pytest.mark.parametrize(("device", "inode"), [(0, 1), (1, 0)])
def test_owner_of_a_directory_that_was_replaced_is_not_mapped(
    project: Path, device: int, inode: int
) -> None:
    found = project.stat()
    expected = (found.st_dev + device, found.st_ino + inode)
    with pytest.raises(Broken) as raised:
        userns.map_owner(str(project), expected, (OTHER, OTHER))
    assert raised.value.code == "path_replaced"


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
async def test_other_file_systems_work_or_are_named(top: Path, kind: str) -> None:
    """overlayfs has no idmapped mounts up to Linux 6.18 at least."""
    with mounted(top, kind) as place:
        project = filled(place / "project")
        refused = None
        try:
            async with sandbox(project) as box:
                assert (await box.run(WORK)).ok
        except Denied as error:
            refused = error
        if refused is None:
            assert owned(project) == AFTER
        else:
            assert (kind, refused.code) == ("overlay", "workspace_owned_by_root")
            assert "(overlay) has idmapped mounts" in refused.message


async def test_a_file_system_without_idmapped_mounts_is_refused_by_its_name(top: Path) -> None:
    with mounted(top, "ramfs") as place:
        project = filled(place / "project")
        before = owned(project)
        with pytest.raises(Denied) as raised:
            async with sandbox(project):
                pass
        assert raised.value.code == "workspace_owned_by_root"
        assert "ramfs) has idmapped mounts" in raised.value.message
        assert "chown" in (raised.value.hint or "")
        assert owned(project) == before


async def test_one_that_is_mounted_below_is_named_as_well(top: Path, project: Path) -> None:
    with mounted(project, "ramfs"), pytest.raises(Denied) as raised:
        async with sandbox(project):
            pass
    assert "ramfs) has idmapped mounts" in raised.value.message


async def test_calls_from_outside_make_files_of_root(project: Path) -> None:
    os.chown(project, 0, OTHER)
    async with sandbox(project) as box:
        await box.files.write("api/new", "x")
        await box.files.write("sub/data", "from outside")
        assert (await box.run("open('api/new', 'a').write('y')")).ok
        assert (await box.run("open('made', 'w').write('y')")).ok
        assert await box.files.read("api/new") == "xy"
    found = owned(project)
    assert found["api"] == (0, OTHER, 0o755)
    assert found["api/new"] == found["made"] == (0, OTHER, 0o644)


async def test_a_dry_run_is_applied_as_root(project: Path) -> None:
    async with sandbox(project) as box:
        tried = await box.dry_run("echo dry > made; rm main.py; mkdir below; cat sub/data")
        assert tried.run.stdout == "1"
        assert "made" not in owned(project)
        await tried.commit()
        assert (await box.run("open('made', 'a').write('after')")).ok
    found = owned(project)
    assert found["made"] == (0, 0, 0o644)
    assert found["below"][:2] == (0, 0)
    assert "main.py" not in found


FOREIGN = """
import os
found = []
for act in (
    lambda: open('theirs').read(),
    lambda: open('theirs', 'a').close(),
    lambda: os.chmod('theirs', 0o777),
    lambda: os.chown('theirs', 1000, 1000),
    lambda: open('secret').read(),
    lambda: open('their-directory/new', 'w').close(),
    lambda: os.listdir('their-directory'),
    lambda: os.link('theirs', 'second'),
):
    try:
        found.append(act())
    except OSError as error:
        found.append(error.__class__.__name__)
(os.stat('theirs').st_uid, os.stat('theirs').st_gid, found)
"""


async def test_files_of_other_owners_are_for_reading_by_their_mode(project: Path) -> None:
    for name, mode in (("theirs", 0o666), ("secret", 0o640)):
        (project / name).write_text("theirs")
        (project / name).chmod(mode)
    (project / "their-directory").mkdir()
    (project / "their-directory").chmod(0o777)
    for name in ("theirs", "secret", "their-directory"):
        os.chown(project / name, OTHER, OTHER)
    before = owned(project)
    async with sandbox(project) as box:
        found = await box.run(FOREIGN)
    refused = "PermissionError"
    assert found.result is not None
    uid, gid, said = eval(found.result)
    assert (uid, gid) == (65534, 65534)
    assert said[:2] == ["theirs", refused]
    assert set(said[2:6]) <= {refused, "OSError"}
    assert said[6] == []
    assert set(said[7:]) <= {refused, "OSError"}
    assert owned(project) == before


@pytest.mark.parametrize("path", [".git/hooks", ".git/config", ".envrc"])
@pytest.mark.parametrize("start", ["fork", "cold"])
async def test_what_would_run_on_the_host_is_read_only_there_too(
    project: Path, path: str, start: str
) -> None:
    (project / ".git/hooks").mkdir(parents=True)
    (project / ".git/config").write_text("[core]\n")
    (project / ".envrc").write_text("")
    async with sandbox(project, start) as box:
        target = f"{path}/planted" if path.endswith("hooks") else path
        refused = await box.run(f"open({target!r}, 'w')")
        assert refused.error is not None
        assert "Read-only" in refused.error.value
        assert (await box.run("open('free', 'w').close()")).ok


@pytest.mark.parametrize("named", ["/etc", "/root"])
async def test_what_runs_on_the_host_as_root_is_no_workspace(runtime: Runtime, named: str) -> None:
    with pytest.raises(Denied) as raised:
        await runtime.create(workspace=named)
    assert raised.value.code == "directory_forbidden"


async def test_the_data_directory_of_sbx_is_no_workspace(top: Path, project: Path) -> None:
    async with Runtime(Settings(data_dir=project / "data")) as runtime:
        for named in (project, project / "data"):
            with pytest.raises(Denied) as raised:
                await runtime.create(workspace=named)
            assert raised.value.code == "directory_forbidden"


def _set_uid(path: Path) -> None:
    path.chmod(0o4755)


def _set_gid(path: Path) -> None:
    path.chmod(0o2755)


def _capable(path: Path) -> None:
    granted = b"\x01\x00\x00\x02" + (1 << 13).to_bytes(4, "little") + bytes(12)
    os.setxattr(path, "security.capability", granted)


@pytest.mark.parametrize("give", [_set_uid, _set_gid, _capable])
async def test_one_with_a_program_of_more_rights_is_refused(
    runtime: Runtime, project: Path, give: Callable[[Path], None]
) -> None:
    """Code inside could change the program by a shared mapping, which takes no set-id bit away."""
    give(project / "sub/data")
    with pytest.raises(Denied) as raised:
        await runtime.create(workspace=project)
    assert raised.value.code == "workspace_has_set_id"
    assert raised.value.details["path"] == f"{project}/sub/data"
    os.chown(project / "sub/data", OTHER, OTHER)  # which takes them away, and is another owner's
    give(project / "sub/data")
    async with await runtime.create(workspace=project) as box:
        assert (await box.run("open('sub/data', 'r+')")).status == "error"


async def test_one_with_a_socket_of_root_is_refused(runtime: Runtime, project: Path) -> None:
    """Only root may connect there, and the jail would be shown it as its own."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(project / "sub/s"))
        (project / "sub/s").chmod(0o600)
        with pytest.raises(Denied) as raised:
            await runtime.create(workspace=project)
        assert raised.value.code == "workspace_has_socket"
        os.chown(project / "sub/s", OTHER, OTHER)
        listening.listen()
        async with await runtime.create(workspace=project) as box:
            state_events = await box.run("import socket; socket.socket(1).connect('sub/s')")
            assert state_events.error is not None
            assert state_events.error.name == "PermissionError"


async def test_two_sandboxes_have_uids_of_their_own_over_one_directory(
    runtime: Runtime, project: Path
) -> None:
    async with (
        await runtime.create(workspace=project) as one,
        await runtime.create(workspace=project) as other,
    ):
        first, second = await one.start(), await other.start()
        assert len({first.host_uid, second.host_uid, 0}) == 3
        assert (await one.run("open('from-one', 'w').write('1')")).ok
        assert (await other.run("open('from-one', 'a').write('2')")).ok
    assert (project / "from-one").read_text() == "12"


# -- projects --------------------------------------------------------------------------------------


async def in_project(
    service: Service, project: Path, act: Callable[[OpenSession], Awaitable[None]], **more: bool
) -> None:
    made = await service.projects.create("me", name="mine", working_directory=str(project), **more)
    async with service.projects.using("me", made.id, "talk") as box:
        await act(box)


async def test_a_project_of_root_is_for_the_operator_to_allow(top: Path, project: Path) -> None:
    async def work(box: OpenSession) -> None:
        await box.allow_commands()  # else a cell runs on a copy
        assert (await box.start_run("open('made', 'w').write('cell')").result()).ok
        state_events = await box.start_shell("id -u; cat sub/data; echo x > by-command").result()
        assert state_events.stdout == "1000\n1"
        await box.files.write("by-call", "x")

    async with open_service(top / "data", project_dirs=(top,)) as service:
        with pytest.raises(Denied) as raised:
            await in_project(service, project, work)
        assert raised.value.code == "workspace_owned_by_root"
        assert "SBX_PROJECT_OWNERS" in (raised.value.hint or "")
    async with open_service(top / "data", project_dirs=(top,), project_owners=("root",)) as service:
        await in_project(service, project, work)
    found = owned(project)
    assert {found[name] for name in ("made", "by-command", "by-call")} == {(0, 0, 0o644)}


async def test_no_project_holds_what_the_host_runs_as_root(top: Path) -> None:
    settings: dict[str, Any] = {"project_dirs": (Path("/"),), "project_owners": (0,)}
    async with open_service(top / "data", **settings) as service:
        for named in ("/etc", "/usr/local", "/var"):
            with pytest.raises(Denied) as raised:
                await service.projects.create("me", name="mine", working_directory=named)
            assert raised.value.code == "directory_forbidden"


async def test_without_a_sandbox_root_works_in_directories_of_root_only(
    top: Path, project: Path
) -> None:
    async def work(box: OpenSession) -> None:
        state_events = await box.start_shell("id -u; echo x > by-command").result()
        assert state_events.stdout == "0\n"

    chosen: dict[str, Any] = {
        "project_dirs": (top,),
        "project_owners": (0,),
        "allow_host_mode": True,
    }
    async with open_service(top / "data", **chosen) as service:
        await in_project(service, project, work, sandbox_enabled=False)
        assert owned(project)["by-command"] == (0, 0, 0o644)
        os.chown(project, OTHER, OTHER)
        with pytest.raises(Denied) as raised:
            await in_project(service, project, work, sandbox_enabled=False)
        assert raised.value.code == "host_mode_refused"


def test_the_setting_names_accounts_by_name_or_uid() -> None:
    assert Settings(project_owners=("root", "4242", 7)).project_owners == (0, 4242, 7)
    with pytest.raises(BadRequest, match="no account 'nobody-has-this-name'"):
        Settings(project_owners=("nobody-has-this-name",))


@pytest.mark.parametrize("first", [0, OTHER])
async def test_a_directory_that_is_exchanged_gets_no_jail_of_another_owner(
    top: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The uid of the jail was chosen by path: after an exchange it was not the owner's."""
    os.chmod(top, 0o755)
    for name, uid in (("named", first), ("other", OTHER + 1)):
        filled(top / name)
        for path in (top / name, *(top / name).rglob("*")):
            os.chown(path, uid, uid)
    owner_of = sandboxes._owner_of

    def exchange_after(workspace: Path) -> int | None:
        uid = owner_of(workspace)
        parent = os.open(top, os.O_PATH)
        try:
            assert renameat2.exchange(parent, b"named", parent, b"other")
        finally:
            os.close(parent)
        return uid

    monkeypatch.setattr(sandboxes, "_owner_of", exchange_after)
    async with Runtime(Settings(fast_path=False)) as runtime:
        with pytest.raises(Broken) as raised:
            await runtime.create(workspace=top / "named")
        assert raised.value.code == "path_replaced"
