"""The model: what a policy may say, what it may not, and that nothing of it can change."""

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from sbx.policy import Policy, describe, fingerprint, unsupported


def policy(**table: Any) -> Policy:
    return Policy.model_validate({"name": "lab", **table})


def test_policy_is_hashable_by_value_and_cannot_be_changed() -> None:
    one, same = policy(env={"A": "1", "B": "2"}), policy(env={"B": "2", "A": "1"})
    assert one == same
    assert len({one, same, copy.deepcopy(one)}) == 1
    with pytest.raises(TypeError):
        one.env["A"] = "3"  # type: ignore[index]
    with pytest.raises(ValidationError):
        one.limits.tasks_max = 9


def test_fingerprint_names_what_is_enforced_and_not_the_words_about_it() -> None:
    example = {"run": "1", "then": "allowed", "why": "arithmetic"}
    assert fingerprint(policy()) == fingerprint(policy(description="x", expect=[example]))
    assert fingerprint(policy()) != fingerprint(policy(limits={"tasks_max": 9}))


def test_description_has_units_and_validates_to_the_same_policy() -> None:
    described = describe(policy(limits={"memory_max": 1 << 30, "cpu_quota": 1.5}))
    assert described["limits"]["memory_max"] == "1GiB"
    assert described["limits"]["cpu_quota"] == "150%"
    assert described.pop("schema") == 1
    assert Policy.model_validate(described) == policy(limits={"cpu_quota": "150%"})


def test_lists_that_are_sets_come_out_canonical() -> None:
    one = policy(
        capabilities=["filesystem", "python", "python"],
        imports={"allow": ["os.path", "numpy", "os"]},
        uploads={"allowed_types": ["xlsx", "csv"]},
    )
    assert one.capabilities == ("python", "filesystem")
    assert one.imports.allow == ("numpy", "os")
    assert one.uploads.allowed_types == ("csv", "xlsx")


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "HOME",
        "IPYTHONDIR",
        "OPENSSL_CONF",
        "A-B",
        "",
    ],
)
def test_variable_that_the_guest_owns_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"sbx itself|not the name"):
        policy(env={name: "x"})


@pytest.mark.parametrize("value", ["a\0b", "x" * 70_000])
def test_value_that_no_environment_carries_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match=r"NUL|more than 64KiB"):
        policy(env={"A": value})


def test_path_and_package_settings_may_be_set() -> None:
    env = {"PATH": "/opt/lab/bin:/usr/bin", "PIP_NO_INDEX": "1"}
    assert policy(env=env).env == env


@pytest.mark.parametrize(
    "path",
    ["/", "/proc", "/run/docker.sock", "/dev", "/etc", "/etc/shadow", "/tmp/x", "/opt", "/var",
     "usr", "/usr/", "/usr/../root", "//usr", "/usr\n"],
)  # fmt: skip
def test_system_path_that_would_open_a_hole_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        policy(filesystem={"read": [path]})


@pytest.mark.parametrize(
    "target",
    ["/workspace/lib", "/workspace", "/proc/x", "/dev", "/tmp/a", "/etc/x", "/usr/local/x", "/",
     "/opt", "/opt/sbx/sbx", "/home/sandbox", "wheels", "/opt/../etc"],
)  # fmt: skip
def test_mount_cannot_cover_what_sbx_makes(target: str) -> None:
    with pytest.raises(ValidationError):
        policy(filesystem={"mount": [{"source": "/srv/wheels", "target": target}]})


@pytest.mark.parametrize("source", ["/", "/proc/1/root", "/run", "/var/run/docker.sock", "/sys"])
def test_mount_cannot_show_ways_out(source: str) -> None:
    with pytest.raises(ValidationError, match="ways out"):
        policy(filesystem={"mount": [{"source": source, "target": "/opt/x"}]})


def test_mounts_cannot_lie_in_one_another() -> None:
    nested = [{"source": "/a", "target": "/opt/x"}, {"source": "/b", "target": "/opt/x/y"}]
    with pytest.raises(ValidationError, match="overlaps with /opt/x"):
        policy(filesystem={"mount": nested})
    with pytest.raises(ValidationError, match="overlaps with /srv"):
        policy(filesystem={"read": ["/srv"], "mount": [{"source": "/a", "target": "/srv/a"}]})


@pytest.mark.parametrize(
    "table",
    [
        {"processes": False},
        {"filter": "strict"},
        {"processes": False, "filter": "strict"},  # with the shell among the capabilities
        {"network": {"allow": ["pypi.org"]}},
        {"capabilities": []},
    ],
)
def test_contradiction_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        policy(**table)


@pytest.mark.parametrize(
    "table",
    [
        {"limits": {"memory_max": "1MiB"}},
        {"limits": {"tmp_size": 0}},
        {"limits": {"shm_size": 0}},
        {"limits": {"wall_time": 0}},
        {"limits": {"tasks_max": 0}},
        {"limits": {"tasks_max": True}},
        {"limits": {"open_files": "64"}},
        {"processes": "yes"},
        {"user": "root"},
        {"user": "Sandbox"},
        {"preload": ["numpy; import os"]},
        {"interpreter": "python3"},
        {"network": {"mode": "proxy", "allow": ["http://pypi.org"]}},
        {"network": {"mode": "proxy", "allow": ["10.0.0.1"]}},
        {"uploads": {"allowed_types": [".csv"]}},
        {"uploads": {"allowed_types": "csv"}},
        {"walls": {"memory": "soft"}},
        {"imports": {"allow": ["*"]}},
    ],
)
def test_value_out_of_range_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**table)
    assert caught.value.error_count() == 1


def test_proxy_is_said_to_be_unenforceable() -> None:
    error = unsupported(policy(network={"mode": "proxy", "allow": ["*.pypi.org"]}))
    assert error is not None
    assert error.code == "cannot_enforce"
    assert unsupported(policy()) is None


@pytest.mark.parametrize(
    "pool",
    [
        {"min_idle": 5},  # more than the default max_idle
        {"min_idle": -1},
        {"max_idle": 257},
        {"min_idle": True},
        {"start": "warm"},
    ],
)
def test_pool_that_cannot_be_kept_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        policy(pool=pool)


def test_pool_may_be_empty() -> None:
    pool = policy(pool={"min_idle": 0, "max_idle": 0}).pool
    assert (pool.start, pool.min_idle, pool.max_idle) == ("fork", 0, 0)
