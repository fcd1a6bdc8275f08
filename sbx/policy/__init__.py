"""What is allowed, as data: a TOML file becomes one frozen value that everything else reads.

    units.py     "512MiB", "60s", "150%" → bytes, seconds, CPUs, and back to the same words
    model.py     Policy and its tables: frozen, every key known, every value checked
    checks.py    names, paths, domains, modules: what one value may be
    imports.py   which imports of a cell the rules of a policy refuse, from its text alone
    load.py      files → layers (`extends`) → one table → Policy; where policies are found
    narrow.py    a request may tighten a policy, never widen it
    problems.py  what is wrong with a file, in words that name file, line or key

Loading reads files and nothing else: no code of a policy runs, no path of it is opened. Which walls
this host can give is decided later, by `sbx.isolation`.

May import: sbx.errors, pydantic, the standard library.
"""

from sbx.policy.load import (
    PolicyInfo,
    available,
    check,
    directories,
    load,
    reference,
    shipped_directory,
    unchanged,
)
from sbx.policy.model import Policy, describe, fingerprint
from sbx.policy.narrow import narrow
from sbx.policy.problems import Problem

__all__ = [
    "Policy",
    "PolicyInfo",
    "Problem",
    "available",
    "check",
    "describe",
    "directories",
    "fingerprint",
    "load",
    "narrow",
    "reference",
    "shipped_directory",
    "unchanged",
]
