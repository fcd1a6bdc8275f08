"""What is looked for below a directory that a jail is shown, and where the look ends."""

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sbx.errors import Denied
from sbx.isolation import masking
from sbx.isolation.launch_plan import Bind, LaunchPlan, Seal
from sbx.isolation.seccomp import Filter
from sbx.linux import mounts, namespaces, openat2
from sbx.runtime.sandbox_kernels import refuse_uncovered
from tests.unit.in_child import in_child

PLAN = LaunchPlan(
    bwrap="/usr/bin/bwrap",
    options=frozenset(),
    mounts=(),
    own_mounts=(),
    files=(),
    environment=(),
    command=(),
    filter=Filter("default", b"", "d" * 64),
    seal=Seal(True, ("/",), ("/workspace",), (), (), None),
    walls=(),
    host_directories=("/workspace",),
)


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="m-") as directory:  # short: a socket's name is bounded
        (Path(directory) / "a/b").mkdir(parents=True)
        yield Path(directory)


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def found(top: Path, limits: masking.MaskingLimits | None = None) -> list[bytes]:
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        return sorted(masking.find(fd, limits or masking.MaskingLimits()))
    finally:
        os.close(fd)


def test_sockets_and_fifos_are_found_and_nothing_else(top: Path) -> None:
    listen(top / "a/b/s")
    os.mkfifo(top / "f")
    (top / "file").write_text("")
    (top / "link").symlink_to("a/b/s")
    (top / "hard").hardlink_to(top / "a/b/s")
    assert found(top) == [b"a/b/s", b"f", b"hard"]


def test_symlink_to_a_directory_is_not_followed(top: Path) -> None:
    listen(top / "a/s")
    (top / "a/out").symlink_to("/run")
    (top / "a/up").symlink_to("..")
    assert found(top) == [b"a/s"]


def test_name_that_is_no_text_is_found(top: Path) -> None:
    os.mkfifo(os.fsencode(top) + b"/\xff\n")
    assert found(top) == [b"\xff\n"]


def test_look_ends_after_so_many_entries(top: Path) -> None:
    for number in range(20):
        (top / f"{number}").write_text("")
    limits = masking.MaskingLimits(entries=10)
    found(top, limits)
    assert not limits.complete
    enough = masking.MaskingLimits(entries=30)
    found(top, enough)
    assert enough.complete


def test_look_ends_after_so_many_levels(top: Path) -> None:
    (top / "/".join(["d"] * masking.DEPTH_MAX)).mkdir(parents=True)
    limits = masking.MaskingLimits()
    found(top, limits)
    assert limits.complete
    (top / "/".join(["d"] * (masking.DEPTH_MAX + 1))).mkdir()
    limits = masking.MaskingLimits()
    found(top, limits)
    assert not limits.complete


@pytest.mark.parametrize("unix_sockets", ["own", "none", "any"])
def test_socket_that_cannot_be_covered_is_refused_by_name(top: Path, unix_sockets: str) -> None:
    plan = replace(PLAN, own_mounts=(Bind(str(top), "/workspace"),), unix_sockets=unix_sockets)
    refuse_uncovered(plan)
    listen(top / "a/s")
    refuse_uncovered(replace(plan, masks=True))
    if unix_sockets != "own":
        refuse_uncovered(plan)
        return
    with pytest.raises(Denied) as raised:
        refuse_uncovered(plan)
    assert (raised.value.code, raised.value.details) == ("host_socket", {"path": f"{top}/a/s"})


# -- covering, in a mount namespace of a child ----------------------------------------------------


def masked(top: Path, *, pin: bool = False) -> str:
    """Return the outcome of `mask`, and the kinds of the names in `top` afterwards."""

    def act(report: int) -> str:
        namespaces.unshare(namespaces.Namespace.MOUNT)
        mounts.private("/")
        cover = masking.Cover(masking.make_cover("/mnt"))
        fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
        masks = masking.mask(fd, cover, masking.MaskingLimits(), pin=pin)
        kinds = sorted(
            f"{path.name}:{stat.filemode(path.lstat().st_mode)}"
            for path in top.rglob("*")
            if not path.is_dir()
        )
        return f"{masks.masked} {masks.complete} {' '.join(kinds)}"

    return in_child(act)


@pytest.mark.needs("root")
@pytest.mark.parametrize("pin", [False, True])
def test_each_socket_and_fifo_is_covered_by_an_empty_file(top: Path, pin: bool) -> None:
    listen(top / "a/b/one")
    listen(top / "two")
    os.mkfifo(top / "a/three")
    answer = masked(top, pin=pin)
    assert answer == "3 True one:-r--r--r-- three:-r--r--r-- two:-r--r--r--"
    assert stat.S_ISSOCK((top / "two").lstat().st_mode)  # only in that namespace


@pytest.mark.needs("root")
def test_more_sockets_than_may_be_covered_are_named(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking, "MASKS_MAX", 2)
    for name in ("one", "two", "three"):
        listen(top / name)
    assert masked(top).startswith("2 False ")


@pytest.mark.needs("root")
def test_sockets_that_come_faster_than_they_are_covered_are_named(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masking._cover
    made = iter(range(100))

    def covering(*words: Any) -> bool:
        listen(top / f"new{next(made)}")
        return real(*words)

    monkeypatch.setattr(masking, "_cover", covering)
    listen(top / "one")
    assert " False " in masked(top)


@pytest.mark.needs("root")
def test_socket_that_is_removed_or_exchanged_meanwhile_is_not_covered(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masking._cover

    def removing(at: int, path: bytes, cover: masking.Cover) -> bool:
        (top / os.fsdecode(path)).unlink()
        if path == b"two":
            (top / "two").touch()
        return real(at, path, cover)

    monkeypatch.setattr(masking, "_cover", removing)
    listen(top / "one")
    listen(top / "two")
    assert masked(top).startswith("0 True two:-rw-")


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("owner", "mode", "complete"), [(4242, 0o000, False), (0, 0o700, True), (0, 0o711, False)]
)
def test_directory_that_hides_its_entries_counts_if_the_jail_may_open_it(
    top: Path, owner: int, mode: int, complete: bool
) -> None:
    """Its owner can change the mode; nobody else can pass one that is not to be searched."""
    top.chmod(0o755)
    hidden = top / "a"
    (hidden / "b").rmdir()
    os.chown(hidden, owner, owner)
    hidden.chmod(mode)

    def act(report: int) -> bool:
        os.setresgid(4242, 4242, 4242)
        os.setresuid(4242, 4242, 4242)
        limits = masking.MaskingLimits()
        found(top, limits)
        return limits.complete

    assert in_child(act) == str(complete)


def test_directory_that_cannot_be_looked_at_counts_as_one_that_the_jail_may_open(
    top: Path,
) -> None:
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        denied = PermissionError(errno.EACCES, "denied")
        assert masking._can_be_passed(fd, b"a", OSError(errno.EIO, "damaged"))
        assert masking._can_be_passed(fd, b"missing", denied)
    finally:
        os.close(fd)


def test_look_ends_within_a_large_directory(top: Path) -> None:
    for number in range(masking._BATCH + 1):
        os.mkfifo(top / f"{number}")
    limits = masking.MaskingLimits(entries=100)
    assert len(found(top, limits)) < masking._BATCH
    assert not limits.complete


@pytest.mark.needs("root")
def test_directory_above_several_sockets_is_pinned_once(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later round finds sockets below directories that an earlier one has pinned."""
    real = masking._cover

    def covering(at: int, path: bytes, cover: masking.Cover) -> bool:
        if path == b"a/b/one":
            listen(top / "a/b/two")
        return real(at, path, cover)

    monkeypatch.setattr(masking, "_cover", covering)
    listen(top / "a/b/one")
    assert masked(top, pin=True).startswith("2 True ")


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.ENOENT, "0 True "), (errno.ENOSPC, "OSError(28, 'no')")]
)
def test_cover_that_cannot_be_put_is_an_error_unless_the_socket_is_gone(
    top: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: str
) -> None:
    def put(cover: masking.Cover, target: int) -> None:
        for path in top.rglob("one"):
            path.unlink()
        raise OSError(number, "no")

    monkeypatch.setattr(masking.Cover, "put", put)
    listen(top / "one")
    assert masked(top).startswith(outcome)


def test_socket_that_cannot_be_opened_is_an_error(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_none(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(openat2, "openat2", open_none)
    cover = masking.Cover(-1)
    with pytest.raises(OSError, match="Too many open files"):
        masking._cover(-1, b"one", cover)
