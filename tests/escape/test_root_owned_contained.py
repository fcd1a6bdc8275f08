"""Code inside that is shown a directory of root as its own makes nothing that gives root's rights.

The controls for set-id files are those of test_privileges.py.
"""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacking import Fresh, attack, attack_by_shell, tell
from test_privileges import SET_ID

from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def project(own_temporary_directory: Path) -> Iterator[Path]:
    place = own_temporary_directory / f"of-root-{os.urandom(4).hex()}"
    (place / "work").mkdir(parents=True)
    place.chmod(0o700)
    (place / "beside").write_text("of root")
    yield place / "work"
    subprocess.run(["rm", "-rf", place], check=True)


@pytest_asyncio.fixture
async def over_root(fresh: Fresh, project: Path) -> AsyncSandbox:
    return await fresh(workspace=project)


def rights(project: Path) -> list[str]:
    """What there has a set-id bit, file capabilities, is a device, or is not root's."""
    found = []
    for path in project.rglob("*"):
        seen = path.lstat()
        special = stat.S_ISBLK(seen.st_mode) or stat.S_ISCHR(seen.st_mode)
        names = os.listxattr(path, follow_symlinks=False)
        if seen.st_mode & 0o6000 or special or names or (seen.st_uid, seen.st_gid) != (0, 0):
            found.append(f"{path}: {seen.st_mode:#o} {seen.st_uid}:{seen.st_gid} {names}")
    return found


PREPARE = """
open('t', 'w').close()
os.umask(0)
try:
    said = names_of(lambda: exec(ATTACK, globals()))
except subprocess.CalledProcessError:
    said = 'refused'
said
"""


@pytest.mark.parametrize("how", SET_ID)
async def test_no_set_id_file_of_root_can_be_made(
    over_root: AsyncSandbox, project: Path, how: str
) -> None:
    said = await tell(over_root, f"ATTACK = {SET_ID[how]!r}\n{PREPARE}")
    assert said in ("EPERM", "ENOSYS", "refused")
    assert rights(project) == []


ATTACKS = {
    "file capabilities": "os.setxattr('t', 'security.capability', bytes([1, 0, 0, 2]) + bytes(16))",
    "those of a namespace": (
        "os.setxattr('t', 'security.capability', bytes([1, 0, 0, 3]) + bytes(20))"
    ),
    "another owner": "os.chown('t', 0, -1)",
    "another group": "os.chown('t', -1, 0)",
    "the overflow ids": "os.chown('t', 65534, 65534)",
    "a block device": "os.mknod('new', stat.S_IFBLK | 0o666, os.makedev(8, 0))",
    "a character device": "os.mknod('new', stat.S_IFCHR | 0o666, os.makedev(1, 3))",
    "the directory above": "open('/proc/self/cwd/../beside')",
    "a link to what lies beside": "os.link('/workspace/../beside', 'new')",
    "a link to the system's files": "os.link('/usr/bin/env', 'new')",
    "its mount made another one": "call('umount2', b'/workspace', 2)",
    "a mount on it": "call('mount', b'none', b'/workspace', b'tmpfs', 0, 0)",
    "its mount cloned": "call('open_tree', -100, b'/workspace', 1)",
    "a namespace": "call('unshare', 0x10000000)",
}


@pytest.mark.parametrize("how", ATTACKS)
async def test_the_owner_that_is_shown_gives_no_other_right_of_root(
    over_root: AsyncSandbox, project: Path, how: str
) -> None:
    code = f"open('t', 'w').close()\n{ATTACKS[how]}"
    refused = {"EPERM", "EINVAL", "ENOENT", "EXDEV", "EACCES", "ENOSYS", "ENOSPC", "EROFS"}
    refused.add("ENOTSUP")  # the guard, of extended attributes
    assert await attack(over_root, code) in refused
    assert await attack_by_shell(over_root, f"os.chdir('/workspace')\n{code}") in refused
    assert rights(project) == []
    assert (project.parent / "beside").read_text() == "of root"


async def test_no_process_is_root_and_only_the_directory_is_mapped(
    over_root: AsyncSandbox, project: Path
) -> None:
    receipt = await over_root.start()
    assert receipt.host_uid != 0
    seen = "open('/proc/self/mountinfo').read().splitlines()"
    mapped = f"sorted(line.split()[4] for line in {seen} if 'idmapped' in line)"
    assert await tell(over_root, mapped) == ["/workspace"]
    options = f"[line.split()[5] for line in {seen} if line.split()[4] == '/workspace']"
    (found,) = await tell(over_root, options)
    assert {"nosuid", "nodev"} <= set(found.split(","))
    assert await tell(over_root, "sorted({os.stat(p).st_uid for p in ('/usr', '/tmp', '/')})") in (
        [1000, 65534],
        [65534],
    )


async def test_a_file_that_is_passed_on_gives_what_the_mount_gives(
    over_root: AsyncSandbox, project: Path
) -> None:
    """A process that gets the open directory, and no path to it, has no other rights there."""
    code = """
ours, theirs = socket.socketpair()
socket.send_fds(ours, [b'x'], [os.open('/workspace', os.O_RDONLY | os.O_DIRECTORY)])
_, (got,), _, _ = socket.recv_fds(theirs, 1, 1)
said = []
fd = os.open('by-fd', os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=got)
said += [names_of(os.fchmod, fd, 0o4755), names_of(os.fchown, fd, 0, 0)]
said += [names_of(os.stat, f'/proc/self/fd/{got}/../beside')]
said
"""
    said = await tell(over_root, code)
    assert said[:2] == ["EPERM", "EPERM"] or said[:2] == ["EPERM", "EINVAL"]
    assert said[2] == "ENOENT"
    assert rights(project) == []
