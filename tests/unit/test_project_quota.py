"""Project quotas: the structures that Linux takes, and which directories get which project.

Few hosts have a file system with project quotas: see tests/integration/test_storage.py. Here the
calls of Linux are replaced by a record of them.
"""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sbx.isolation import project_quota
from sbx.isolation.probe import Layer
from sbx.linux import libc, quota

MIB = 1 << 20


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def failing(number: int) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return act


# -- the calls -------------------------------------------------------------------------------------


def test_limits_are_in_blocks_of_a_kibibyte_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """struct if_dqblk: eight numbers of 64 bits, the grace times among them, and what is valid."""
    calls: list[tuple[int, int, bytes]] = []

    def record(name: str, number: int, fd: int, command: Any, project: Any, data: Any) -> int:
        calls.append((command.value, project.value, data.raw))
        return 0

    monkeypatch.setattr(libc, "syscall", record)
    quota.limit(3, 77, bytes_max=4 * MIB + 1, inodes_max=100)
    ((command, project, data),) = calls
    assert (command, project) == (0x80000802, 77)  # Q_SETQUOTA of PRJQUOTA
    assert quota._DQBLK.unpack(data) == (4097, 0, 0, 100, 0, 0, 0, 0, 5, 0)


def test_use_is_read_in_bytes_and_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(name: str, number: int, fd: int, command: Any, project: Any, data: Any) -> int:
        assert command.value == 0x80000702  # Q_GETQUOTA of PRJQUOTA
        ctypes.memmove(data, quota._DQBLK.pack(4096, 0, 12345, 100, 0, 7, 0, 0, 63, 0), 72)
        return 0

    monkeypatch.setattr(libc, "syscall", fill)
    assert quota.used(3, 77) == quota.Used(12345, 7, 4 * MIB, 100)


@pytest.mark.parametrize(("flags", "enforced"), [(0, False), (1 << 4, False), (1 << 5, True)])
def test_projects_that_are_only_counted_are_not_enforced(
    monkeypatch: pytest.MonkeyPatch, flags: int, enforced: bool
) -> None:
    def fill(name: str, number: int, fd: int, command: Any, project: Any, data: Any) -> int:
        quota._STATV.pack_into(data, 0, 1, 0, flags, 0)
        return 0

    monkeypatch.setattr(libc, "syscall", fill)
    assert quota.enforced(3) is enforced


@pytest.mark.parametrize("number", [errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_without_projects_charges_nobody(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", failing(number))
    assert quota.project(3) == 0
    monkeypatch.setattr(fcntl, "ioctl", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        quota.project(3)


def test_file_joins_the_project_of_another_and_keeps_its_other_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """struct fsxattr: the flag of a directory that its new files inherit is taken off a file."""
    attributes = {
        3: (quota._PROJINHERIT | 1, 2, 3, 0, 5, b"reserved"),
        4: (0, 0, 0, 77, 0, bytes(8)),
    }

    def ioctl(fd: int, request: int, data: bytes) -> bytes:
        if request == quota._FS_IOC_FSSETXATTR:
            attributes[fd] = quota._FSXATTR.unpack(data)
        return quota._FSXATTR.pack(*attributes[fd])

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    quota.join(3, 4)
    assert attributes[3] == (1, 2, 3, 77, 5, b"reserved")
    quota.assign(3, 78, inherited=True)
    assert attributes[3] == (quota._PROJINHERIT | 1, 2, 3, 78, 5, b"reserved")
    monkeypatch.setattr(quota, "assign", failing(errno.EDQUOT))
    attributes[4] = attributes[3]
    quota.join(3, 4)  # they have the same one already


# -- the directories of a conversation -------------------------------------------------------------


class Projects:
    """A file system with project quotas, as `storage` calls it."""

    def __init__(self, *, enforced: bool | int = True, used: int = errno.ESRCH) -> None:
        self._enforced, self._used = enforced, used
        self.of: dict[int, int] = {}  # by inode
        self.order: list[str] = []
        self.limits: dict[int, tuple[int, int]] = {}

    def enforced(self, fd: int) -> bool:
        return self._enforced if isinstance(self._enforced, bool) else failing(self._enforced)()

    def used(self, fd: int, project: int) -> None:
        if self._used:
            failing(self._used)()

    def project(self, fd: int) -> int:
        return self.of.get(os.fstat(fd).st_ino, 0)

    def assign(self, fd: int, project: int, *, inherited: bool) -> None:
        assert inherited
        self.of[os.fstat(fd).st_ino] = project
        self.order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def limit(self, fd: int, project: int, *, bytes_max: int, inodes_max: int) -> None:
        self.limits[project] = bytes_max, inodes_max


@pytest.fixture
def projects(monkeypatch: pytest.MonkeyPatch) -> Projects:
    projects = Projects()
    monkeypatch.setattr(project_quota, "quota", projects)
    return projects


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    for name in ("files/uploads/temparea", "files/uploads/generated", "staging", "uploads"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_new_conversation_is_charged_and_its_files_last(
    projects: Projects, conversation: Path
) -> None:
    assert project_quota.charge(str(conversation), bytes_max=MIB, inodes_max=9)
    assert projects.order == ["uploads", "temparea", "generated", "staging", "files"]
    own = (1 << 31) + (conversation / "files").stat().st_ino % (1 << 30)
    assert set(projects.of.values()) == {own}
    assert projects.limits == {own: (MIB, 9)}
    assert (conversation / "uploads").stat().st_ino not in projects.of


def test_charged_conversation_gets_new_limits_only(projects: Projects, conversation: Path) -> None:
    project_quota.charge(str(conversation), bytes_max=MIB, inodes_max=9)
    (conversation / "files/new").touch()
    before = dict(projects.of)
    assert project_quota.charge(str(conversation), bytes_max=2 * MIB, inodes_max=10)
    assert projects.of == before
    assert [*projects.limits.values()] == [(2 * MIB, 10)]


@pytest.mark.parametrize("old", ["files/old", "files/uploads/temparea/old", "files/shared/old"])
def test_conversation_with_files_is_not_charged(
    projects: Projects, conversation: Path, old: str
) -> None:
    (conversation / old).parent.mkdir(exist_ok=True)
    (conversation / old).touch()
    assert not project_quota.charge(str(conversation), bytes_max=MIB, inodes_max=9)
    assert (projects.of, projects.limits) == ({}, {})


def test_shared_directory_is_charged_as_a_whole(projects: Projects, tmp_path: Path) -> None:
    assert project_quota.charge(str(tmp_path), bytes_max=MIB, inodes_max=9)
    assert projects.order == [tmp_path.name]


def test_symlink_is_no_directory_of_a_conversation(projects: Projects, tmp_path: Path) -> None:
    (tmp_path / "files").symlink_to("/etc")
    with pytest.raises(NotADirectoryError):
        project_quota.charge(str(tmp_path), bytes_max=MIB, inodes_max=9)


@pytest.mark.parametrize(
    ("projects", "layer"),
    [
        (Projects(), Layer("disk", True, "project quota of {kind}")),
        (Projects(used=0), Layer("disk", True, "project quota of {kind}")),
        (
            Projects(used=errno.EPERM),
            Layer(
                "disk",
                False,
                "no quota: watched",
                "only root, in no container, may set the limits of a project",
                "start sbx as root",
            ),
        ),
        *(
            (
                Projects(enforced=enforced),
                Layer(
                    "disk",
                    False,
                    "no quota: watched",
                    "{path} lies on {kind} without project quotas",
                    project_quota.REMEDY,
                ),
            )
            for enforced in (False, errno.ENOSYS)
        ),
    ],
)
def test_layer_is_there_where_linux_enforces_limits_that_this_process_may_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, projects: Projects, layer: Layer
) -> None:
    monkeypatch.setattr(project_quota, "quota", projects)
    found = {"path": str(tmp_path), "kind": project_quota.mounted(str(tmp_path)).kind}
    expected = Layer(
        layer.name,
        layer.available,
        layer.detail.format(**found),
        layer.cause and layer.cause.format(**found),
        layer.remedy,
    )
    assert project_quota.layer(str(tmp_path)) == expected


# -- the disk --------------------------------------------------------------------------------------


def test_whole_disk_of_a_partition_is_the_one_that_io_limits_name(tmp_path: Path) -> None:
    """As sysfs has them: a link for each device number, and a partition below its disk."""
    partition, devices = tmp_path / "sda/sda1", tmp_path / "block"
    partition.mkdir(parents=True)
    devices.mkdir()
    (partition / "partition").write_text("1\n")
    (tmp_path / "sda/dev").write_text("8:0\n")
    (devices / "8:0").symlink_to("../sda")
    (devices / "8:1").symlink_to("../sda/sda1")
    disks = [project_quota.disk_of(device, str(devices)) for device in ("8:0", "8:1", "0:25")]
    assert disks == ["8:0", "8:0", None]
