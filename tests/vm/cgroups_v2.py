"""Runs the cgroup tests on a host with cgroup v2, as a broker would be started there.

    python3 tests/vm/cgroups_v2.py [option of pytest ...]

To be run from the project's root in a cgroup v2 guest: as root, as a user in a login session, and
as a user in a delegated scope of its own. It needs Python 3.11 and pytest alone, no package of
the project's. It prints what was probed and the prefix that `scope_command` gives, replaces
itself with that command, and fails if what comes up then is not version 2. The exit status is
pytest's.
"""

import os
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from sbx.isolation.cgroups import open_hierarchy, probe, scope_command  # noqa: E402

INSIDE = "--inside"
TESTS = [
    "tests/unit/test_cgroups_probe.py",
    "tests/unit/test_cgroups_settings.py",
    "tests/integration/test_cgroups_contract.py",
    "tests/integration/test_cgroups_v2.py",
    "tests/integration/test_storage.py",
]


def main() -> int:
    capabilities = probe()
    print(capabilities, flush=True)
    if INSIDE not in sys.argv:
        prefix = scope_command(capabilities, movable={os.getpid()}) or []
        print("prefix:", prefix, flush=True)
        command = [*prefix, sys.executable, __file__, INSIDE, *sys.argv[1:]]
        os.execv(command[0], command)
    hierarchy = open_hierarchy(capabilities, "check")
    hierarchy.close()
    if hierarchy.version != 2:
        print("not version 2:", hierarchy.capabilities.missing, file=sys.stderr)
        return 1
    import pytest

    options = ["-c", os.devnull, "--rootdir", str(PROJECT), "-p", "no:cacheprovider", "-ra", "-q"]
    options.append("--noconftest")  # what the other tests share needs the project's packages
    asked = [word for word in sys.argv[1:] if word != INSIDE]
    return pytest.main([*options, *asked, *(str(PROJECT / test) for test in TESTS)])


if __name__ == "__main__":
    sys.exit(main())
