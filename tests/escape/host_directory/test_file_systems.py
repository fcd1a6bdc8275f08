"""Operations of file systems that no path hook of Linux sees, on real ones: btrfs and ext4.

Each operation must fail inside, and must succeed for the user outside in the same run, or its file
system cannot show anything.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from as_unprivileged import copy_of_the_project, run
from planting import Place, make_place, sandbox

from sbx import Runtime
from tests import disks

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

# What makes a subvolume or a snapshot under a protected name, or changes the flags of a file that
# code inside can only read. `.envrc` and `sub`, a subvolume with a hook, exist.
OPERATIONS = """
import errno, fcntl, json, os, struct
def attempt(number, data, where="."):
    fd = os.open(where, os.O_RDONLY)
    try: fcntl.ioctl(fd, number, bytearray(data))
    except OSError as error: return errno.errorcode[error.errno]
    finally: os.close(fd)
    return "ok"
def named(name, source=0):
    return struct.pack("=q4088s", source, name)
def named_v2(name, source=0):
    return struct.pack("=qQQ32x4040s", source, 0, 0, name)
def opened(name):
    return os.open(name, os.O_RDONLY)
os.makedirs("empty", exist_ok=True)
answers = {
    "BTRFS_IOC_SUBVOL_CREATE": attempt(0x5000940E, named(b".vscode")),
    "BTRFS_IOC_SUBVOL_CREATE_V2": attempt(0x50009418, named_v2(b".husky")),
    "BTRFS_IOC_SNAP_CREATE": attempt(0x50009401, named(b".git", opened("sub"))),
    "BTRFS_IOC_SNAP_CREATE_V2": attempt(0x50009417, named_v2(b".venv", opened("sub"))),
    "BTRFS_IOC_SUBVOL_SETFLAGS": attempt(0x4008941A, struct.pack("=Q", 2), "sub"),
    "FS_IOC_SETFLAGS": attempt(0x40086602, struct.pack("=Q", 0x40 | 0x80), ".envrc"),
    "FS_IOC_FSSETXATTR": attempt(0x401C5820, struct.pack("=5I8x", 0x40, 0, 0, 0, 0), ".envrc"),
    "FS_IOC_ENABLE_VERITY": attempt(
        0x40806685, struct.pack("=4IQ2IQ88x", 1, 1, 4096, 0, 0, 0, 0, 0), ".envrc"
    ),
    "FS_IOC_SET_ENCRYPTION_POLICY": attempt(0x800C6613, bytes([0, 1, 4, 0]) + bytes(8), "empty"),
    "FS_IOC_ADD_ENCRYPTION_KEY": attempt(0xC0506617, bytes(80)),
}
print(json.dumps(answers))
"""
# The operations of each file system that must succeed outside.
SUCCEED = {
    "btrfs": {
        "BTRFS_IOC_SUBVOL_CREATE", "BTRFS_IOC_SUBVOL_CREATE_V2", "BTRFS_IOC_SNAP_CREATE",
        "BTRFS_IOC_SNAP_CREATE_V2", "BTRFS_IOC_SUBVOL_SETFLAGS", "FS_IOC_SETFLAGS",
    },
    "ext4": {"FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR", "FS_IOC_SET_ENCRYPTION_POLICY"},
}  # fmt: skip
DISKS = [pytest.param(name, marks=pytest.mark.needs(name)) for name in SUCCEED]
# Run by a user without rights in its own directory: prints the answers of the jail.
AS_USER = """
import sys
from pathlib import Path
from sbx import Sandbox
with Sandbox(workspace=Path(sys.argv[1])) as box:
    run = box.run(sys.argv[2])
    print(run.stdout, run.error or "", file=sys.stdout)
"""


@pytest.fixture(scope="module", params=DISKS)
def disk(request: pytest.FixtureRequest, own_temporary_directory: Path) -> Iterator[Path]:
    with disks.mounted(request.param, own_temporary_directory) as place:
        yield place


def prepared(place: Place) -> None:
    place.write(".envrc", "export A=1\n")
    volume = 'import fcntl, os, struct; fcntl.ioctl(os.open(".", 0), 0x5000940E, '
    volume += 'bytearray(struct.pack("=q4088s", 0, b"sub")))'
    if place.user("/usr/bin/python3", "-c", volume).returncode:
        (place.directory / "sub").mkdir()  # not btrfs
    place.write("sub/hooks/post-index-change", "#!/bin/sh\n", 0o755)


def refused(answers: dict[str, str], place: Place) -> None:
    assert set(answers.values()) == {"ENOTTY"}, answers
    names = {path.name for path in place.directory.iterdir()}
    assert names - {".sbx-quarantine"} == {".envrc", "sub", "empty"}


def succeed_outside(place: Place, kind: str) -> None:
    outside = place.user("/usr/bin/python3", "-c", OPERATIONS)
    answers = json.loads(outside.stdout)
    assert {name for name in answers if answers[name] == "ok"} >= SUCCEED[kind], answers


async def test_operation_of_a_file_system_is_refused(disk: Path) -> None:
    """A snapshot under the name `.git` made a repository of the sandbox, whose settings `git
    status` of the host executed; a subvolume made `.vscode` (holes 1 and 13)."""
    place = make_place(disk / "by-root")
    prepared(place)
    async with Runtime() as runtime, sandbox(runtime, place) as box:
        run = await box.run(OPERATIONS)
        assert run.error is None, run.error
        refused(json.loads(run.stdout), place)
    succeed_outside(place, disk.name)


@pytest.mark.full_tier
async def test_operation_is_refused_in_an_idmapped_directory(disk: Path) -> None:
    """The directory belongs to root, so the jail writes there as root."""
    directory = disk / "of-root"
    directory.mkdir()
    (directory / ".envrc").write_text("export A=1\n")
    (directory / "sub").mkdir()
    place = Place(directory, disk / "marker")
    async with Runtime() as runtime, sandbox(runtime, place) as box:
        run = await box.run(OPERATIONS)
        assert run.error is None, run.error
        refused(json.loads(run.stdout), place)


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param("btrfs", marks=pytest.mark.needs("btrfs")),
        pytest.param("ext4", marks=[pytest.mark.needs("ext4"), pytest.mark.full_tier]),
    ],
    indirect=True,
    scope="module",
)
def test_operation_is_refused_for_a_user_without_rights(disk: Path, tmp_path: Path) -> None:
    top = disk / "by-a-user"
    top.mkdir()
    project = copy_of_the_project(top)
    directory = top / "tmp" / "workspace"
    words = [sys.executable, "-c", AS_USER, str(directory), OPERATIONS]
    start = 'mkdir -p $0; cd $0; mkdir sub; echo > .envrc; cd "$1"; shift; exec "$@"'
    done = run(
        ["sh", "-c", start, str(directory), str(project), *words],
        top=top, cwd=project, timeout_s=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    refused(json.loads(done.stdout), Place(directory, top))


@pytest.mark.needs("casefold")
async def test_a_name_with_ignored_code_points_is_protected(own_temporary_directory: Path) -> None:
    """A directory that folds case ignores U+200C and the like, and the table did not."""
    with disks.mounted("casefold", own_temporary_directory) as disk:
        place = make_place(disk)
        fold = "import fcntl, os, struct; fcntl.ioctl(os.open('.', 0), 0x40086602, "
        fold += "struct.pack('=Q', 0x40080000))"
        assert place.user("/usr/bin/python3", "-c", fold).returncode == 0
        place.write(".envrc", "export A=1\n")
        async with Runtime() as runtime, sandbox(runtime, place) as box:
            run = await box.run(
                "import os\nos.makedirs('.g\u200cit/hooks')\n"
                "try: open('.envr\u00adc', 'w')\nexcept OSError as error: print(error.errno)"
            )
        assert (run.stdout, run.error) == ("30\n", None)
        assert (place.directory / ".git").is_symlink()
        assert (place.directory / ".envrc").read_text() == "export A=1\n"
