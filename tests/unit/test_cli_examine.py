"""What doctor concludes of hosts that this one is not."""

import os

from sbx.doctor.host_check import host_ids, verdict
from sbx.doctor.resources import HostResources
from sbx.isolation.probe import Capabilities, Layer
from sbx.policy import load

NAMES = ("bwrap", "namespaces", "landlock", "seccomp", "memory", "tasks", "cpu")


def host(*missing: str) -> Capabilities:
    layers = tuple(
        Layer(name, False, "not there", f"why {name}", f"get {name}")
        if name in missing
        else Layer(name, True, "there")
        for name in NAMES
    )
    return Capabilities("6.1", "x86_64", False, "/usr/bin/bwrap", frozenset(), 1, True, layers)


def test_a_host_with_everything_runs_every_policy_without_weaker_walls() -> None:
    for name in ("default", "strict", "data-science"):
        found = verdict(load(name), host())
        assert (found.runs, found.weaker) == (True, ())


def test_a_hard_wall_that_is_missing_is_the_cause_with_its_remedy() -> None:
    found = verdict(load("default"), host("landlock"))
    assert not found.runs
    assert "why landlock" in (found.cause or "")
    assert found.remedy == "get landlock"


def test_a_best_effort_wall_that_is_missing_is_named_with_its_lesser_means() -> None:
    found = verdict(load("default"), host("memory"))
    assert found.runs
    assert [wall for wall, _ in found.weaker] == ["memory"]
    assert not verdict(load("strict"), host("memory")).runs


def test_a_container_that_maps_few_ids_is_told_from_a_host() -> None:
    whole, few = "0 0 4294967295", "0 100000 65536"
    assert host_ids([whole, whole], 1_900_000_000, 100).available
    assert not host_ids([few, few], 1_900_000_000, 100).available
    assert not host_ids([whole, few], 60_000, 10_000).available
    assert host_ids([f"0 0 1\n{few}", few], 60_000, 5_000).available


def test_a_shortage_of_memory_or_cpu_is_a_hint() -> None:
    ample = HostResources(cpus=2, memory_total=8 << 30, memory_available=4 << 30, load=1.5)
    assert ample.sentence() == "2 CPUs, 4.0 of 8.0 GiB of memory available, load 1.5"
    assert ample.hints() == []
    short = HostResources(cpus=2, memory_total=8 << 30, memory_available=100 << 20, load=9.0)
    assert short.hints() == [
        ("memory", "less than 512 MiB of memory is available: kernels may be killed"),
        ("load", "the load is 9 on 2 CPUs: starts and runs take longer"),
    ]


def test_the_resources_of_this_host_are_read() -> None:
    resources = HostResources.read()
    assert resources.cpus == len(os.sched_getaffinity(0))
    assert 0 < resources.memory_available < resources.memory_total
