"""The text of a `.bpf` file: the decisions for a reader, then the program for the loader."""

import hashlib

from sbx.isolation.seccomp.compiler import allowed_numbers, by_number, compile_filter, describe
from sbx.isolation.seccomp.table import ONLY, REVIEWED, TABLES
from sbx.linux import bpf


def listing(name: str, machine: str) -> str:
    """What belongs into the file of filter `name` for `machine`. Raises as `compile_filter`."""
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
    table = by_number(TABLES[name], machine, allowed if name in ONLY else None)
    decided = [(n, call, describe(rule)) for n, call, rules in table for rule in rules]
    looked_at = {n for n, _, rules in table if all(rule.when for rule in rules)}
    decided += [
        (n, call, "allowed otherwise" if n in looked_at else "allowed")
        for n, call in allowed.items()
    ]
    decided.sort(key=lambda one: one[0])  # stable: the rules of one call stay in their order
    return [f"# {n:4} {call:20} {said}" for n, call, said in decided]


def _instructions(program: bpf.Block) -> list[str]:
    return [
        f"{bpf.pack([instruction]).hex(' ', 2)}  # {at:4} {bpf.explain(at, instruction)}"
        for at, instruction in enumerate(program)
    ]
