"""From the table to a program for one architecture.

A program is: kill a foreign architecture, then a binary search for the number of the call, whose
leaves answer or look at arguments first. Every block ends in an answer and jumps only forward
within itself, so that blocks are put together by writing one after the other.
"""

import hashlib
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from errno import ENOSYS, errorcode

from sbx.isolation.seccomp.allowed import OPERATIONS
from sbx.isolation.seccomp.rules import (
    AllowSyscalls,
    AtLeast,
    HasAny,
    HasNone,
    In,
    Notify,
    NotIn,
    Refuse,
    Test,
)
from sbx.isolation.seccomp.table import NEW_NUMBERS, ONLY, REVIEWED, TABLES
from sbx.linux import bpf
from sbx.linux.seccomp import syscall_number

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_UNREVIEWED = [bpf.answer(bpf.errno_action(ENOSYS))]
_ALLOWED = [bpf.answer(bpf.ALLOW)]

Span = tuple[int, bpf.Block]  # the first number of a range, and what to do up to the next one


def compile_filter(
    table: Iterable[Refuse | Notify], machine: str, only: Iterable[AllowSyscalls] | None = None
) -> bpf.Block:
    """Return the program of `table` for `machine`. With `only`, calls of neither are ENOSYS.

    Raise the errors of `syscall_number`.
    """
    allowed = None if only is None else {n for n, _ in allowed_numbers(only, machine)}
    decided = {n: _rules(rules) for n, _, rules in _by_number(table, machine, allowed)}
    spans = _spans(decided, machine, allowed)
    return [
        bpf.load_architecture(),
        *bpf.jump_if("==", AUDIT_ARCH[machine], true=1),
        bpf.answer(bpf.KILL_PROCESS),
        bpf.load_number(),
        *_search(spans),
    ]


def _by_number(
    table: Iterable[Refuse | Notify], machine: str, allowed: Container[int] | None = None
) -> list[tuple[int, str, list[Refuse | Notify]]]:
    """Return the number, name and rules of each call of the table that `machine` has, in order.
    If only `allowed` calls exist, leave out rules about arguments of others."""
    rules_of: dict[str, list[Refuse | Notify]] = defaultdict(list)
    for rule in table:
        for name in rule.calls.split():
            rules_of[name].append(rule)
    numbered = ((number_of(name, machine), name, rules) for name, rules in rules_of.items())
    return sorted(
        (n, name, rules)
        for n, name, rules in numbered
        if n is not None
        and (allowed is None or n in allowed or any(not rule.when for rule in rules))
    )


def allowed_numbers(only: Iterable[AllowSyscalls], machine: str) -> list[tuple[int, str]]:
    """Return the number and the name of each call of an allowlist that `machine` has, in order."""
    named = {name for group in only for name in group.calls.split()}
    numbered = ((number_of(name, machine), name) for name in named)
    return sorted((n, name) for n, name in numbered if n is not None)


def number_of(name: str, machine: str) -> int | None:
    """Return the number of a call; None if `machine` lacks it. Raise ValueError for no such
    call."""
    if name in NEW_NUMBERS:
        return NEW_NUMBERS[name]
    numbers = {architecture: syscall_number(name, architecture) for architecture in AUDIT_ARCH}
    if set(numbers.values()) == {None}:
        raise ValueError(f"no architecture has a call {name!r}, or libseccomp does not know it")
    return numbers[machine]


def _spans(
    refused: dict[int, bpf.Block], machine: str, allowed: Container[int] | None
) -> list[Span]:
    """Return the actions of all numbers from 0 up. Equal neighbours are one span."""
    spans: list[Span] = []

    def add(first: int, block: bpf.Block) -> None:
        if not spans or spans[-1][1] != block:
            spans.append((first, block))

    for first, last in REVIEWED[machine]:
        for number in range(first, last + 1):
            exists = allowed is None or number in allowed
            add(number, refused.get(number, _ALLOWED if exists else _UNREVIEWED))
        add(last + 1, _UNREVIEWED)
    return spans


def _search(spans: Sequence[Span]) -> bpf.Block:
    if len(spans) == 1:
        return spans[0][1]
    middle = len(spans) // 2
    low, high = _search(spans[:middle]), _search(spans[middle:])
    return [*bpf.jump_if(">=", spans[middle][0], true=len(low)), *low, *high]


def _rules(rules: Iterable[Refuse | Notify]) -> bpf.Block:
    """Return the rules of one call in the order of the table; the first match decides."""
    block: bpf.Block = []
    for rule in rules:
        refusal = [bpf.answer(_action(rule))]
        for test in reversed(rule.when):
            refusal = _test(test, otherwise=len(refusal)) + refusal
        block += refusal
        if not rule.when:
            return block
    return block + _ALLOWED


def _action(rule: Refuse | Notify) -> int:
    return bpf.NOTIFY if isinstance(rule, Notify) else bpf.errno_action(rule.errno)


def _test(test: Test, otherwise: int) -> bpf.Block:
    """Continue with the next instruction if `test` holds, else skip `otherwise` of them."""
    load = [bpf.load_argument(test.argument)]
    match test:
        case HasAny(_, bits):
            return load + bpf.jump_if("&", bits, false=otherwise)
        case HasNone(_, bits):
            return load + bpf.jump_if("&", bits, true=otherwise)
        case AtLeast(_, value):
            return load + bpf.jump_if(">=", value, false=otherwise)
        case In(_, (*others, last), mask):
            block = bpf.jump_if("==", last, false=otherwise)
            for value in others:
                block = bpf.jump_if("==", value, true=len(block)) + block
        case NotIn(_, values, mask):
            block = []
            for value in values:
                block = bpf.jump_if("==", value, true=otherwise + len(block)) + block
    return load + ([bpf.mask(mask)] if mask != 0xFFFFFFFF else []) + block


def _describe(rule: Refuse | Notify) -> str:
    """Return a rule as text of the listing: `EPERM if argument 1 has any of 0o6000`."""
    names = {number: name for name, number, _ in OPERATIONS.get(rule.calls, ())}
    conditions = " and ".join(
        f"argument {test.argument} {_condition(test, names)}" for test in rule.when
    )
    outcome = "notify" if isinstance(rule, Notify) else errorcode.get(rule.errno, "no effect")
    return outcome + (f" if {conditions}" if conditions else "")


def _condition(test: Test, names: Mapping[int, str]) -> str:
    match test:
        case HasAny(_, bits):
            return f"has any of {bits:#x}"
        case HasNone(_, bits):
            return f"has none of {bits:#x}"
        case AtLeast(_, value):
            return f">= {value}"
        case In(_, values, mask) | NotIn(_, values, mask):
            shown = f"& {mask:#x} " if mask != 0xFFFFFFFF else ""
            listed = ", ".join(names.get(value, f"{value:#x}") for value in values)
            return f"{shown}{'in' if isinstance(test, In) else 'not in'} ({listed})"


def listing(name: str, machine: str) -> str:
    """Return the text of the file of filter `name` for `machine`."""
    program = compile_filter(TABLES[name], machine, ONLY.get(name))
    reviewed = ", ".join(f"{first} to {last}" for first, last in REVIEWED[machine])
    return "\n".join(
        [
            f"# The seccomp filter {name} for {machine}, {len(program)} instructions.",
            "# Written by scripts/filters from table.py, which also says why: do not edit.",
            f"# sha256 {hashlib.sha256(bpf.pack(program)).hexdigest()}",
            "#",
            "# A foreign architecture is killed; of two rules for one call the first that fits",
            f"# answers. Allowed: {_rest(name)} of {reviewed}.",
            "# ENOSYS: all other numbers.",
            "#",
            *_decisions(name, machine),
            "#",
            *_instructions(program),
            "",
        ]
    )


def _rest(name: str) -> str:
    return "what is marked so below," if name in ONLY else "every other call"


def _decisions(name: str, machine: str) -> list[str]:
    allowed = dict(allowed_numbers(ONLY.get(name, ()), machine))
    table = _by_number(TABLES[name], machine, allowed if name in ONLY else None)
    decided = [(n, call, _describe(rule)) for n, call, rules in table for rule in rules]
    looked_at = {n for n, _, rules in table if all(rule.when for rule in rules)}
    decided += [
        (n, call, "allowed otherwise" if n in looked_at else "allowed")
        for n, call in allowed.items()
    ]
    decided.sort(key=lambda line: line[0])  # stable: the rules of one call stay in their order
    return [f"# {n:4} {call:20} {outcome}" for n, call, outcome in decided]


def _instructions(program: bpf.Block) -> list[str]:
    return [
        f"{bpf.pack([instruction]).hex(' ', 2)}  # {at:4} {bpf.explain(at, instruction)}"
        for at, instruction in enumerate(program)
    ]
