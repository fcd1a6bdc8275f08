"""A request may tighten a policy, never widen it.

A request is a mapping in the shape of a policy file: {"limits": {"memory_max": "256MiB"}}. Keys
that it does not contain keep the value of the policy. Each key may change as follows:

    limits, uploads, pool              a smaller number; a subset of allowed_types; pool.start cold
    capabilities, preload, filesystem  a subset of the list
    network                            mode none; subsets of allow and allow_private; smaller
                                       limits; rules that allow less
    secrets                            fewer secrets, each for a subset of its hosts
    grant                              fewer entries, for less access and shorter durations
    imports                            a subset of allow; more entries in forbid
    walls                              hard instead of best-effort
    processes, shared                  false
    filter                             allowlist, or strict
    workspace                          own
    host_executables                   ask, protect
    unix_sockets                       own, or none
    env                                additional variables; those of the policy stay unchanged

Some changes imply others. Without processes, the filter becomes strict, and the shell and the proxy
are removed. Without the proxy, all hosts and secrets are removed. A smaller maximum of idle kernels
also lowers their minimum. A secret in the request keeps the fields that the request does not set:
{"secrets": {"CRM": {}}} leaves only this secret. A narrowed policy keeps its name and loses its
examples, because they may no longer be true.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, le
from typing import Any

from pydantic import ValidationError

from sbx.errors import BadRequest
from sbx.policy import checks, destinations
from sbx.policy.model import Policy
from sbx.policy.problems import explain, shown
from sbx.policy.tables import (
    GrantPolicy,
    LimitsPolicy,
    NetworkRule,
    SecretPolicy,
    UploadsPolicy,
    WallsPolicy,
)
from sbx.protocol.grants import GRANT_DURATIONS


def narrow(policy: Policy, request: Mapping[str, Any]) -> Policy:
    """Return the policy, tightened by the request.

    Raise BadRequest: `limit_widened`, with the key, the requested and the allowed value;
    `validation_error` for an unknown key, a wrong unit, or a key that no request may set.
    """
    if not request:
        return policy
    narrowed = _validate(policy, _overlay(policy, _checked(policy, request)))
    if wider := list(_wider(policy, narrowed)):
        raise _widened(policy, wider)
    narrowed = narrowed.model_copy(
        update={
            "preload": _in_order_of(policy.preload, narrowed.preload),
            "filesystem": narrowed.filesystem.model_copy(
                update={"mount": _in_order_of(policy.filesystem.mount, narrowed.filesystem.mount)}
            ),
        }
    )
    return policy if narrowed == policy else narrowed.model_copy(update={"expect": ()})


# --- the order of each key: order(requested, allowed): whether requested is not wider ------------


def _part(requested: Any, allowed: Any) -> bool:
    return set(requested) <= set(allowed)


def _part_or_any(requested: Any, allowed: Any) -> bool:
    return allowed == "any" or (requested != "any" and _part(requested, allowed))


def _covered(requested: Any, allowed: Any) -> bool:
    """Return whether all modules are allowed. A module includes its submodules: os.path is part of
    os."""
    if "any" in (requested, allowed):
        return bool(allowed == "any")
    return all(any(f"{name}.".startswith(f"{entry}.") for entry in allowed) for name in requested)


def _forbids_as_much(requested: Any, allowed: Any) -> bool:
    return _covered(allowed, requested)


_CAPS = ("connections_max", "bytes_max", "time_max")


def _one_of(*weakest_last: str) -> Callable[[Any, Any], bool]:
    rank = {word: index for index, word in enumerate(weakest_last)}
    return lambda requested, allowed: rank[requested] <= rank[allowed]


def _hosts(requested: Any, allowed: Any) -> bool:
    patterns = [destinations.parse(entry) for entry in allowed]
    return all(
        any(destination.covers(destinations.parse(entry)) for destination in patterns)
        for entry in requested
    )


def _private(requested: Any, allowed: Any) -> bool:
    return all(any(_private_covers(pattern, entry) for pattern in allowed) for entry in requested)


def _private_covers(pattern: str, entry: str) -> bool:
    try:
        network, part = ipaddress.ip_network(pattern), ipaddress.ip_network(entry)
    except ValueError:
        return destinations.host_covers(pattern, entry)
    return part.version == network.version and part.subnet_of(network)  # type: ignore[arg-type]


def _rules(requested: Sequence[NetworkRule], allowed: Sequence[NetworkRule]) -> bool:
    """Return whether the requested rules allow nothing that the policy refuses.

    Several rules for a host add up, and a host without a rule is unrestricted. Therefore each
    requested rule must be within an existing rule, or apply only to hosts without a rule. Each host
    with a rule must keep one.
    """
    return all(
        any(_rule_covers(existing, rule) for existing in allowed)
        or not any(destinations.overlap(existing.host, rule.host) for existing in allowed)
        for rule in requested
    ) and all(
        any(destinations.host_covers(rule.host, existing.host) for rule in requested)
        for existing in allowed
    )


def _rule_covers(existing: NetworkRule, rule: NetworkRule) -> bool:
    return (
        destinations.host_covers(existing.host, rule.host)
        and _part_or_any(rule.methods, existing.methods)
        and (
            existing.paths == "any"
            or (
                rule.paths != "any"
                and all(
                    any(_path_covers(path, requested_path) for path in existing.paths)
                    for requested_path in rule.paths
                )
            )
        )
    )


def _path_covers(pattern: str, path: str) -> bool:
    return pattern == path or (pattern.endswith("*") and path.startswith(pattern[:-1]))


def _secrets(requested: Mapping[str, SecretPolicy], allowed: Mapping[str, SecretPolicy]) -> bool:
    return all(
        name in allowed and _secret_covers(allowed[name], secret)
        for name, secret in requested.items()
    )


def _secret_covers(existing: SecretPolicy, secret: SecretPolicy) -> bool:
    return (
        (secret.env, secret.header, secret.source)
        == (existing.env, existing.header, existing.source)
        and secret.allow_plain <= existing.allow_plain
        and all(
            any(destinations.host_covers(h, host) for h in existing.hosts) for host in secret.hosts
        )
    )


_shorter = _one_of(*GRANT_DURATIONS)


def _grants(requested: Sequence[GrantPolicy], allowed: Sequence[GrantPolicy]) -> bool:
    return all(any(_grant_covers(existing, grant) for existing in allowed) for grant in requested)


def _grant_covers(existing: GrantPolicy, grant: GrantPolicy) -> bool:
    return (
        _shorter(grant.longest, existing.longest)
        and _hosts(grant.network, existing.network)
        and _part(grant.secret, existing.secret)
        and all(checks.is_within(each, existing.directory) for each in grant.directory)
        and (grant.run_time or 0) <= (existing.run_time or 0)
        and (grant.memory or 0) <= (existing.memory or 0)
        and _part(grant.package, existing.package)
    )


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "network.mode": _one_of("none", "proxy"),
    "capabilities": _part,
    "processes": le,
    "shared": le,
    "unix_sockets": _one_of("none", "own", "any"),
    "workspace": _one_of("own", "cwd"),
    "host_executables": _one_of("protect", "ask", "allow"),
    "filter": _one_of("strict", "allowlist", "default"),
    "preload": _part,
    "filesystem.read": _part,
    "filesystem.mount": _part,
    "network.allow": _hosts,
    "network.rule": _rules,
    "network.allow_private": _private,
    **{f"network.{name}": le for name in _CAPS},
    "secrets": _secrets,
    "grant": _grants,
    "imports.allow": _covered,
    "imports.forbid": _forbids_as_much,
    **{f"limits.{name}": le for name in LimitsPolicy.model_fields},
    **{f"uploads.{name}": le for name in UploadsPolicy.model_fields},
    "uploads.allowed_types": _part_or_any,
    "pool.start": _one_of("cold", "fork"),
    "pool.min_idle": le,
    "pool.max_idle": le,
    **{f"walls.{name}": _one_of("hard", "best-effort") for name in WallsPolicy.model_fields},
}
ASKABLE = {key.partition(".")[0] for key in _ORDER} | {"env"}


def _wider(policy: Policy, narrowed: Policy) -> Iterator[tuple[str, Any, Any]]:
    for key, order in _ORDER.items():
        if key == "network.rule" and not narrowed.network.allow:
            continue  # no host can be reached, so the rules have no effect
        value, allowed = attrgetter(key)(narrowed), attrgetter(key)(policy)
        if not order(value, allowed):
            yield key, _as_written(narrowed, key), _as_written(policy, key)
    for name, allowed in policy.env.items():
        if narrowed.env[name] != allowed:
            yield f"env.{name}", narrowed.env[name], allowed


def _as_written(policy: Policy, key: str) -> Any:
    """Return a value as a policy file contains it, with its unit."""
    value: Any = policy.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def _widened(policy: Policy, wider: list[tuple[str, Any, Any]]) -> BadRequest:
    key, requested, allowed = wider[0]
    return BadRequest(
        f"{key}: {_text(requested)} goes beyond policy {policy.name}, "
        f"which allows {_text(allowed)}",
        code="limit_widened",
        hint="a request may only tighten a policy; choose or write a wider policy",
        details={
            "policy": policy.name,
            "key": key,
            "asked": requested,
            "allowed": allowed,
            "widened": [key for key, _, _ in wider],
        },
    )


def _text(value: Any) -> str:
    if not isinstance(value, list):
        return shown(value)
    text = ", ".join(map(str, value))
    return f"[{text}]" if len(text) <= 60 else f"[{text[:57]}...]"


# --- laying a request over a policy -------------------------------------------------------------


def _checked(policy: Policy, request: Mapping[str, Any]) -> dict[str, Any]:
    for key in request:
        if key in Policy.model_fields and key not in ASKABLE:
            raise BadRequest(
                f"{key} belongs to the policy: a request cannot set it",
                hint=f"a request may set {', '.join(sorted(ASKABLE))}",
                details={"key": key, "policy": policy.name},
            )
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in request.items()}


def _overlay(policy: Policy, request: dict[str, Any]) -> dict[str, Any]:
    table = policy.model_dump(mode="json")
    for key, value in request.items():
        merged = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = {**table[key], **value} if merged else value
    if isinstance(secrets := request.get("secrets"), dict):
        existing = policy.model_dump(mode="json")["secrets"]
        table["secrets"] = {
            name: {**existing.get(name, {}), **secret} if isinstance(secret, dict) else secret
            for name, secret in secrets.items()
        }
    imports = table["imports"]
    if isinstance(imports, dict) and isinstance(imports["forbid"], list | tuple):
        imports["forbid"] = [*policy.imports.forbid, *imports["forbid"]]
    _take_along(policy, table, request)
    if "grant" not in request:
        table["grant"] = list(_grants_left(policy.grant, table))
    return table


def _grants_left(grants: Sequence[GrantPolicy], table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the grants that still have an effect: those of the proxy need it, and of secrets those
    that are left."""
    network, secrets = table["network"], table["secrets"]
    proxied = isinstance(network, dict) and network.get("mode") == "proxy"
    for grant in grants:
        names = [name for name in grant.secret if isinstance(secrets, dict) and name in secrets]
        local = grant.run_time or grant.memory or grant.directory or grant.package
        if local or (grant.network and proxied) or names:
            yield {**grant.model_dump(mode="json"), "secret": names}


def _take_along(policy: Policy, table: dict[str, Any], request: dict[str, Any]) -> None:
    """Set the keys that a request implies without naming them, whether it tightens or widens.

    A caller that requests too much then gets an error about that request, and not about a
    contradiction that the caller never wrote.
    """
    processes = _requested_processes(request)
    if processes is not None:
        implied: dict[str, Any] = {
            "processes": processes,
            "filter": _filter_with(policy) if processes else "strict",
        }
        if not processes:
            implied["capabilities"] = [c for c in policy.capabilities if c != "shell"]
        table.update({key: value for key, value in implied.items() if key not in request})
    match request.get("network"):
        case {"mode": "none", **others}:
            _take_proxy_away(table, others, request)
        case {"allow": [_, *_], **others} if "mode" not in others:
            table["network"]["mode"] = "proxy"
        case None if processes is False and "network" not in request:
            table["network"]["mode"] = "none"
            _take_proxy_away(table, {}, request)
        case {**others} if processes is False and "mode" not in others:
            table["network"]["mode"] = "none"
            _take_proxy_away(table, others, request)
    proxied = isinstance(table["network"], dict) and table["network"].get("mode") == "proxy"
    if proxied and policy.filter == "strict" and not {"filter", "processes"} & request.keys():
        table.update(filter="default", processes=True)  # the strict filter forbids connections
    match request.get("pool"):
        case {"max_idle": int(maximum), **others} if "min_idle" not in others and maximum >= 0:
            table["pool"]["min_idle"] = int(min(policy.pool.min_idle, maximum))
        case {"min_idle": int(minimum), **others} if "max_idle" not in others:
            table["pool"]["max_idle"] = max(policy.pool.max_idle, minimum)


def _take_proxy_away(
    table: dict[str, Any], network: Mapping[Any, Any], request: Mapping[str, Any]
) -> None:
    for name in ("allow", "rule", "allow_private"):
        if name not in network:
            table["network"][name] = []
    if "secrets" not in request:
        table["secrets"] = {}


def _filter_with(policy: Policy) -> str:
    return "default" if policy.filter == "strict" else policy.filter


def _requested_processes(request: dict[str, Any]) -> bool | None:
    match request:
        case {"processes": bool(processes)}:
            return processes
        case {"filter": "strict" | "allowlist" | "default" as word}:
            return bool(word != "strict")
        case {"capabilities": [*words]} if "shell" in words:
            return True
    return None


def _validate(policy: Policy, table: dict[str, Any]) -> Policy:
    try:
        return Policy.model_validate(table)
    except ValidationError as error:
        problems = [problem for _, problem in explain(error, Policy, sorted(ASKABLE))]
        raise BadRequest(
            str(problems[0]),
            hint=problems[0].hint
            or f"`sbx policy show {policy.name}` shows the form of each value",
            details={"policy": policy.name, "problems": [p.to_dict() for p in problems]},
        ) from None


def _in_order_of(order: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in order if value in values)
