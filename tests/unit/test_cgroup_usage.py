"""What a whole sandbox uses is read from its own group, as what a jail uses is from the jail's."""

from pathlib import Path

from sbx.isolation.cgroups import CgroupLimits, CgroupUsage, NoSandbox
from sbx.isolation.cgroups.v1 import V1Group, V1Sandbox
from sbx.isolation.cgroups.v2 import V2Sandbox


def test_of_version_2(tmp_path: Path) -> None:
    for name, text in (
        ("memory.current", "1000\n"),
        ("memory.stat", "anon 300\nfile 600\nshmem 40\n"),
        ("memory.peak", "2000\n"),
        ("pids.current", "7\n"),
        ("cpu.stat", "usage_usec 2500000\nuser_usec 1\n"),
    ):
        (tmp_path / name).write_text(text)
    box = V2Sandbox(str(tmp_path), CgroupLimits(), ("memory", "tasks", "cpu"))
    assert box.usage() == CgroupUsage(1000, 340, 2000, 7, 2.5)
    (tmp_path / "memory.peak").unlink()  # linux before 5.19
    assert box.usage().memory_peak is None


def test_of_version_1(tmp_path: Path) -> None:
    for name, text in (
        ("memory.usage_in_bytes", "1000"),
        ("memory.stat", "rss 1\ntotal_rss 300\ntotal_shmem 40"),
        ("memory.max_usage_in_bytes", "2000"),
        ("pids.current", "7"),
        ("cpuacct.usage", "2500000000"),
    ):
        (tmp_path / name).write_text(f"{text}\n")
    trees = dict.fromkeys(("memory", "tasks", "cpuacct"), str(tmp_path))
    assert V1Sandbox(trees, V1Group(trees), CgroupLimits()).usage() == CgroupUsage(
        1000, 340, 2000, 7, 2.5
    )
    assert V1Sandbox(
        {"tasks": str(tmp_path)}, V1Group(trees), CgroupLimits()
    ).usage() == CgroupUsage(tasks=7)


def test_of_none() -> None:
    assert NoSandbox().usage() == CgroupUsage()
