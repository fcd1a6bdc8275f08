"""Permissions and limits as data: read a TOML file into one frozen value.

    units.py     "512MiB", "60s", "150%" → bytes, seconds, CPUs, and back to the same text
    model.py     Policy and its tables: frozen, unknown keys are errors, every value is checked
    checks.py    checks of single values: names, paths, domains, modules
    imports.py   find the imports of a cell that the rules of a policy refuse, from its text alone
    load.py      files → layers (`extends`) → one table → Policy; the directories of policies
    narrow.py    a request may tighten a policy, never widen it
    problems.py  errors of a policy file, with file, line or key

Loading reads files and does nothing else: it runs no code of a policy and opens none of its paths.
`sbx.isolation` decides later which walls this host can provide.

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
