"""User namespaces for idmapped mounts: what is refused, and in which words."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from sbx.errors import Broken, Denied
from sbx.isolation import userns
from sbx.linux import namespaces


def failing(number: int | None) -> Callable[..., NoReturn]:
    def act(*_: object) -> NoReturn:
        raise OSError(number, "refused") if number else OSError("refused")

    return act


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, errno.ENOSPC), (None, errno.EPERM)])
def test_namespace_that_the_child_cannot_make_is_an_error(number: int | None, raised: int) -> None:
    with pytest.raises(OSError, match="no user namespace") as error:
        userns.make(failing(number), lambda pid: None)
    assert error.value.errno == raised


def test_child_that_ends_without_a_word_is_an_error() -> None:
    with pytest.raises(OSError, match="no user namespace") as error:
        userns.make(lambda: os._exit(0), lambda pid: None)
    assert error.value.errno == errno.EPERM


def test_maps_that_cannot_be_written_leave_no_child() -> None:
    pids = []

    def write_maps(pid: int) -> None:
        pids.append(pid)
        failing(errno.EPERM)()

    with pytest.raises(OSError, match="refused"):
        userns.make(lambda: None, write_maps)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


@pytest.mark.parametrize(
    ("number", "cause", "hint"),
    [
        (errno.ENOSYS, "this Linux has no idmapped mounts", "use Linux 5.12 or later"),
        (errno.EPERM, "this process may not idmap it", "start sbx as root of the host"),
        (errno.ENOSPC, "no user namespace can be made", "user.max_user_namespaces"),
        (errno.EINVAL, "(proc) has idmapped mounts on this Linux", "keep the directory on ext4"),
        (errno.EIO, "mount_setattr failed: refused", "run `sbx doctor`"),
    ],
)
def test_refusal_names_the_cause_and_a_remedy(number: int, cause: str, hint: str) -> None:
    for uid, owner in ((0, "root"), (7, "uid 7")):
        error = userns._refusal("/proc", uid, OSError(number, "refused"))
        assert error.message.startswith(f"'/proc' belongs to {owner}, and no jail can be given it")
        assert cause in error.message
        assert hint in (error.hint or "")
        assert "or give the directory to another user" in (error.hint or "")
        assert error.details == {"path": "/proc", "errno": number}


@pytest.mark.needs("root")
def test_directory_that_was_replaced_is_not_mapped(tmp_path: Path) -> None:
    with pytest.raises(Broken) as raised:
        userns.map_owner(str(tmp_path), [1, 1], (1000, 1000))
    assert raised.value.code == "path_replaced"


@pytest.mark.needs("root")
def test_directory_without_a_namespace_for_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "unshare", failing(errno.ENOSPC))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Denied, match=f"'/shown' belongs to .*: {userns._CAUSES[errno.ENOSPC][0]}"):
        userns.map_owner(str(tmp_path), None, (1000, 1000), "/shown")
    assert len(os.listdir("/proc/self/fd")) == before


def test_mapped_mount_takes_the_namespace_of_its_sandbox() -> None:
    assert [userns.of(False, 7), userns.of(True, 7)] == [None, 7]
    with pytest.raises(Broken, match="no directory of this sandbox was mapped"):
        userns.of(True, None)
