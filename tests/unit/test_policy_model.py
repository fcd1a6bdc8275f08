"""The model: what a policy may say, what it may not, and that nothing of it can change."""

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from sbx.policy import Policy, describe, fingerprint


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
    with pytest.raises(ValidationError, match="allow an escape"):
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
        {"network": {"mode": "proxy", "connections_max": 0}},
        {"network": {"mode": "proxy", "bytes_max": 0}},
        {"network": {"mode": "proxy", "time_max": 0}},
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


def proxied(**network: Any) -> dict[str, Any]:
    return {"mode": "proxy", **network}


@pytest.mark.parametrize(
    "entry",
    ["example.org", "*.example.org", "example.org:8443", "192.0.2.7", "192.0.2.7:80",
     "[2001:db8::7]", "[2001:db8::7]:443", "xn--bcher-kva.example"],
)  # fmt: skip
def test_host_to_reach_is_kept_as_it_is_written(entry: str) -> None:
    assert policy(network=proxied(allow=[entry])).network.allow == (entry,)


@pytest.mark.parametrize(
    "entry",
    ["http://example.org", "example.org/", "example.org:", "example.org:0", "example.org:65536",
     "example.org:080", "Example.org", "example.org.", "*", "*.org:*", "*.*.org", "a*.org", "org",
     "user@example.org", "192.0.2.7/24", "192.0.2", "0x7f.1", "127.1", "2001:db8::7", "[::0:1]",
     "[fe80::1%eth0]", "[192.0.2.7]", "[::1]x", "[::1", "ex ample.org", "example.org\n", ""],
)  # fmt: skip
def test_host_that_could_be_read_in_two_ways_is_refused(entry: str) -> None:
    with pytest.raises(ValidationError, match="is not a host to reach"):
        policy(network=proxied(allow=[entry]))


@pytest.mark.parametrize("key", ["allow", "allow_private", "rule"])
def test_nothing_is_said_of_hosts_without_the_proxy(key: str) -> None:
    entry = {"host": "a.org"} if key == "rule" else "a.org"
    with pytest.raises(ValidationError, match=f"{key} has an effect only with"):
        policy(network={key: [entry]})


def test_private_hosts_are_names_addresses_and_networks() -> None:
    entries = ["10.0.0.5", "10.1.0.0/16", "fd00::/8", "intranet.example"]
    assert policy(network=proxied(allow_private=entries)).network.allow_private == tuple(
        sorted(entries)
    )
    for entry in ("10.0.0.5/8", "all", "10.0.0.5:80"):
        with pytest.raises(ValidationError):
            policy(network=proxied(allow_private=[entry]))


@pytest.mark.parametrize(
    "rule",
    [
        {"host": "a.org:80"},
        {"host": "a.org", "methods": ["get"]},
        {"host": "a.org", "methods": ["CONNECT"]},
        {"host": "a.org", "paths": ["v1"]},
        {"host": "a.org", "paths": ["/v1/../admin"]},
        {"host": "a.org", "paths": ["/v1//x"]},
        {"host": "a.org", "paths": ["/*/x"]},
        {"host": "a.org", "paths": ["/v1?x=1"]},
        {"host": "a.org", "paths": ["/v%31"]},
        {"methods": ["GET"]},
    ],
    ids=str,
)
def test_rule_that_could_be_read_in_two_ways_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        policy(network=proxied(rule=[rule]))


SECRET = {"env": "CRM_TOKEN", "hosts": ["api.example.org"], "from": "env:CRM"}


def secrets(**keys: Any) -> Policy:
    return policy(network=proxied(), secrets={"CRM": {**SECRET, **keys}})


def test_secret_is_described_as_a_file_says_it_and_names_no_value() -> None:
    assert describe(secrets())["secrets"] == {
        "CRM": {**SECRET, "header": "Authorization", "allow_plain": False}
    }
    assert Policy.model_validate(secrets().model_dump(mode="json")) == secrets()
    assert fingerprint(secrets()) != fingerprint(secrets(hosts=["other.example.org"]))
    with pytest.raises(TypeError):
        secrets().secrets["CRM"] = secrets().secrets["CRM"]  # type: ignore[index]


@pytest.mark.parametrize(
    "keys",
    [
        {"from": "sk-live-1234"},
        {"from": "file:relative"},
        {"from": "file:/etc/../root/x"},
        {"from": "env:A-B"},
        {"header": "Host"},
        {"header": "X Y"},
        {"header": "A\r\nB"},
        {"hosts": []},
        {"hosts": ["a.org:443"]},
        {"env": "LD_PRELOAD"},
        {"allow_plain": "yes"},
    ],
    ids=str,
)
def test_secret_that_would_leak_or_mean_nothing_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        secrets(**keys)


def test_value_that_stands_in_place_of_a_source_is_not_repeated() -> None:
    """It may be the secret itself, and an error is logged."""
    with pytest.raises(ValidationError) as caught:
        secrets(**{"from": "sk-live-1234"})
    assert "sk-live" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "table",
    [
        {"secrets": {"CRM": SECRET}},  # without the proxy
        {"network": proxied(), "secrets": {"CRM": SECRET}, "env": {"CRM_TOKEN": "x"}},
        {"network": proxied(), "secrets": {"CRM": SECRET, "B": SECRET}},
        {
            "network": proxied(),
            "filter": "strict",
            "processes": False,
            "capabilities": ["python"],
        },
    ],
)
def test_proxy_that_cannot_be_used_as_said_is_a_contradiction(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**table)
    assert caught.value.error_count() == 1


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


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("api.*.example.org", "only at the beginning"),
        ("*example.org", "only at the beginning"),
        ("*", "at least two parts"),
        ("*.org", "at least two parts"),
        ("Example.ORG", '"example.org"'),
        ("10.0.0.0/8", "allow_private"),
        ("https://example.org", "without http://"),
    ],
)
def test_a_host_that_cannot_be_named_so_says_how(host: str, hint: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Policy.model_validate({"name": "x", "network": {"mode": "proxy", "allow": [host]}})
    (problem,) = raised.value.errors()
    assert hint in problem["ctx"]["hint"]
