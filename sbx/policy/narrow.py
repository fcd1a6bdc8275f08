"""A request may tighten a policy, never widen it.

A request is a mapping of the shape of a policy file: {"limits": {"memory_max": "256MiB"}}. What it
does not speak of stays as the policy says. What each key may become:

    limits, uploads, pool              a smaller number; of allowed_types a part; pool.start cold
    capabilities, preload, filesystem  a part of the list
    network                            mode none; of allow and allow_private a part; smaller caps;
                                       rules that let through less
    secrets                            fewer, each for a part of its hosts
    imports                            of allow a part; forbid is added to what is forbidden
    walls                              best-effort may become hard
    processes, shared                  false; filter: allowlist, or strict
    workspace                          own
    host_executables                   ask, protect
    unix_sockets                       own, or none
    env                                further variables; those of the policy stay as they are

What follows is taken along: without processes the filter is strict, there is no shell and no proxy,
without the proxy there are no hosts and no secrets, and of fewer kernels at most fewer are kept at
least. A secret that is named keeps what is not said of it: {"secrets": {"CRM": {}}} leaves that one
and no other. A narrowed policy keeps its name and loses its examples, which are no longer promised.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, le
from typing import Any

from pydantic import ValidationError

from sbx.errors import BadRequest
from sbx.policy import destinations
from sbx.policy.model import Limits, Policy, Rule, Secret, Uploads, Walls
from sbx.policy.problems import explain, shown


def narrow(policy: Policy, request: Mapping[str, Any]) -> Policy:
    """The policy with what the request tightens.

    Raises BadRequest: `limit_widened` naming the key, what was asked and what is allowed;
    `validation_error` for an unknown key, a wrong unit, or a key that no request may set.
    """
    if not request:
        return policy
    asked = _validate(policy, _overlay(policy, _checked(policy, request)))
    if wider := list(_wider(policy, asked)):
        raise _widened(policy, wider)
    asked = asked.model_copy(
        update={
            "preload": _in_order_of(policy.preload, asked.preload),
            "filesystem": asked.filesystem.model_copy(
                update={"mount": _in_order_of(policy.filesystem.mount, asked.filesystem.mount)}
            ),
        }
    )
    return policy if asked == policy else asked.model_copy(update={"expect": ()})


# --- the order of each key: order(asked, allowed) says that asked is no wider -------------------


def _part(asked: Any, allowed: Any) -> bool:
    return set(asked) <= set(allowed)


def _part_or_any(asked: Any, allowed: Any) -> bool:
    return allowed == "any" or (asked != "any" and _part(asked, allowed))


def _covered(asked: Any, allowed: Any) -> bool:
    """Modules stand for their submodules: os.path is a part of os."""
    if "any" in (asked, allowed):
        return bool(allowed == "any")
    return all(any(f"{name}.".startswith(f"{known}.") for known in allowed) for name in asked)


def _forbids_as_much(asked: Any, allowed: Any) -> bool:
    return _covered(allowed, asked)


_CAPS = ("connections_max", "bytes_max", "time_max")


def _one_of(*weakest_last: str) -> Callable[[Any, Any], bool]:
    rank = {word: index for index, word in enumerate(weakest_last)}
    return lambda asked, allowed: rank[asked] <= rank[allowed]


def _hosts(asked: Any, allowed: Any) -> bool:
    known = [destinations.parse(entry) for entry in allowed]
    return all(any(one.covers(destinations.parse(entry)) for one in known) for entry in asked)


def _private(asked: Any, allowed: Any) -> bool:
    return all(any(_private_covers(known, entry) for known in allowed) for entry in asked)


def _private_covers(known: str, entry: str) -> bool:
    try:
        network, part = ipaddress.ip_network(known), ipaddress.ip_network(entry)
    except ValueError:
        return destinations.host_covers(known, entry)
    return part.version == network.version and part.subnet_of(network)  # type: ignore[arg-type]


def _rules(asked: Sequence[Rule], allowed: Sequence[Rule]) -> bool:
    """Rules only ever add up for one host, and a host without any is free: so each rule that is
    asked for lies within one that there is, or speaks of hosts of which none speaks; and hosts with
    a rule keep one."""
    return all(
        any(_rule_covers(known, rule) for known in allowed)
        or not any(destinations.overlap(known.host, rule.host) for known in allowed)
        for rule in asked
    ) and all(
        any(destinations.host_covers(rule.host, known.host) for rule in asked) for known in allowed
    )


def _rule_covers(known: Rule, rule: Rule) -> bool:
    return (
        destinations.host_covers(known.host, rule.host)
        and _part_or_any(rule.methods, known.methods)
        and (
            known.paths == "any"
            or (
                rule.paths != "any"
                and all(any(_path_covers(path, one) for path in known.paths) for one in rule.paths)
            )
        )
    )


def _path_covers(known: str, path: str) -> bool:
    return known == path or (known.endswith("*") and path.startswith(known[:-1]))


def _secrets(asked: Mapping[str, Secret], allowed: Mapping[str, Secret]) -> bool:
    return all(
        name in allowed and _secret_covers(allowed[name], secret) for name, secret in asked.items()
    )


def _secret_covers(known: Secret, secret: Secret) -> bool:
    return (
        (secret.env, secret.header, secret.source) == (known.env, known.header, known.source)
        and secret.allow_plain <= known.allow_plain
        and all(
            any(destinations.host_covers(h, host) for h in known.hosts) for host in secret.hosts
        )
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
    "imports.allow": _covered,
    "imports.forbid": _forbids_as_much,
    **{f"limits.{name}": le for name in Limits.model_fields},
    **{f"uploads.{name}": le for name in Uploads.model_fields},
    "uploads.allowed_types": _part_or_any,
    "pool.start": _one_of("cold", "fork"),
    "pool.min_idle": le,
    "pool.max_idle": le,
    **{f"walls.{name}": _one_of("hard", "best-effort") for name in Walls.model_fields},
}
ASKABLE = {key.partition(".")[0] for key in _ORDER} | {"env"}


def _wider(policy: Policy, asked: Policy) -> Iterator[tuple[str, Any, Any]]:
    for key, order in _ORDER.items():
        if key == "network.rule" and not asked.network.allow:
            continue  # no rule speaks of a host that can be reached
        value, allowed = attrgetter(key)(asked), attrgetter(key)(policy)
        if not order(value, allowed):
            yield key, _said(asked, key), _said(policy, key)
    for name, allowed in policy.env.items():
        if asked.env[name] != allowed:
            yield f"env.{name}", asked.env[name], allowed


def _said(policy: Policy, key: str) -> Any:
    """A value as the file would say it: with its unit."""
    value: Any = policy.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def _widened(policy: Policy, wider: list[tuple[str, Any, Any]]) -> BadRequest:
    key, asked, allowed = wider[0]
    return BadRequest(
        f"{key}: {_text(asked)} goes beyond policy {policy.name}, which allows {_text(allowed)}",
        code="limit_widened",
        hint="a request may only tighten a policy; choose or write another one for more",
        details={
            "policy": policy.name,
            "key": key,
            "asked": asked,
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
                f"{key} is the policy's own: a request cannot set it",
                hint=f"a request may set {', '.join(sorted(ASKABLE))}",
                details={"key": key, "policy": policy.name},
            )
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in request.items()}


def _overlay(policy: Policy, request: dict[str, Any]) -> dict[str, Any]:
    table = policy.model_dump(mode="json")
    for key, value in request.items():
        merged = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = {**table[key], **value} if merged else value
    if isinstance(asked := request.get("secrets"), dict):
        known = policy.model_dump(mode="json")["secrets"]
        table["secrets"] = {
            name: {**known.get(name, {}), **said} if isinstance(said, dict) else said
            for name, said in asked.items()
        }
    imports = table["imports"]
    if isinstance(imports, dict) and isinstance(imports["forbid"], list | tuple):
        imports["forbid"] = [*policy.imports.forbid, *imports["forbid"]]
    _take_along(policy, table, request)
    return table


def _take_along(policy: Policy, table: dict[str, Any], request: dict[str, Any]) -> None:
    """What a request implies for keys it does not speak of, whether it tightens or widens: who
    asks for too much is told that, not of a contradiction they never wrote."""
    processes = _wanted_processes(request)
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
        table.update(filter="default", processes=True)  # it connects, which strict lets nobody do
    match request.get("pool"):
        case {"max_idle": int(most), **others} if "min_idle" not in others and most >= 0:
            table["pool"]["min_idle"] = int(min(policy.pool.min_idle, most))
        case {"min_idle": int(least), **others} if "max_idle" not in others:
            table["pool"]["max_idle"] = max(policy.pool.max_idle, least)


def _take_proxy_away(
    table: dict[str, Any], said: Mapping[Any, Any], request: Mapping[str, Any]
) -> None:
    for name in ("allow", "rule", "allow_private"):
        if name not in said:
            table["network"][name] = []
    if "secrets" not in request:
        table["secrets"] = {}


def _filter_with(policy: Policy) -> str:
    return "default" if policy.filter == "strict" else policy.filter


def _wanted_processes(request: dict[str, Any]) -> bool | None:
    match request:
        case {"processes": bool(wanted)}:
            return wanted
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
            hint=problems[0].hint or f"`sbx policy show {policy.name}` has the form of each value",
            details={"policy": policy.name, "problems": [p.to_dict() for p in problems]},
        ) from None


def _in_order_of(order: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in order if value in values)
