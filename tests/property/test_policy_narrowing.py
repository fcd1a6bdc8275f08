"""No request, however odd, gets more than the policy has."""

import contextlib
import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from sbx.errors import BadRequest
from sbx.policy import Policy, describe, narrow
from sbx.policy.narrow import ASKABLE

MIB = 1 << 20
MODULES = st.sampled_from(["os", "os.path", "json", "numpy", "numpy.linalg", "socket", "csv"])
PATHS = st.sampled_from(["/usr", "/bin", "/lib", "/srv", "/etc/ssl"])
MOUNTS = [{"source": f"/srv/{name}", "target": f"/opt/{name}"} for name in ("a", "b", "c")]
HOSTS = ["a.org", "x.a.org", "*.a.org", "*.x.a.org", "a.org:8443", "b.org"]
RULES = [
    {"host": host, "methods": methods, "paths": paths}
    for host in ("a.org", "x.a.org", "*.a.org")
    for methods in ("any", ["GET"], ["GET", "POST"])
    for paths in ("any", ["/v1/*"], ["/v1/x"])
]
SECRETS = [
    {"env": env, "hosts": hosts, "from": "env:REAL", "allow_plain": plain}
    for env in ("A1", "A2")
    for hosts in (["x.a.org"], ["*.a.org"])
    for plain in (False, True)
]
ASKED = [(host, port) for host in ("a.org", "x.a.org", "y.x.a.org", "b.org") for port in (80, 8443)]
WALLS = ("namespaces", "seccomp", "landlock", "memory", "tasks", "cpu", "io")


def some(strategy: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=most, unique_by=str)


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


_UNIX_SOCKETS = ["none", "own", "any"]
_FILTERS = ["strict", "allowlist", "default"]  # each allows less than the next

REQUESTS = table(
    capabilities=st.lists(st.sampled_from(["python", "shell", "filesystem"]), min_size=1),
    processes=st.booleans(),
    filter=st.sampled_from(["default", "allowlist", "strict"]),
    shared=st.booleans(),
    unix_sockets=st.sampled_from(["any", "own", "none"]),
    workspace=st.sampled_from(["own", "cwd"]),
    preload=some(MODULES),
    env=st.dictionaries(st.sampled_from("ABC"), st.sampled_from("xy")),
    filesystem=table(read=some(PATHS), mount=some(st.sampled_from(MOUNTS))),
    network=table(
        mode=st.sampled_from(["none", "proxy"]),
        allow=some(st.sampled_from(HOSTS)),
        rule=some(st.sampled_from(RULES)),
        allow_private=some(st.sampled_from(["10.0.0.1", "10.0.0.0/8", "a.org"])),
        connections_max=st.integers(1, 3),
        bytes_max=st.integers(1, 3),
        time_max=st.integers(1, 3),
    ),
    secrets=st.dictionaries(st.sampled_from(["ONE", "TWO"]), st.sampled_from(SECRETS), max_size=2),
    limits=table(
        memory_max=st.integers(32, 34).map(lambda n: n * MIB),
        tasks_max=st.integers(8, 10),
        cpu_quota=st.sampled_from([0.5, 1.0, "150%"]),
        wall_time=st.sampled_from(["1s", 2, 3.5]),
        output_max=st.integers(1, 3),
        workspace_files=st.integers(1, 3),
    ),
    uploads=table(
        max_file_count=st.integers(1, 3),
        allowed_types=st.just("any") | some(st.sampled_from(["csv", "txt", "png"])),
    ),
    walls=table(**{wall: st.sampled_from(["hard", "best-effort"]) for wall in WALLS}),
    imports=table(allow=st.just("any") | some(MODULES), forbid=some(MODULES)),
    pool=table(
        start=st.sampled_from(["fork", "cold"]),
        min_idle=st.integers(0, 3),
        max_idle=st.integers(0, 3),
    ),
)


def _policy(request: dict[str, Any]) -> Policy | None:
    with contextlib.suppress(ValueError):
        return Policy.model_validate({**request, "name": "lab"})
    return None


POLICIES = REQUESTS.map(_policy).filter(lambda policy: policy is not None)


def attempt(policy: Policy, request: Mapping[str, Any]) -> Policy | None:
    try:
        return narrow(policy, request)
    except BadRequest:
        return None


def importable(policy: Policy, module: str) -> bool:
    """Written apart from the code under test: by the parents of the module, one after another."""
    parts = module.split(".")
    names = {".".join(parts[: end + 1]) for end in range(len(parts))}
    allowed = policy.imports.allow == "any" or bool(names & set(policy.imports.allow))
    return allowed and not names & set(policy.imports.forbid)


def matches(pattern: str, host: str) -> bool:
    """Written apart from the code under test, for plain hosts only."""
    return fnmatch.fnmatchcase(host, pattern)


def reaches(policy: Policy, host: str, port: int) -> bool:
    entries = (entry.partition(":") for entry in policy.network.allow)
    return any(
        matches(pattern, host) and (port == int(said) if said else port in (80, 443))
        for pattern, _, said in entries
    )


def may_ask(policy: Policy, host: str, method: str, path: str) -> bool:
    rules = [rule for rule in policy.network.rule if matches(rule.host, host)]
    return reaches(policy, host, 80) and (
        not rules
        or any(
            (rule.methods == "any" or method in rule.methods)
            and (rule.paths == "any" or any(matches(known, path) for known in rule.paths))
            for rule in rules
        )
    )


def has_secret(policy: Policy, name: str, host: str, plain: bool) -> bool:
    secret = policy.secrets.get(name)
    return (
        secret is not None
        and any(matches(known, host) for known in secret.hosts)
        and (secret.allow_plain or not plain)
    )


def subnet(part: str, whole: str) -> bool:
    return part == whole or (part.startswith("10.") and whole == "10.0.0.0/8")


def is_at_most(one: Policy, other: Policy) -> bool:
    """Whether `one` allows nothing that `other` does not, said in another way than in narrow.py."""
    a, b = describe(one), describe(other)
    numbers = [(one.limits, other.limits), (one.uploads, other.uploads), (one.pool, other.pool)]
    hard = {wall for wall in WALLS if b["walls"][wall] == "hard"}
    return all(
        [
            (one.name, one.user, one.interpreter) == (other.name, other.user, other.interpreter),
            all(x in b["capabilities"] for x in a["capabilities"]),
            all(x in b["preload"] for x in a["preload"]),
            all(x in b["filesystem"]["read"] for x in a["filesystem"]["read"]),
            all(x in b["filesystem"]["mount"] for x in a["filesystem"]["mount"]),
            all(reaches(other, *asked) for asked in ASKED if reaches(one, *asked)),
            all(
                may_ask(other, *asked)
                for asked in itertools.product(
                    ("a.org", "x.a.org", "y.x.a.org"), ("GET", "POST"), ("/v1/x", "/v1/y", "/v2")
                )
                if may_ask(one, *asked)
            ),
            all(
                any(subnet(x, y) for y in b["network"]["allow_private"])
                for x in a["network"]["allow_private"]
            ),
            one.network.connections_max <= other.network.connections_max,
            one.network.bytes_max <= other.network.bytes_max,
            one.network.time_max <= other.network.time_max,
            all(
                has_secret(other, name, host, plain)
                for name in one.secrets
                for host in ("x.a.org", "y.x.a.org", "b.org")
                for plain in (False, True)
                if has_secret(one, name, host, plain)
            ),
            a["network"]["mode"] == "none" or b["network"]["mode"] == "proxy",
            not a["processes"] or b["processes"],
            not a["shared"] or b["shared"],
            _UNIX_SOCKETS.index(a["unix_sockets"]) <= _UNIX_SOCKETS.index(b["unix_sockets"]),
            a["workspace"] == "own" or b["workspace"] == "cwd",
            a["pool"]["start"] == "cold" or b["pool"]["start"] == "fork",
            _FILTERS.index(a["filter"]) <= _FILTERS.index(b["filter"]),
            all(a["walls"][wall] == "hard" for wall in hard),
            b["env"].items() <= a["env"].items(),
            all(
                value <= getattr(high, key)
                for low, high in numbers
                for key, value in low
                if isinstance(value, int | float)
            ),
            other.uploads.allowed_types == "any"
            or (
                one.uploads.allowed_types != "any"
                and all(x in other.uploads.allowed_types for x in one.uploads.allowed_types)
            ),
            all(
                importable(other, module)
                for module in ("os", "os.path", "json", "numpy.linalg", "socket.x", "csv", "re")
                if importable(one, module)
            ),
        ]
    )


@given(POLICIES, REQUESTS)
def test_narrowed_policy_is_never_wider_in_any_field(
    policy: Policy, request: dict[str, Any]
) -> None:
    result = attempt(policy, request)
    assert result is None or is_at_most(result, policy)


WIDEST = Policy.model_validate(
    {
        "name": "lab",
        "shared": True,
        "unix_sockets": "any",
        "workspace": "cwd",
        "preload": ["os", "os.path", "json", "numpy", "numpy.linalg", "socket", "csv"],
        "filesystem": {"read": ["/usr", "/bin", "/lib", "/srv", "/etc/ssl"], "mount": MOUNTS},
        "network": {
            "mode": "proxy",
            "allow": ["a.org", "*.a.org", "a.org:8443", "b.org"],
            "allow_private": ["10.0.0.0/8", "a.org"],
        },
        "limits": {"cpu_quota": "150%"},
        "walls": dict.fromkeys(WALLS, "best-effort"),
        "pool": {"min_idle": 3},
    }
)


@given(REQUESTS)
@example({"filter": "strict", "network": {}})
@example({"processes": False, "filter": "strict", "network": {"connections_max": 1}})
def test_every_request_that_does_not_contradict_itself_narrows_the_widest(
    request: dict[str, Any],
) -> None:
    """Refusing everything would be safe, and useless. Once, a request for the strict filter with a
    network table that names no mode was refused: the policy's proxy contradicts that filter."""
    request = {key: value for key, value in request.items() if key != "secrets"}  # it has none
    assert _policy(request) is None or narrow(WIDEST, request)


@given(POLICIES)
def test_asking_for_exactly_what_there_is_changes_nothing(policy: Policy) -> None:
    asked = {key: value for key, value in describe(policy).items() if key in ASKABLE}
    assert narrow(policy, asked) == policy


@given(POLICIES, REQUESTS)
def test_narrowing_twice_is_narrowing_once(policy: Policy, request: dict[str, Any]) -> None:
    once = attempt(policy, request)
    assert once is None or narrow(once, request) == once


@given(POLICIES, REQUESTS, REQUESTS)
def test_order_of_two_requests_does_not_matter_where_both_orders_are_granted(
    policy: Policy, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = attempt(policy, one), attempt(policy, other)
    there = first and attempt(first, other)
    back = second and attempt(second, one)
    assert there is None or back is None or there == back


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted(Policy.model_fields)) | st.text(max_size=8)


@given(POLICIES, st.dictionaries(KEYS, JUNK, max_size=4))
def test_no_request_is_answered_by_another_error(policy: Policy, request: dict[str, Any]) -> None:
    result = attempt(policy, request)
    assert result is None or is_at_most(result, policy)
