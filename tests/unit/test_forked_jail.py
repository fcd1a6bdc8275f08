"""The steps of a forked jail, in a child of the test: each failure ends the jail, and is named."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbx.guest import frames
from sbx.guest.kernel import randomness
from sbx.guest.start import fork_child
from sbx.guest.start.fork_child import MountView
from sbx.linux import landlock, prctl
from tests.unit.in_child import exit_status, in_child

INVALID = bytes(8).hex()  # one instruction, which does not return
WALLS: dict[str, Any] = {
    "landlock": False,
    "read": ["/"],
    "write": [],
    "devices": [],
    "guarded": [],
    "connect": [],
    "rlimits": {},
    "filter": INVALID,
    "jail_filter": None,
    "guard": None,
    "machine": None,
}


@pytest.fixture
def word() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        yield ours, its


def test_other_process_says_what_was_agreed_or_the_jail_ends(
    word: tuple[socket.socket, socket.socket],
) -> None:
    ours, its = word
    ours.send(b"join 2")
    assert fork_child._hear(its, b"join") == b"2"
    socket.send_fds(ours, [b"mounts"], [0])
    fd = fork_child._hear_fd(its, b"mounts")
    assert fd is not None
    os.close(fd)
    ours.send(b"mounts")
    assert fork_child._hear_fd(its, b"mounts") is None
    for hear in (fork_child._hear, fork_child._hear_fd):
        ours.send(b"another")
        assert exit_status(lambda hear=hear: hear(its, b"join")) == 1  # type: ignore[misc]


def test_jail_without_a_boot_frame_ends_quietly() -> None:
    ours, its = socket.socketpair()
    with its:
        with ours:
            ours.sendall(frames.encode("boot", {"walls": {}}))
            assert fork_child._boot(its) == {"walls": {}}
        assert exit_status(lambda: fork_child._boot(its)) == 0


def test_idle_jail_ends_when_its_kernel_does(
    word: tuple[socket.socket, socket.socket],
) -> None:
    ours, its = word
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as quiet:
        ours.close()
        assert exit_status(lambda: fork_child._wait_idle(quiet, its)) == 1


def test_variables_of_the_sandbox_are_taken_and_its_time_zone() -> None:
    answer = {"ids": [os.getuid(), os.getgid()], "environment": {"TZ": "XYZ-9", "NEW": "value"}}

    def act(report: int) -> str:
        fork_child._become(answer)
        return f"{os.environ['NEW']} {time.strftime('%Z')}"

    assert in_child(act) == "value XYZ"


def test_what_libraries_drew_before_the_fork_is_drawn_again() -> None:
    def act(report: int) -> str:
        import multiprocessing
        import tempfile
        import uuid

        before = multiprocessing.current_process().authkey
        tempfile._get_candidate_names()  # type: ignore[attr-defined]
        randomness.renew()
        changed = multiprocessing.current_process().authkey != before
        return f"{changed} {tempfile._name_sequence} {uuid._generate_time_safe}"  # type: ignore[attr-defined]

    assert in_child(act) == "True None None"


# -- the seal --------------------------------------------------------------------------------------


def sealed(walls: dict[str, Any], like: dict[str, Any]) -> str:
    def act(report: int) -> int:
        prctl.set_no_new_privs()
        domain = (
            fork_child.LandlockDomain.of(like, scope_signals=False) if walls["landlock"] else None
        )
        return fork_child._seal(walls, domain, like, None)

    return in_child(act)


@pytest.mark.parametrize("name", ["landlock", "filter"])
def test_walls_that_bind_cannot_be_left_out(name: str) -> None:
    like = {**WALLS, "binding": True}
    assert sealed({**WALLS, name: None}, like) == "walls: EINVAL"


@pytest.mark.needs("root")
def test_filter_that_linux_refuses_is_named() -> None:
    assert sealed(WALLS, WALLS) == "seccomp: EINVAL"


@pytest.mark.needs("root")
def test_landlock_that_is_missing_or_was_prepared_for_other_walls_is_named() -> None:
    if not landlock.supported():
        pytest.skip("this Linux has no Landlock")
    with_landlock = {**WALLS, "landlock": True}
    assert sealed(with_landlock, WALLS) == "landlock: ENOTSUP"
    assert sealed({**with_landlock, "read": ["/usr"]}, with_landlock) == "landlock: EINVAL"


@pytest.mark.needs("root")
def test_domain_that_cannot_be_entered_is_named() -> None:
    if not landlock.supported():
        pytest.skip("this Linux has no Landlock")
    walls = {**WALLS, "landlock": True}

    def act(report: int) -> None:
        prctl.set_no_new_privs()
        domain = fork_child.LandlockDomain.of(walls, scope_signals=False)
        assert domain is not None
        os.close(domain.fileno())
        domain.enter(walls)

    assert in_child(act) == "landlock: EBADF"


# -- the view --------------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_own_directory_keeps_the_mounts_and_links_of_the_zygote(tmp_path: Path) -> None:
    (tmp_path / "directory/below").mkdir(parents=True)
    (tmp_path / "directory/below/inner").touch()
    (tmp_path / "file").write_text("text")
    (tmp_path / "other").touch()
    (tmp_path / "link").symlink_to("file")
    kept = [f"{tmp_path}/{name}" for name in ("directory/below", "file", "link")]

    def act(report: int) -> str:
        fork_child._own_view(MountView([(str(tmp_path), 1 << 20, "0755")], kept, WALLS))
        names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        return f"{' '.join(names)}: {(tmp_path / 'link').read_text()}"

    assert in_child(act) == "directory directory/below directory/below/inner file link: text"


# -- the path guard and the kernel -----------------------------------------------------------------


def refusal(sock: socket.socket) -> str:
    frame = frames.receive(sock)
    assert frame is not None
    assert frame.type == "refused"
    return str(frame.content)


def test_guard_that_cannot_be_sealed_names_what_it_lacks(
    word: tuple[socket.socket, socket.socket],
) -> None:
    ours, control = socket.socketpair()
    walls = {**WALLS, "guard": {"root": "/workspace", "link_prefixes": [], "fifos": False}}
    with ours, control:
        pid, joining = fork_child._fork_guard(walls, control, word[0])
        assert joining is not None
        with joining:
            assert joining.recv(16) == b""  # it has ended
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert "seccomp" in refusal(ours)
    assert fork_child._fork_guard(WALLS, control, word[0]) == (0, None)


def test_kernel_after_another_process_of_its_jail_refuses_to_start(
    word: tuple[socket.socket, socket.socket],
) -> None:
    """Its number tells what was started before it."""
    ours, its = socket.socketpair()
    with ours, its:
        fds = (its.fileno(), word[0].fileno(), os.dup(0))

        def act() -> None:
            fork_child.become_kernel(fds, None, WALLS, ahead=False)  # type: ignore[arg-type]

        assert exit_status(act) == 1
        os.close(fds[2])
        assert "another process was started" in refusal(ours)
