"""What is written for which limits, how control files are read, and the hierarchy that has none."""

from pathlib import Path

import pytest

from sbx.isolation.cgroups import (
    CgroupCapabilities,
    CgroupEvents,
    CgroupLimits,
    CgroupUsage,
    IoLimit,
    Missing,
    controlfile,
    groups,
    open_hierarchy,
    v1,
    v2,
)

LIMITS = CgroupLimits(50 << 20, 30, 0.5, (IoLimit("8:0", write_bps=1024),))
ALL = ("memory", "tasks", "cpu", "io")


def test_v1_sandbox_counts_swap_with_memory() -> None:
    assert v1.sandbox_settings(LIMITS, counts_swap=True) == [
        ("memory", "memory.limit_in_bytes", "52428800"),
        ("memory", "memory.memsw.limit_in_bytes", "52428800"),
        ("memory", "memory.kmem.tcp.limit_in_bytes", "13107200"),
        ("tasks", "pids.max", "30"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("cpu", "cpu.cfs_quota_us", "50000"),
    ]
    no_swap = v1.sandbox_settings(CgroupLimits(memory_max=4096), counts_swap=False)
    assert no_swap[1] == ("memory", "memory.swappiness", "0")


def test_v1_throttling_is_written_to_the_jail() -> None:
    file = "blkio.throttle.write_bps_device"
    counted = ("memory", "memory.kmem.tcp.limit_in_bytes", "-1")
    assert v1.jail_settings(LIMITS) == [counted, ("io", file, "8:0 1024")]


def test_v2_sandbox_holds_the_limits() -> None:
    assert v2.sandbox_settings(LIMITS, ALL) == [
        ("memory.high", "51609600", False),
        ("memory.max", "52428800", False),
        ("memory.swap.max", "0", True),
        ("pids.max", "30", False),
        ("cpu.max", "50000 100000", False),
        ("io.max", "8:0 rbps=max wbps=1024", False),
    ]


def test_v2_jail_dies_as_a_whole_and_counts_its_own_refused_forks() -> None:
    assert v2.jail_settings(LIMITS, ALL) == [
        ("cgroup.max.descendants", "0", True),
        ("memory.oom.group", "1", True),
        ("pids.max", "30", False),
    ]


@pytest.mark.parametrize(
    ("limit", "high"), [(32 << 20, 63 << 19), (1 << 30, 1008 << 20), (64 << 30, (65536 - 16) << 20)]
)
def test_v2_memory_high_is_a_64th_below_the_limit_and_never_more_than_16_mib(
    limit: int, high: int
) -> None:
    assert v2.memory_high(limit) == high


def test_v2_leaves_out_what_has_no_controller() -> None:
    assert v2.sandbox_settings(LIMITS, ("tasks",)) == [("pids.max", "30", False)]
    assert v2.jail_settings(LIMITS, ()) == [("cgroup.max.descendants", "0", True)]


def test_no_limits_write_nothing() -> None:
    assert v1.sandbox_settings(CgroupLimits(), counts_swap=True) == []
    assert v2.sandbox_settings(CgroupLimits(), ALL) == []


def test_quota_below_what_linux_takes_is_raised_to_it() -> None:
    assert v2.sandbox_settings(CgroupLimits(cpu_quota=0.001), ALL)[0].text == "1000 100000"
    assert v1.sandbox_settings(CgroupLimits(cpu_quota=0.001), counts_swap=True)[1].text == "1000"


@pytest.mark.parametrize("text", ["max\n", "-1\n", "9223372036854771712\n", None])
def test_unlimited_reads_as_none(text: str | None) -> None:
    assert controlfile.number(text) is None


def test_field_is_found_by_its_whole_name() -> None:
    text = "low 0\noom 3\noom_kill 2\noom_group_kill 1\n"
    assert controlfile.field(text, "oom_kill") == 2
    assert controlfile.field(text, "kill") is None
    assert controlfile.field(None, "oom_kill") is None
    assert controlfile.fields_sum(text, "oom", "oom_kill") == 5
    assert controlfile.fields_sum(text, "oom", "kill") is None


def test_tightest_limit_may_be_one_from_outside(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "pids.max").write_text("20\n")
    (inner / "pids.max").write_text("30\n")
    assert controlfile.tightest(str(inner), "pids.max") == 20
    (tmp_path / "outer" / "pids.max").write_text("max\n")
    assert controlfile.tightest(str(inner), "pids.max") == 30


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "a" * 129, "é", "a b"])
def test_name_that_is_no_plain_word_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a cgroup"):
        groups.checked(name)


def test_sweep_takes_the_groups_of_dead_processes_only(tmp_path: Path) -> None:
    mine = groups.runtime_name("alive")
    reused = mine.replace("alive", "reused") + "1"  # same pid, started at another time
    for name in (mine, reused, "sbx-dead-4194305-1", "sbx-strange", "other-1-1"):
        (tmp_path / name / "box-a").mkdir(parents=True)
    assert groups.sweep([str(tmp_path)]) == ["sbx-dead-4194305-1", reused]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine, "sbx-strange", "other-1-1"}


def test_making_groups_is_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError):
        groups.make([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_hierarchy_without_controllers_limits_nothing_and_says_why() -> None:
    why = {"memory": Missing("not root", "be root")}
    hierarchy = open_hierarchy(CgroupCapabilities(1, {}, why), "r1")
    assert hierarchy.version == 0
    assert hierarchy.capabilities.missing == why
    sandbox = hierarchy.make_sandbox("a", LIMITS)
    jail = sandbox.make_jail("k")
    jail.enter()
    jail.kill()
    assert jail.pids() == []
    assert (jail.events(), jail.usage(), jail.limits()) == (
        CgroupEvents(),
        CgroupUsage(),
        CgroupLimits(),
    )
    jail.remove(0)
    sandbox.remove()
    hierarchy.close()


@pytest.mark.parametrize("version", [1, 2])
def test_hierarchy_that_cannot_be_made_falls_back_with_the_cause(version: int) -> None:
    capabilities = CgroupCapabilities(version, {"memory": "/nowhere"}, {}, scope=("systemd-run",))
    hierarchy = open_hierarchy(capabilities, "r1")
    assert hierarchy.version == 0
    missing = hierarchy.capabilities.missing["memory"]
    assert missing.cause.startswith("no groups can be set up in /nowhere")
    assert "systemd-run --scope -p Delegate=yes" in missing.remedy
