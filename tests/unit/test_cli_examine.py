"""What doctor concludes of hosts that this one is not."""

from sbx.doctor.host_check import host_ids, verdict
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
