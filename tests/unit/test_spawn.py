"""What a program that the broker starts has, and what it has not."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence

import pytest

from sbx.isolation.broker import spawn
from sbx.isolation.broker.spawn import SpawnRequest

UID = 1_900_000_123


@pytest.fixture
def null() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def output(
    command: str,
    null: int,
    become: tuple[int, int] | None = None,
    before: Callable[[], None] = lambda: None,
    more: Sequence[tuple[int, int]] = (),
) -> str:
    """Return what a shell prints that is started like bubblewrap."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    slots = [(null, 0), (writing, 1), (null, 2), *more]
    monitor = spawn.start(SpawnRequest(["/bin/sh", "-c", command], slots, become, before))
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        printed = answer.read()
    os.waitpid(monitor, 0)
    return printed.strip()


@pytest.mark.needs("root")
def test_jail_keeps_no_group_of_root(null: int) -> None:
    """The groups of its parent would open files of the host to it."""
    answer = output("id -G; id -u", null, (UID, UID), before=lambda: os.setgroups([0, 4, 12345]))
    assert answer.split() == [str(UID), str(UID)]


def test_jail_has_its_slots_and_no_other_descriptor(null: int) -> None:
    inheritable = os.dup(null)
    os.set_inheritable(inheritable, True)
    try:
        answer = output('for fd in /proc/$$/fd/*; do printf "%s " "${fd##*/}"; done', null)
    finally:
        os.close(inheritable)
    assert (
        {"0", "1", "2"} <= set(answer.split()) <= {"0", "1", "2", "3", "10"}
    )  # of the shell itself


@pytest.mark.parametrize("first", range(196, 204))
def test_slots_are_right_if_the_broker_has_two_hundred_descriptors(first: int) -> None:
    """Whatever the numbers of the files are, each slot gets its own. With a fixed number above the
    slots, some starts failed with EINVAL, and others gave a slot the file of another one."""
    files = [memory_file_at(first + index, f"file {index}") for index in range(6)]
    slots = [(fd, 3 + index) for index, fd in enumerate(files)]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        command = "for fd in 3 4 5 6 7 8; do eval cat '<&'$fd; done"
        assert output(command, null, more=slots) == "".join(f"file {n}\n" for n in range(6)).strip()
    finally:
        for fd in (*files, null):
            os.close(fd)


def memory_file_at(number: int, text: str) -> int:
    made = spawn.memory_file(f"{text}\n".encode(), "file")
    try:
        return fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, number)
    finally:
        os.close(made)


def test_jail_has_no_variable_and_a_plain_umask(null: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the broker")
    before = os.umask(0o077)
    try:
        assert output('echo "${SECRET-none}"; umask', null).split() == ["none", "0022"]
    finally:
        os.umask(before)


def test_program_that_cannot_be_started_is_an_error_of_linux(null: int) -> None:
    with pytest.raises(FileNotFoundError):
        spawn.start(SpawnRequest(["/nowhere/bwrap"], [(null, 0)], None, lambda: None))


def test_group_that_cannot_be_entered_starts_nothing(null: int) -> None:
    """Outside of its group a jail would have no limit."""

    def full() -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space") as raised:
        spawn.start(SpawnRequest(["/bin/true"], [(null, 0)], None, full))
    assert raised.value.errno == 28

    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(OSError, match="broken"):
        spawn.start(SpawnRequest(["/bin/true"], [(null, 0)], None, broken))
