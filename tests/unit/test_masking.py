"""What is looked for below a directory that a jail is shown, and where the look ends."""

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sbx.errors import Denied
from sbx.isolation import masking
from sbx.isolation.filters import Filter
from sbx.isolation.plan import Bind, LaunchPlan, Seal
from sbx.runtime.host_sockets import refuse_uncovered

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


def found(top: Path, limits: masking.Limits | None = None) -> list[bytes]:
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        return sorted(masking.find(fd, limits or masking.Limits()))
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
    limits = masking.Limits(entries=10)
    found(top, limits)
    assert not limits.complete
    enough = masking.Limits(entries=30)
    found(top, enough)
    assert enough.complete


def test_look_ends_after_so_many_levels(top: Path) -> None:
    (top / "/".join(["d"] * masking.DEPTH_MAX)).mkdir(parents=True)
    limits = masking.Limits()
    found(top, limits)
    assert limits.complete
    (top / "/".join(["d"] * (masking.DEPTH_MAX + 1))).mkdir()
    limits = masking.Limits()
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
