"""Report the coverage that `plugin` measured.

    python -m tests.tracing.report DIRECTORY

Prints the total, the files under 85 %, the files of WALLS under 95 % (then the exit status is 1),
and the test functions that run no line or branch that no other test runs.
"""

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import coverage

FILES_MIN = 85.0
WALLS_MIN = 95.0
# The walls, the broker, the lockdown and the path rules.
WALLS = (
    "sbx/isolation/*.py",
    "sbx/isolation/filters/*.py",
    "sbx/guest/start/cold.py",
    "sbx/guest/start/fork_child.py",
    "sbx/guest/guarded_*.py",
    "sbx/guest/hard_links.py",
    "sbx/guest/path_*.py",
    "sbx/guest/start/lockdown.py",
    "sbx/guest/shares.py",
    "sbx/guest/start/zygote.py",
    "sbx/linux/capabilities.py",
    "sbx/linux/landlock.py",
    "sbx/linux/mounts.py",
    "sbx/linux/namespaces.py",
    "sbx/linux/openat2.py",
    "sbx/linux/prctl.py",
    "sbx/linux/seccomp*.py",
    "sbx/workspace/allowed_paths.py",
    "sbx/workspace/safe_open.py",
    "sbx/workspace/paths.py",
    "sbx/forbidden_directories.py",
)
# They run on a host with cgroup v2 only, as the guest of tests/vm is.
_V2 = ("sbx/isolation/cgroups/v2.py",)


class FileCoverage(NamedTuple):
    """`lines` is the share of lines that ran, `both` of lines and branches, in per cent."""

    path: str
    lines: float
    both: float
    missing: list[int]


def combined(directory: Path) -> coverage.Coverage:
    """Put the data of all workers together."""
    found = coverage.Coverage(data_file=str(directory / ".coverage"))
    parts = [str(path) for path in directory.glob(".coverage.*")]
    if parts:
        found.combine(parts)
    found.load()
    return found


def files(data: coverage.Coverage, directory: Path) -> tuple[float, list[FileCoverage]]:
    """Return the total of lines and branches, and each file."""
    report = directory / "coverage.json"
    total = data.json_report(outfile=str(report), ignore_errors=True)
    content = json.loads(report.read_text())
    return total, [
        FileCoverage(
            path,
            _percent(one["summary"]["covered_lines"], one["summary"]["num_statements"]),
            one["summary"]["percent_covered"],
            one["missing_lines"],
        )
        for path, one in sorted(content["files"].items())
    ]


def _ranges(lines: list[int]) -> Iterator[str]:
    """Yield `3` and `5-9` for line numbers in their order."""
    for _, group in groupby(enumerate(lines), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        yield f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def without_own_arc(database: Path) -> Iterator[str]:
    """Yield the test functions of which every arc is also one of another test."""
    with closing(sqlite3.connect(database)) as on:
        rows = on.execute(
            "SELECT context FROM context WHERE context != '' AND id NOT IN"
            " (SELECT DISTINCT owner FROM (SELECT min(context_id) AS owner FROM arc"
            " JOIN context ON context.id = context_id WHERE context != ''"
            " GROUP BY file_id, fromno, tono HAVING count(*) = 1)) ORDER BY context"
        )
        for (context,) in rows:
            yield context


def main(directory: Path) -> int:
    """Print the report, and return the exit status."""
    total, measured = files(combined(directory), directory)
    print(f"total: {total:.1f} % of lines and branches, {len(measured)} files")
    print(f"\nfiles under {FILES_MIN:g} % of lines:")
    for one in measured:
        if one.lines < FILES_MIN:
            print(f"  {one.lines:5.1f} %  {one.path}")
    walls = [one for one in measured if any(fnmatch(one.path, wall) for wall in WALLS)]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        print(f"\nnot measured, since this host has no cgroup v2: {', '.join(_V2)}")
        walls = [one for one in walls if one.path not in _V2]
    low = [one for one in walls if one.lines < WALLS_MIN]
    print(f"\n{len(walls)} files of walls, the broker, the lockdown and path rules, the lowest:")
    for one in sorted(walls, key=lambda one: one.lines)[: max(5, len(low))]:
        missing = ", ".join(_ranges(one.missing))
        print(f"  {one.lines:5.1f} %  {one.both:5.1f} % with branches  {one.path}: {missing}")
    tests = list(without_own_arc(directory / ".coverage"))
    print(f"\n{len(tests)} test functions run no line or branch that no other test runs:")
    for test in tests:
        print(f"  {test}")
    if low:
        print(f"\n{len(low)} files of walls are under {WALLS_MIN:g} % of lines", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
