"""The calls of the path guard: their numbers, and that the filter names the same ones."""

import pytest

from sbx.isolation.seccomp import load_filter
from sbx.isolation.seccomp.compiler import AUDIT_ARCH
from sbx.isolation.seccomp.rules import Notify
from sbx.isolation.seccomp.table import GUARD, NEW_NUMBERS
from sbx.linux import bpf, seccomp_notify
from sbx.linux.seccomp import syscall_number

pytest.importorskip("pyseccomp", exc_type=ImportError)


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_numbers_are_those_of_linux(machine: str) -> None:
    known = {
        name: NEW_NUMBERS.get(name) or syscall_number(name, machine)
        for rule in GUARD
        if isinstance(rule, Notify)
        for name in rule.calls.split()
    }
    there = {name: number for name, number in known.items() if number is not None}
    assert seccomp_notify.path_calls(machine) == there


@pytest.mark.parametrize("machine", AUDIT_ARCH)
@pytest.mark.parametrize(
    ("name", "arguments", "asked"),
    [
        ("openat", (0, 0, 0), False),
        ("openat", (0, 0, 1), True),
        ("openat", (0, 0, 2), True),
        ("openat", (0, 0, 0o100), True),
        ("openat", (0, 0, 0o1000), True),
        ("openat", (0, 0, 0o20200000), True),
        ("openat", (0, 0, 0o200000), False),
        ("mkdirat", (), True),
        ("renameat2", (), True),
        ("fchmod", (), True),
    ],
)
def test_filter_asks_for_calls_that_change_files(
    machine: str, name: str, arguments: tuple[int, ...], asked: bool
) -> None:
    program = bpf.unpack(load_filter("guard", machine).program)
    number = seccomp_notify.path_calls(machine)[name]
    action = bpf.decide(
        program, architecture=AUDIT_ARCH[machine], number=number, arguments=arguments
    )
    assert action == (bpf.NOTIFY if asked else bpf.ALLOW)
