"""From where a service mounts directories: what lies there by its path and by what is there."""

import contextlib
import os
from pathlib import Path

import pytest

from sbx.errors import Denied
from sbx.workspace.allowed_paths import MountSources, OwnPaths, check


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in ("srv/wheels/below", "srv/data/sandboxes", "srv-not", "elsewhere/secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "srv/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "srv/file").touch()
    return tmp_path


def sources(top: Path, *, writable: bool = True) -> MountSources:
    return MountSources((top / "srv",), writable=writable)


def look_at(sources: MountSources, source: Path, *private: Path) -> os.stat_result:
    fd = sources.open(source)
    try:
        check(fd, OwnPaths(private), read_only=True)
        return os.fstat(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["srv/wheels", "srv/wheels/below"])
def test_what_lies_below_is_looked_at(top: Path, name: str) -> None:
    sources(top).check(top / name, read_only=False)
    found = look_at(sources(top), top / name)
    assert (found.st_dev, found.st_ino) == ((top / name).stat().st_dev, (top / name).stat().st_ino)


@pytest.mark.parametrize("name", ["srv-not", "elsewhere", "", "elsewhere/secret"])
def test_what_lies_elsewhere_is_not_granted(top: Path, name: str) -> None:
    with pytest.raises(Denied) as raised:
        sources(top).check(top / name, read_only=True)
    assert raised.value.code == "not_granted"
    assert str(top / "srv") in raised.value.message
    assert raised.value.hint is not None
    assert "mount_dirs" in raised.value.hint


def test_where_no_directory_is_named_none_is_mounted(top: Path) -> None:
    with pytest.raises(Denied, match="mounts: none"):
        MountSources((), writable=True).check(top, read_only=True)


def test_a_symlink_on_the_way_leads_nowhere(top: Path) -> None:
    for name in ("link", "link/secret", "wheels/../link", "../elsewhere", "file", "none"):
        with pytest.raises(OSError, match="openat2"):
            look_at(sources(top), top / "srv" / name)


@pytest.mark.parametrize("name", ["srv", "srv/data", "srv/data/sandboxes", "srv/run"])
def test_what_is_the_service_s_own_is_forbidden(top: Path, name: str) -> None:
    """Its files by their owner's uid, or its socket, would be in the hands of the code inside."""
    (top / "srv/run").mkdir()
    with pytest.raises(Denied, match="belongs to sbx") as raised:
        look_at(sources(top), top / name, top / "srv/data", top / "srv/run/sbx.sock")
    assert raised.value.code == "directory_forbidden"


def test_its_own_is_known_by_another_path_too(top: Path) -> None:
    (top / "alias").symlink_to(top / "srv")
    by_alias = MountSources((top / "alias",), writable=True)
    look_at(by_alias, top / "alias/wheels", top / "srv/data")
    with pytest.raises(Denied, match="belongs to sbx"):
        look_at(by_alias, top / "alias/data", top / "srv/data")


def test_a_service_that_was_root_mounts_read_only(top: Path) -> None:
    confined = sources(top, writable=False)
    confined.check(top / "srv/wheels", read_only=True)
    with pytest.raises(Denied, match="read-only"):
        confined.check(top / "srv/wheels", read_only=False)


def test_nothing_is_left_open(top: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in ("wheels", "link", "data"):
        with contextlib.suppress(OSError, Denied):
            look_at(sources(top), top / "srv" / name)
    assert os.listdir("/proc/self/fd") == before
