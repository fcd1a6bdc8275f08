"""Narrowing: a request tightens, and whatever would widen is refused by name."""

from typing import Any

import pytest

from sbx.errors import BadRequest
from sbx.policy import Policy, load, narrow
from sbx.policy.narrow import _ORDER, ASKABLE
from sbx.policy.problems import all_keys


def refused(policy: Policy, request: dict[str, Any], code: str = "limit_widened") -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        narrow(policy, request)
    assert caught.value.code == code
    return caught.value


def test_smaller_limits_are_taken_and_the_rest_stays() -> None:
    policy = load("default")
    asked = narrow(policy, {"limits": {"memory_max": "256MiB", "wall_time": 5}})
    assert (asked.limits.memory_max, asked.limits.wall_time) == (256 << 20, 5)
    assert asked.limits.tasks_max == policy.limits.tasks_max
    assert asked.name == "default"


def test_larger_limit_names_key_asked_and_allowed() -> None:
    error = refused(load("default"), {"limits": {"memory_max": "2GiB"}})
    assert 'limits.memory_max: "2GiB" goes beyond policy default' in error.message
    assert error.details["key"] == "limits.memory_max"
    assert (error.details["asked"], error.details["allowed"]) == ("2GiB", "1GiB")


@pytest.mark.parametrize(
    "request_",
    [
        {"processes": True},
        {"filter": "default"},
        {"capabilities": ["shell"]},
        {"walls": {"memory": "best-effort"}},
        {"imports": {"allow": "any"}},
        {"imports": {"allow": ["os", "subprocess"]}},
        {"imports": {"allow": ["osx"]}},
        {"uploads": {"max_file_count": 1000}},
        {"pool": {"min_idle": 2}},
        {"pool": {"max_idle": 5}},
        {"network": {"mode": "proxy"}},
        {"network": {"allow": ["pypi.org"]}},
        {"filesystem": {"read": ["/srv"]}},
        {"filesystem": {"mount": [{"source": "/srv/x", "target": "/opt/x"}]}},
        {"preload": ["numpy"]},
        {"shared": True},
    ],
    ids=str,
)
def test_strict_is_widened_by_nothing(request_: dict[str, Any]) -> None:
    refused(load("strict"), request_)


def test_without_processes_filter_and_shell_follow() -> None:
    for request in ({"processes": False}, {"filter": "strict"}):
        asked = narrow(load("default"), request)
        assert (asked.processes, asked.filter) == (False, "strict")
        assert asked.capabilities == ("python", "filesystem")


def test_fewer_kernels_and_a_cold_start_may_be_asked_for() -> None:
    pool = narrow(load("default"), {"pool": {"start": "cold", "max_idle": 0}}).pool
    assert (pool.start, pool.min_idle, pool.max_idle) == ("cold", 0, 0)


def test_more_kernels_than_a_policy_keeps_are_refused_as_too_many() -> None:
    error = refused(load("default"), {"pool": {"min_idle": 5}})
    assert "pool.min_idle: 5 goes beyond policy default, which allows 1" in error.message
    refused(narrow(load("default"), {"pool": {"start": "cold"}}), {"pool": {"start": "fork"}})


def test_forbidden_modules_are_only_ever_added() -> None:
    asked = narrow(load("strict"), {"imports": {"allow": ["os.path", "json"], "forbid": ["json"]}})
    assert asked.imports.allow == ("json", "os.path")
    assert {"json", "socket"} <= set(asked.imports.forbid)


def test_variables_are_added_and_those_of_the_policy_stay() -> None:
    policy = load("data-science")
    asked = narrow(policy, {"env": {"MODE": "test"}})
    assert asked.env == {**policy.env, "MODE": "test"}
    assert refused(policy, {"env": {"OMP_NUM_THREADS": "64"}}).details["key"] == (
        "env.OMP_NUM_THREADS"
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"user": "root"}, "user is the policy's own"),
        ({"interpreter": "/tmp/python"}, "interpreter is the policy's own"),
        ({"limits": {"memory": 1}}, "did you mean limits.memory_max?"),
        ({"limits": {"memory_max": "1MB"}}, 'did you mean "1MiB"?'),
        ({"env": {"LD_PRELOAD": "/workspace/x.so"}}, "LD_PRELOAD is set by sbx itself"),
        ({"limits": None}, "must be a table"),
        ({"imports": {"forbid": None}}, "imports.forbid: must be a list"),
        ({"network": 1}, "network: must be a table"),
        ({"extends": "host"}, "unknown key extends"),
        ({1: 2}, "should be strings"),
    ],
)
def test_request_that_is_none_is_answered_like_a_file(
    request_: dict[str, Any], message: str
) -> None:
    assert message in refused(load("default"), request_, "validation_error").message


def test_empty_request_and_equal_values_change_nothing() -> None:
    policy = load("default")
    assert narrow(policy, {}) is policy
    assert narrow(policy, {"limits": {"memory_max": "1GiB"}}) is policy


def test_narrowed_policy_promises_no_examples() -> None:
    assert narrow(load("default"), {"processes": False}).expect == ()


def test_every_key_has_an_order_or_cannot_be_asked() -> None:
    """A key that is added to the model must not slip past narrowing."""
    for key in all_keys(Policy):
        table = key.removesuffix(".source").removesuffix(".target")
        assert table in _ORDER or key == "env" or key.partition(".")[0] not in ASKABLE, key
