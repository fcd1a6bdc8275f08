"""The text of a `.bpf` file: the decisions for a reader, then the program for the loader."""

import hashlib

from sbx.isolation.filters.compiler import by_number, compile_filter, describe
from sbx.isolation.filters.table import REVIEWED, TABLES
from sbx.linux import bpf


def listing(name: str, machine: str) -> str:
    """What belongs into the file of filter `name` for `machine`. Raises as `compile_filter`."""
    program = compile_filter(TABLES[name], machine)
    reviewed = ", ".join(f"{first} to {last}" for first, last in REVIEWED[machine])
    return "\n".join(
        [
            f"# The seccomp filter {name} for {machine}, {len(program)} instructions.",
            "# Written by scripts/filters from table.py, which also says why: do not edit.",
            f"# sha256 {hashlib.sha256(bpf.pack(program)).hexdigest()}",
            "#",
            "# A foreign architecture is killed; of two rules for one call the first that fits",
            f"# answers. Allowed: every other call of {reviewed}.",
            "# ENOSYS: all other numbers.",
            "#",
            *_decisions(name, machine),
            "#",
            *_instructions(program),
            "",
        ]
    )


def _decisions(name: str, machine: str) -> list[str]:
    return [
        f"# {number:4} {call:20} {describe(rule)}"
        for number, call, rules in by_number(TABLES[name], machine)
        for rule in rules
    ]


def _instructions(program: bpf.Block) -> list[str]:
    return [
        f"{bpf.pack([instruction]).hex(' ', 2)}  # {at:4} {bpf.explain(at, instruction)}"
        for at, instruction in enumerate(program)
    ]
