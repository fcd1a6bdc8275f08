"""`sbx doctor --attack`: the built-in attacks against throw-away sandboxes of the shipped policies,
on this very host, and what held."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sbx import errors
from sbx.cli.examine import Verdict, shipped, verdict
from sbx.policy import Policy
from sbx.runtime.attacks.attack import End
from sbx.runtime.attacks.baits import Baits, laid_out
from sbx.runtime.attacks.trial import Result, Trial, try_policy
from sbx.runtime.runtime import Runtime

# Each policy, and each path by which a kernel starts: not each with each, to take below a minute.
# The walls of a path are put up by the same code whatever the policy, and so the other way round.
PLAN = {
    "default": ("pool", "fork", "cold"),
    "strict": ("pool", "cold"),
    "networked": ("pool",),
    "data-science": ("pool",),  # and by its walls notebook
}
_LAST = "cold"  # the path that every host has
_WHOLE_S = 120.0
_AT_ONCE = 2  # no jail has more than a cpu or two
_LAYERS = (
    *("namespaces", "mounts", "landlock", "seccomp", "privileges", "rlimits", "limits"),
    "runtime",
    "path guard",
)


@dataclass(frozen=True, slots=True)
class Siege:
    """All trials. `refused` are the policies that do not run on this host: there is nothing of
    theirs to be attacked."""

    trials: tuple[Trial, ...]
    refused: tuple[Verdict, ...]
    duration_s: float

    @property
    def escaped(self) -> list[tuple[Trial, Result]]:
        return self._ended(End.ESCAPED)

    @property
    def unclear(self) -> list[tuple[Trial, Result]]:
        return self._ended(End.UNCLEAR)

    @property
    def complete(self) -> bool:
        """Whether each policy that runs here was attacked by a path at least, `default` among them,
        and every attack came to an end that says something."""
        whole = {one.policy for one in self.trials if one.error is None}
        begun = {one.policy for one in self.trials}
        return "default" in whole and whole == begun and not self.unclear

    def _ended(self, end: End) -> list[tuple[Trial, Result]]:
        return [(trial, one) for trial in self.trials for one in trial.ended(end)]

    def tally(self, layer: str, policy: str) -> tuple[int, int]:
        """How many attacks on a layer of a policy were tried, and how many it held."""
        results = [
            result
            for trial in self.trials
            if trial.policy == policy
            for result in trial.results
            if result.attack.layer == layer
        ]
        return len(results), sum(one.end is End.HELD for one in results)

    def to_dict(self) -> dict[str, Any]:
        policies = list(dict.fromkeys(one.policy for one in self.trials))
        return {
            "ok": self.complete and not self.escaped,
            "complete": self.complete,
            "duration_s": round(self.duration_s, 3),
            "tried": sum(len(one.results) for one in self.trials),
            "held": sum(len(one.ended(End.HELD)) for one in self.trials),
            "escaped": [_told(*one) for one in self.escaped],
            "unclear": [_told(*one) for one in self.unclear],
            "layers": [
                {"layer": layer, "policy": policy, "tried": tried, "held": held}
                for layer in _LAYERS
                for policy in policies
                for tried, held in [self.tally(layer, policy)]
            ],
            "trials": [
                {
                    "policy": one.policy,
                    "path": one.path,
                    "duration_s": round(one.duration_s, 3),
                    "error": one.error.to_dict() if one.error else None,
                    "outcomes": {result.attack.name: result.outcome for result in one.results},
                }
                for one in self.trials
            ],
            "refused": [one.to_dict() for one in self.refused],
        }

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """What held, by layer and policy; and each trial."""
        policies = tuple(dict.fromkeys(one.policy for one in self.trials))
        layers: list[tuple[str, ...]] = [
            (layer, *(_cell(*self.tally(layer, policy)) for policy in policies))
            for layer in _LAYERS
        ]
        trials: list[tuple[str, ...]] = [
            (
                one.policy,
                one.path,
                str(len(one.results)),
                str(len(one.ended(End.HELD))),
                str(len(one.ended(End.ESCAPED))),
                f"{one.duration_s:.1f} s",
            )
            for one in self.trials
        ]
        return [
            (("layer", *policies), layers),
            (("policy", "path", "attacks", "held", "escaped", "took"), trials),
        ]

    def sentences(self) -> list[str]:
        """What a person must not overlook, the worst first."""
        lines = [
            f"ESCAPED: {one.attack.name} ({one.attack.kind}, {one.attack.layer}):"
            f" {trial.policy} by {trial.path} answered {one.outcome}"
            for trial, one in self.escaped
        ]
        lines += [
            f"unclear: {one.attack.name} ({one.attack.kind}): {trial.policy} by {trial.path}"
            f" answered {one.outcome or 'nothing'}"
            for trial, one in self.unclear
        ]
        lines += [
            f"not tried: {one.policy} by {one.path}: {one.error.message}"
            for one in self.trials
            if one.error is not None
        ]
        lines += [f"not tried: {one.policy}: {one.cause}" for one in self.refused]
        return lines


def _cell(tried: int, held: int) -> str:
    if not tried:
        return ""
    return f"{held} held" if held == tried else f"{held} of {tried} held"


def _told(trial: Trial, result: Result) -> dict[str, Any]:
    return {
        "name": result.attack.name,
        "class": str(result.attack.kind),
        "layer": result.attack.layer,
        "policy": trial.policy,
        "path": trial.path,
        "outcome": result.outcome,
    }


async def besiege() -> Siege:
    """Attack what this host can run. What fails is part of the answer."""
    began = time.monotonic()
    with laid_out() as baits:
        async with Runtime() as runtime:
            verdicts = {one.name: verdict(one, runtime.capabilities) for one in shipped()}
            policies = [one for one in shipped() if one.name in PLAN and verdicts[one.name].runs]
            policies.sort(key=lambda one: list(PLAN).index(one.name))
            trials = await _trials(runtime, policies, baits, began + _WHOLE_S)
    refused = [verdicts[name] for name in PLAN if name in verdicts and not verdicts[name].runs]
    return Siege(tuple(trials), tuple(refused), time.monotonic() - began)


async def _trials(
    runtime: Runtime, policies: Sequence[Policy], baits: Baits, deadline: float
) -> list[Trial]:
    """Those of the plan, and where a host has not these paths, by the one that it must have."""
    cells = [
        (policy, PLAN[policy.name][number], number == 0)
        for number in range(max(map(len, PLAN.values())))
        for policy in policies
        if number < len(PLAN[policy.name])
    ]
    trials = await _some_at_once(runtime, cells, baits, deadline)
    whole = {one.policy for one in trials if one.error is None}
    left = [
        (policy, _LAST, True)
        for policy in policies
        if policy.name not in whole and _LAST not in PLAN[policy.name]
    ]
    return trials + await _some_at_once(runtime, left, baits, deadline)


async def _some_at_once(
    runtime: Runtime, cells: Sequence[tuple[Policy, str, bool]], baits: Baits, deadline: float
) -> list[Trial]:
    """In the order of `cells`, so that each policy has been attacked once should time run out."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(policy: Policy, path: str, runs: bool) -> Trial:
        async with room:
            return await _in_time(runtime, policy, path, baits, deadline, runs=runs)

    return list(await asyncio.gather(*(one(*cell) for cell in cells)))


async def _in_time(
    runtime: Runtime, policy: Policy, path: str, baits: Baits, deadline: float, *, runs: bool
) -> Trial:
    began = time.monotonic()
    try:
        async with asyncio.timeout(deadline - began):
            return await try_policy(runtime, policy, path, baits, runs=runs)
    except TimeoutError:
        late = errors.Unavailable(f"this host is too busy: {_WHOLE_S:.0f} s were not enough")
        return Trial(policy.name, path, time.monotonic() - began, error=late)
