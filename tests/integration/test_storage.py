"""A file system with project quotas, a real one: needs root, mkfs.ext4, and a linux that has them.

Needs nothing of the project's but sbx.isolation, so that tests/vm runs it on a linux that has them.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quota_disk import MIB, mounted

from sbx.isolation import project_quota
from sbx.isolation.probe import Layer
from sbx.linux import quota

STRANGER = 12345
CLONE_NEWUSER = 0x10000000


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory) as place:
        yield place


@pytest.fixture
def conversation(disk: Path) -> Path:
    """As a workspace is made: empty, and given to the uid of a jail."""
    path = Path(tempfile.mkdtemp(dir=disk))
    for name in ("files/uploads/temparea", "files/uploads/generated", "staging", "uploads"):
        (path / name).mkdir(parents=True)
    for top, *_ in os.walk(path):
        os.chown(top, STRANGER, STRANGER)
    return path


def as_stranger(act: Callable[[], object]) -> str:
    """The name of the errno that `act` ends with in a process without privileges."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        said = "nothing"
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            act()
        except OSError as error:
            said = errno.errorcode[error.errno or 0]
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def fill(path: Path, mebibytes: int) -> Callable[[], object]:
    def write() -> None:
        with path.open("wb", 0) as file:
            for _ in range(mebibytes):
                file.write(bytes(MIB))

    return write


def test_the_layer_is_found_there_and_nowhere_else(disk: Path) -> None:
    assert project_quota.layer(str(disk)) == Layer("disk", True, "project quota of ext4")
    elsewhere = project_quota.layer("/proc")
    assert not elsewhere.available
    assert elsewhere.cause == "/proc lies on proc without project quotas"
    assert "prjquota" in (elsewhere.remedy or "")


@pytest.mark.parametrize(
    "where", ["files/big", "files/uploads/big", "files/uploads/generated/big", "staging/big"]
)
def test_bytes_end_at_the_limit_wherever_they_are_written(conversation: Path, where: str) -> None:
    assert as_stranger(fill(conversation / where, 12)) == "nothing"  # the control: no limit yet
    (conversation / where).unlink()
    assert project_quota.charge(str(conversation), bytes_max=8 * MIB, inodes_max=100)
    assert as_stranger(fill(conversation / where, 12)) == "EDQUOT"
    assert (conversation / where).stat().st_blocks * 512 <= 8 * MIB


def test_a_file_without_a_name_counts_as_long_as_it_is_open(conversation: Path) -> None:
    assert project_quota.charge(str(conversation), bytes_max=8 * MIB, inodes_max=100)

    def hoard() -> None:
        held = []
        for _ in range(3):
            path = conversation / "files/gone"
            with path.open("wb", 0) as file:
                held.append(os.dup(file.fileno()))
            path.unlink()
            os.write(held[-1], bytes(4 * MIB))

    assert as_stranger(hoard) == "EDQUOT"
    assert as_stranger(fill(conversation / "files/new", 7)) == "nothing"


def test_directories_and_files_count_alike(conversation: Path) -> None:
    assert project_quota.charge(str(conversation), bytes_max=64 * MIB, inodes_max=30)

    def make() -> None:
        for number in range(30):
            (conversation / f"files/{number}").mkdir()

    assert as_stranger(make) == "EDQUOT"
    assert len(os.listdir(conversation / "files")) == 30 - 5 + 1


def test_two_conversations_do_not_share_a_limit(disk: Path, conversation: Path) -> None:
    other = disk / "other"
    (other / "files").mkdir(parents=True)
    os.chown(other / "files", STRANGER, STRANGER)
    for one in (conversation, other):
        assert project_quota.charge(str(one), bytes_max=8 * MIB, inodes_max=100)
        assert as_stranger(fill(one / "files/big", 7)) == "nothing"


def test_what_is_shared_is_charged_as_a_directory_of_its_own(disk: Path) -> None:
    shared = disk / "shared"
    shared.mkdir()
    os.chown(shared, STRANGER, STRANGER)
    assert project_quota.charge(str(shared), bytes_max=8 * MIB, inodes_max=100)
    assert as_stranger(fill(shared / "big", 12)) == "EDQUOT"


def test_limits_can_be_changed_and_files_come_in_by_way_of_staging(conversation: Path) -> None:
    assert project_quota.charge(str(conversation), bytes_max=4 * MIB, inodes_max=100)
    assert as_stranger(fill(conversation / "files/big", 6)) == "EDQUOT"
    assert project_quota.charge(str(conversation), bytes_max=16 * MIB, inodes_max=100)
    assert as_stranger(fill(conversation / "staging/big", 6)) == "nothing"
    (conversation / "staging/big").rename(conversation / "files/big")


def test_files_that_are_not_charged_are_not_half_charged(conversation: Path) -> None:
    """They could not be renamed within the workspace any more: EXDEV."""
    (conversation / "files/old").write_bytes(b"x")
    assert not project_quota.charge(str(conversation), bytes_max=4 * MIB, inodes_max=100)
    assert as_stranger(fill(conversation / "files/big", 6)) == "nothing"


def test_an_upload_on_its_way_can_be_charged_to_nobody(conversation: Path) -> None:
    assert project_quota.charge(str(conversation), bytes_max=4 * MIB, inodes_max=100)
    fd = os.open(conversation / "staging/upload", os.O_RDWR | os.O_CREAT)
    beside = os.open(conversation / "uploads", os.O_RDONLY)
    try:
        assert quota.project(fd) != quota.project(beside) == 0
        quota.join(fd, beside)
        assert quota.project(fd) == 0
    finally:
        os.close(fd)
        os.close(beside)


@pytest.mark.parametrize("inherited", [True, False])
def test_nobody_gets_out_of_a_project_in_a_user_namespace(
    conversation: Path, inherited: bool
) -> None:
    """As a jail is in one; its seccomp filter stands in the way of quotactl, and not of ioctl."""
    assert project_quota.charge(str(conversation), bytes_max=4 * MIB, inodes_max=100)
    files = os.open(conversation / "files", os.O_RDONLY)
    own = quota.project(files)

    def leave(project: int) -> Callable[[], object]:
        def act() -> None:
            assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
            quota.assign(files, project, inherited=inherited)

        return act

    try:
        assert as_stranger(leave(0)) == "EINVAL"
        if not inherited:
            assert as_stranger(leave(own)) == "EINVAL"
        assert as_stranger(lambda: quota.limit(files, own, bytes_max=0, inodes_max=0)) == "EPERM"
        used = quota.used(files, own)
        assert (used.bytes_max, used.inodes_max) == (4 * MIB, 100)
    finally:
        os.close(files)
