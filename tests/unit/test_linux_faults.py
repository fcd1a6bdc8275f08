"""Calls that Linux interrupts or does not have, as the wrappers answer their callers."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbx.linux import libc, openat2, seccomp, seccomp_notify
from sbx.linux.seccomp_notify import SyscallNotice
from sbx.workspace import safe_open

Fault = Callable[..., Any]


def failing(*numbers: int, then: Fault) -> Fault:
    """Return a function that fails with each of these, and then does as `then`."""
    left = list(numbers)

    def act(*args: Any, **named: Any) -> Any:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return then(*args, **named)

    return act


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    for answer in (openat2.supported, seccomp.supported):
        answer.cache_clear()
    yield
    for answer in (openat2.supported, seccomp.supported):
        answer.cache_clear()


def test_open_that_a_signal_interrupts_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "syscall", failing(errno.EINTR, errno.EINTR, then=libc.syscall))
    os.close(openat2.openat2(-100, bytes(tmp_path), os.O_PATH))


def test_host_without_openat2_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert safe_open.opener() is safe_open.by_openat2
    openat2.supported.cache_clear()
    monkeypatch.setattr(libc, "syscall", failing(errno.ENOSYS, then=libc.syscall))
    assert safe_open.opener() is safe_open.by_walk


def test_host_without_filters_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "syscall", failing(errno.EINVAL, then=libc.syscall))
    assert not seccomp.supported()


def test_unknown_machine_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*known[:4], "riscv64")))
    for ask in (lambda: seccomp.install(bytes(8)), seccomp_notify.path_calls):
        with pytest.raises(OSError, match="riscv64") as raised:
            ask()
        assert raised.value.errno == errno.ENOSYS


def test_listener_of_an_older_linux_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux 5.19 knows WAIT_KILLABLE, and an older one answers EINVAL."""
    flags: list[int] = []

    def install(name: str, number: int, mode: int, given: int, program: object) -> int:
        flags.append(given)
        return 42

    monkeypatch.setattr(libc, "syscall", failing(errno.EINVAL, then=install))
    assert seccomp.install_with_listener(bytes(8)) == 42
    assert flags == [8]
    monkeypatch.setattr(libc, "syscall", failing(errno.EBUSY, then=install))
    with pytest.raises(OSError, match="busy") as raised:
        seccomp.install_with_listener(bytes(8))
    assert raised.value.errno == errno.EBUSY


def test_answer_is_repeated_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller inside would wait for it without end."""
    monkeypatch.setattr(fcntl, "ioctl", failing(errno.EINTR, then=lambda *args: 0))
    assert seccomp_notify.succeed(-1, 1)


@pytest.mark.parametrize("answer", ["succeed", "fail", "let_run", "give_fd"])
def test_call_whose_caller_has_ended_needs_no_answer(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", failing(errno.ENOENT, then=fcntl.ioctl))
    more: dict[str, Any] = {
        "succeed": {},
        "fail": {"number": errno.EPERM},
        "let_run": {},
        "give_fd": {"fd": 0, "close_on_exec": True},
    }[answer]
    assert not getattr(seccomp_notify, answer)(-1, 1, **more)


def test_answer_that_linux_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", failing(errno.EMFILE, then=fcntl.ioctl))
    with pytest.raises(OSError, match="Too many open files"):
        seccomp_notify.give_fd(-1, 1, 0, close_on_exec=False)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINTR])
def test_call_that_was_killed_before_it_was_read_is_none(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", failing(number, errno.EBADF, then=fcntl.ioctl))
    assert seccomp_notify.receive(-1) is None
    with pytest.raises(OSError, match="Bad file"):
        seccomp_notify.receive(-1)


def test_call_is_read_as_linux_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """struct seccomp_notif: id, pid, flags, nr, arch, instruction pointer, six arguments."""

    def tell(listener: int, request: int, buffer: bytearray) -> int:
        seccomp_notify._NOTIFICATION.pack_into(buffer, 0, 7, 42, 0, 257, 0, 0, *range(6))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", tell)
    assert seccomp_notify.receive(-1) == SyscallNotice(7, 42, 257, (0, 1, 2, 3, 4, 5))


@pytest.mark.parametrize("component", ["", ".", "..", "a/b", "a\0b"])
def test_component_that_is_not_plain_is_no_name(component: str) -> None:
    with pytest.raises(OSError, match="plain path component") as raised:
        safe_open.encoded(component)
    assert raised.value.errno == errno.EINVAL
