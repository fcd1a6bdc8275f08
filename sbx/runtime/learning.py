"""Find the narrowest policy with which a task succeeds, by running the task.

    permissive   a policy with a proxy that allows the hosts seen so far; pure
    narrowings   the narrower policies to try after a run, by the use of the run; pure
    learn        runs the task in new sandboxes until none of its requests is refused, tries the
                 narrowings one after the other, and keeps those with which the task succeeds

The proxy allows a host only after a run has requested it, so each run with new hosts is followed by
another one. A task with effects on other computers repeats them with each run.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from sbx.egress.rules import UNLISTED
from sbx.errors import BadRequest
from sbx.policy import Policy, narrow
from sbx.policy.destinations import Destination
from sbx.protocol.runs import Run
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

RUNS_MAX = 20  # to find the hosts
_MIB = 1 << 20
_PRIVATE = "network.allow_private"
_SHORTEST_S = 10

LearnedTask = Callable[[AsyncSandbox], Awaitable[Run]]
OnLearned = Callable[[str], object]


class Observation(Struct, frozen=True):
    """The use of one run. `hosts` are those that it reached, `refused` those that no entry allows,
    and `private` the names and addresses that lead into a private network. Sizes are in bytes."""

    run: Run
    hosts: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    memory_peak: int | None = None
    disk: int | None = None


class LearnedPolicy(Struct, frozen=True):
    """`policy` is the narrowest one with which the task succeeded; None if it never did. `changes`
    are the tables and keys in which it differs from its base, as in a policy file. `runs` counts
    the runs, and `last` is the last one with this policy."""

    policy: Policy | None
    changes: dict[str, Any]
    runs: int
    last: Observation


def permissive(base: Policy, hosts: Sequence[str], private: Sequence[str]) -> Policy:
    """Return the base with processes, without import rules, and with a proxy for these hosts."""
    table = base.model_dump(mode="json") | {
        "processes": True,
        "filter": "default",
        "capabilities": ["python", "shell", "filesystem"],
        "imports": {},
        "grant": [],
    }
    reached = {"mode": "proxy", "allow": list(hosts), "allow_private": list(private)}
    table["network"] = {**table["network"], **reached}
    return Policy.model_validate(table)


def narrowings(
    base: Policy, seen: Observation, *, python: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests that narrow a policy, as `narrow` takes them, each with a name. `python`: the
    task is Python, and may succeed without processes."""
    yield "the import rules of the base", {"imports": base.model_dump(mode="json")["imports"]}
    if seen.hosts:
        yield "only these hosts", {"network": {"allow": list(seen.hosts)}}
    else:
        yield "the network off", {"network": {"mode": "none"}}
        if python:
            yield "processes off", {"processes": False}
    yield "the filter allowlist", {"filter": "allowlist"}
    limits: dict[str, Any] = {}
    if seen.memory_peak is not None:
        limits["memory_max"] = max(2, math.ceil(seen.memory_peak * 1.5 / (32 * _MIB))) * 32 * _MIB
    if seen.disk is not None:
        limits["workspace_max"] = max(16, math.ceil(seen.disk * 2 / _MIB)) * _MIB
    wall_time = max(_SHORTEST_S, math.ceil(seen.run.duration_s * 4))
    yield "lower limits", {"limits": {**limits, "run_timeout": wall_time, "wall_time": wall_time}}


def changes(base: Policy, policy: Policy) -> dict[str, Any]:
    """Return the keys of `policy` that differ from `base`, in the form of a policy file."""
    before, after = base.model_dump(mode="json"), policy.model_dump(mode="json")
    differing: dict[str, Any] = {}
    for key, value in after.items():
        if value == before[key] or key in ("name", "description", "expect"):
            continue
        differing[key] = value
        if isinstance(value, dict) and key not in ("env", "secrets"):
            own = {name: each for name, each in value.items() if each != before[key][name]}
            differing[key] = own
    return differing


async def learn(
    runtime: Runtime,
    base: Policy,
    task: LearnedTask,
    *,
    python: bool,
    allow_private: bool = False,
    on_progress: OnLearned = lambda _: None,
) -> LearnedPolicy:
    """Return the narrowest policy, which extends `base`. `allow_private`: also allow addresses of
    private networks and of this host, which the task requests. `on_progress` gets a sentence about
    each run. Raise as `Runtime.create`."""
    hosts: dict[str, None] = {}
    private: dict[str, None] = {}
    runs = 0
    while True:
        policy = permissive(base, tuple(hosts), tuple(private))
        seen = await _observed(runtime, policy, task)
        runs += 1
        new = [host for host in seen.refused if host not in hosts]
        new_private = [each for each in seen.private if allow_private and each not in private]
        if runs == RUNS_MAX or not (new or new_private):
            break
        on_progress(f"run {runs}: the task needs {', '.join((*new, *new_private))}")
        hosts.update(dict.fromkeys(new))
        private.update(dict.fromkeys(new_private))
    if not seen.run.ok:
        return LearnedPolicy(None, {}, runs, seen)
    for name, request in narrowings(base, seen, python=python):
        narrower = _narrowed(policy, request)
        if narrower is None or narrower == policy:
            continue
        tried = await _observed(runtime, narrower, task)
        runs += 1
        verdict = "ok" if tried.run.ok else "the task fails"
        on_progress(f"run {runs}, with {name}: {verdict}")
        if tried.run.ok:
            policy, seen = narrower, tried
    return LearnedPolicy(policy, changes(base, policy), runs, seen)


def _narrowed(policy: Policy, request: dict[str, Any]) -> Policy | None:
    """Return the policy, narrowed where the request is narrower: limits never grow. None: the
    policy is narrower already."""
    limits = {
        key: value
        for key, value in request.get("limits", {}).items()
        if value < getattr(policy.limits, key)
    }
    try:
        return narrow(policy, {**request, "limits": limits} if "limits" in request else request)
    except BadRequest as error:
        if error.code != "limit_widened":
            raise
        return None


async def _observed(runtime: Runtime, policy: Policy, task: LearnedTask) -> Observation:
    """Run the task in a new sandbox, and delete it."""
    async with await runtime.create(policy) as box:
        run = await task(box)
        usage = await box.usage()
        decisions = box.network_log

    def named(allowed: bool, rule: str = "") -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                str(Destination(each.host, each.port))
                for each in decisions
                if each.allowed == allowed and each.port and rule in ("", each.rule)
            )
        )

    private = (each.host for each in decisions if each.rule == _PRIVATE)
    return Observation(
        run,
        hosts=tuple(sorted(named(allowed=True))),
        refused=named(allowed=False, rule=UNLISTED),
        private=tuple(dict.fromkeys(private)),
        memory_peak=usage.memory_peak,
        disk=usage.disk,
    )
