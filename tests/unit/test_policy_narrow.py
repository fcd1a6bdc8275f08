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
        {"workspace": "cwd"},
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


def test_the_allowlist_may_be_asked_for_and_not_given_up() -> None:
    asked = narrow(load("default"), {"filter": "allowlist"})
    assert (asked.processes, asked.filter) == (True, "allowlist")
    assert "shell" in asked.capabilities
    assert narrow(asked, {"processes": True}).filter == "allowlist"
    assert narrow(asked, {"processes": False}).filter == "strict"
    refused(asked, {"filter": "default"})
    refused(load("strict"), {"filter": "allowlist"})


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
        ({"user": "root"}, "user belongs to the policy"),
        ({"interpreter": "/tmp/python"}, "interpreter belongs to the policy"),
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


WIDE = Policy.model_validate(
    {
        "name": "net",
        "network": {
            "mode": "proxy",
            "allow": ["*.example.org", "example.com", "example.net:8443"],
            "rule": [
                {"host": "api.example.org", "methods": ["GET", "HEAD"], "paths": ["/v1/*"]},
                {"host": "api.example.org", "methods": ["POST"], "paths": ["/v1/items"]},
            ],
            "allow_private": ["10.0.0.0/8", "*.intranet.example"],
        },
        "secrets": {
            name: {"env": name, "hosts": ["*.example.org"], "from": f"env:{name}"}
            for name in ("ONE", "TWO")
        },
    }
)
FIRST, SECOND = WIDE.model_dump(mode="json")["network"]["rule"]


@pytest.mark.parametrize(
    "network",
    [
        {"allow": ["api.example.org", "*.files.example.org:443", "example.com:80"]},
        {"allow": []},
        {"rule": [FIRST]},
        {"rule": [{**FIRST, "methods": ["GET"], "paths": ["/v1/items/*", "/v1/x"]}]},
        {"rule": [FIRST, SECOND, {"host": "example.com", "methods": ["GET"]}]},
        {"allow_private": ["10.1.0.0/16", "10.0.0.5", "a.intranet.example"]},
        {"connections_max": 1, "bytes_max": "1MiB", "time_max": "1s"},
    ],
    ids=str,
)
def test_less_of_the_network_may_be_asked_for(network: dict[str, Any]) -> None:
    asked = narrow(WIDE, {"network": network})
    assert asked != WIDE
    assert asked.network.mode == "proxy"
    assert narrow(asked, {"network": network}) == asked


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("allow", ["example.org"]),  # a wildcard is not the domain itself
        ("allow", ["*.example.com"]),
        ("allow", ["api.example.org:8443"]),
        ("allow", ["example.net"]),
        ("allow", ["api.example.org.evil.example"]),
        ("allow", ["notexample.com"]),
        ("rule", []),
        ("rule", [{"host": "api.example.org", "methods": ["GET", "POST"], "paths": ["/v1/*"]}]),
        ("rule", [{"host": "api.example.org", "methods": ["GET"], "paths": ["/v1*"]}]),
        ("rule", [{"host": "api.example.org", "methods": ["GET"]}]),
        ("rule", [FIRST, {"host": "*.example.org"}]),
        ("rule", [{"host": "example.com"}]),
        ("allow_private", ["10.0.0.0/7"]),
        ("allow_private", ["intranet.example"]),
        ("allow_private", ["192.168.0.1"]),
        ("connections_max", 33),
        ("bytes_max", "2GiB"),
        ("time_max", "1h"),
    ],
    ids=str,
)
def test_more_of_the_network_is_refused_by_name(key: str, asked: Any) -> None:
    assert refused(WIDE, {"network": {key: asked}}).details["key"] == f"network.{key}"


def test_without_the_proxy_hosts_and_secrets_go() -> None:
    for request in ({"network": {"mode": "none"}}, {"processes": False}):
        asked = narrow(WIDE, request)
        assert asked.network == Policy(name="x").network
        assert asked.secrets == {}


def test_fewer_secrets_for_fewer_hosts_may_be_asked_for() -> None:
    asked = narrow(WIDE, {"secrets": {"ONE": {"hosts": ["api.example.org"]}}})
    assert list(asked.secrets) == ["ONE"]
    assert asked.secrets["ONE"].hosts == ("api.example.org",)
    assert narrow(WIDE, {"secrets": {"TWO": {}}}).secrets == {"TWO": WIDE.secrets["TWO"]}
    assert narrow(WIDE, {"secrets": {}}).secrets == {}


@pytest.mark.parametrize(
    "secret",
    [
        {"ONE": {"hosts": ["evil.example"]}},
        {"ONE": {"header": "X-Echo"}},
        {"ONE": {"from": "file:/etc/shadow"}},
        {"ONE": {"env": "OTHER"}},
        {"ONE": {"allow_plain": True}},
        {"NEW": {"env": "NEW", "hosts": ["api.example.org"], "from": "env:AWS"}},
    ],
    ids=str,
)
def test_no_request_gets_at_a_secret_in_another_way(secret: dict[str, Any]) -> None:
    assert refused(WIDE, {"secrets": secret}).details["key"] == "secrets"


def test_narrowed_policy_promises_no_examples() -> None:
    assert narrow(load("default"), {"processes": False}).expect == ()


def test_every_key_has_an_order_or_cannot_be_asked() -> None:
    """A key that is added to the model must not slip past narrowing."""
    for key in all_keys(Policy):
        table = key.removesuffix(".source").removesuffix(".target")
        for listed in ("network.rule", "secrets", "grant"):
            table = listed if key.startswith(f"{listed}.") else table
        assert table in _ORDER or key == "env" or key.partition(".")[0] not in ASKABLE, key
