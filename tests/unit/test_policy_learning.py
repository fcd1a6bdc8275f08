"""How a policy is narrowed by what a run used, and how the result is written. Pure."""

from typing import Any

from sbx.policy import Policy, load
from sbx.protocol.runs import Run, Status
from sbx.runtime.learning import Observation, changes, narrowings, permissive

MIB = 1 << 20


def run(duration_s: float = 0.1) -> Run:
    return Run(run_id="run-1", status=Status.OK, duration_s=duration_s)


def requests(seen: Observation, base: str = "default", *, python: bool = True) -> dict[str, Any]:
    return dict(narrowings(load(base), seen, python=python))


def test_the_first_policy_allows_processes_and_the_hosts_seen_so_far() -> None:
    policy = permissive(load("strict"), ["a.example.org:443"], ["127.0.0.2"])
    assert (policy.name, policy.processes, policy.filter) == ("strict", True, "default")
    assert policy.network.allow == ("a.example.org:443",)
    assert policy.network.allow_private == ("127.0.0.2",)
    assert policy.imports == Policy(name="x").imports
    assert permissive(load("default"), [], []).network.mode == "proxy"


def test_limits_leave_room_above_what_was_used() -> None:
    seen = Observation(run(7.1), memory_peak=100 * MIB, disk=30 * MIB)
    assert requests(seen)["lower limits"] == {
        "limits": {
            "memory_max": 160 * MIB,  # one and a half, in steps of 32 MiB
            "workspace_max": 60 * MIB,
            "run_timeout": 29,
            "wall_time": 29,
        }
    }
    small = Observation(run(0.01), memory_peak=MIB, disk=0)
    assert requests(small)["lower limits"]["limits"] == {
        "memory_max": 64 * MIB,
        "workspace_max": 16 * MIB,
        "run_timeout": 10,
        "wall_time": 10,
    }
    assert set(requests(Observation(run()))["lower limits"]["limits"]) == {
        "run_timeout",
        "wall_time",
    }


def test_only_the_hosts_that_were_reached_stay() -> None:
    seen = Observation(run(), hosts=("a.example.org:443",))
    assert requests(seen)["only these hosts"] == {"network": {"allow": ["a.example.org:443"]}}
    assert "processes off" not in requests(seen)  # without processes nothing reaches the proxy
    assert requests(Observation(run()))["the network off"] == {"network": {"mode": "none"}}
    assert "processes off" in requests(Observation(run()))
    assert "processes off" not in requests(Observation(run()), python=False)


def test_the_import_rules_of_the_base_are_tried_first() -> None:
    (name, request), *_ = narrowings(load("strict"), Observation(run()), python=True)
    assert name == "the import rules of the base"
    assert "json" in request["imports"]["allow"]


def test_only_what_differs_is_written() -> None:
    base = load("default")
    assert changes(base, base) == {}
    limits = base.limits.model_copy(update={"memory_max": 64 * MIB})
    policy = base.model_copy(update={"limits": limits, "filter": "allowlist"})
    assert changes(base, policy) == {"filter": "allowlist", "limits": {"memory_max": "64MiB"}}
