"""Permissions and limits as data: read a TOML file into one frozen value.

    units.py     "512MiB", "60s", "150%" → bytes, seconds, CPUs, and back to the same text
    model.py     Policy: all tables and the keys outside of a table, checked together
    tables.py    the tables of a policy: frozen, unknown keys are errors, every value is checked
    checks.py    checks of single values: names, paths, domains, modules
    imports.py   find the imports of a cell that the rules of a policy refuse, from its text alone
    find.py      the directories of policies, and the file of a name
    load.py      files → layers (`extends`) → one table → Policy
    narrow.py    a request may tighten a policy, never widen it
    templates.py the policy of an image or template that another product names
    grants.py    access that a person granted to one conversation, beyond its policy
    problems.py  errors of a policy file, with file, line or key

Loading reads files and does nothing else: it runs no code of a policy and opens none of its paths.
`sbx.isolation` decides later which walls this host can provide.

May import: errors, protocol, telemetry, pydantic, the standard library.
"""

from sbx.policy.find import directories, reference, shipped_directory
from sbx.policy.load import PolicyInfo, available, check, load, unchanged
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
