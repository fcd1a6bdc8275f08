"""`sbx doctor --attack`: run the built-in attacks in temporary sandboxes of the shipped policies on
this host, and report which attacks the restrictions stopped."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from sbx import errors
from sbx.doctor.attacks.attack import Outcome
from sbx.doctor.attacks.decoys import Decoys, laid_out
from sbx.doctor.attacks.runner import AttackResult, AttackRunner, try_policy
from sbx.doctor.host_check import PolicyCheck, shipped, verdict
from sbx.policy import Policy
from sbx.runtime.runtime import Runtime

# Cover each policy and each way to start a kernel, but not each combination: that would take more
# than a minute. The same code builds the walls of a path for each policy, and the walls of a policy
# for each path.
PLAN = {
    "default": ("pool", "fork", "cold"),
    "strict": ("pool", "cold"),
    "networked": ("pool",),
    "data-science": ("pool",),  # and the policy notebook, which has the same walls
}
_LAST = "cold"  # every host supports this path
_WHOLE_S = 300.0  # an idle host needs 25
_EXEMPT = Outcome.NOT_APPLICABLE
_AT_ONCE = 2  # a jail has at most one or two CPUs
_LAYERS = (
    *("namespaces", "mounts", "landlock", "seccomp", "privileges", "rlimits", "limits"),
    "runtime",
    "path guard",
)


class AttackReport(Struct, frozen=True):
    """The result of all trials. `refused` are the policies that do not run on this host, so they
    were not attacked."""

    trials: tuple[AttackRunner, ...]
    refused: tuple[PolicyCheck, ...]
    duration_s: float

    @property
    def escaped(self) -> list[tuple[AttackRunner, AttackResult]]:
        return self._ended(Outcome.ESCAPED)

    @property
    def unclear(self) -> list[tuple[AttackRunner, AttackResult]]:
        return self._ended(Outcome.UNCLEAR)

    @property
    def not_tried(self) -> list[tuple[AttackRunner, AttackResult]]:
        return self._ended(Outcome.NOT_TRIED)

    @property
    def complete(self) -> bool:
        """Whether each policy completed a trial, and each attack that applies was tried and has a
        clear result. A policy that this host cannot enforce was not tried."""
        completed = {trial.policy for trial in self.trials if trial.error is None}
        started = {trial.policy for trial in self.trials}
        whole = "default" in completed and completed == started and not self.refused
        return whole and not self.unclear and not self.not_tried

    def _ended(self, end: Outcome) -> list[tuple[AttackRunner, AttackResult]]:
        return [(trial, result) for trial in self.trials for result in trial.ended(end)]

    def tally(self, layer: str, policy: str) -> Counter[Outcome]:
        """Return how many attacks on a layer of a policy have each result."""
        return Counter(
            result.end
            for trial in self.trials
            if trial.policy == policy
            for result in trial.results
            if result.attack.layer == layer
        )

    def exempt(self) -> dict[tuple[str, str], int]:
        """Return the number of attacks that do not apply, by policy and reason."""
        findings = self._ended(Outcome.NOT_APPLICABLE)
        return Counter((trial.policy, result.reason) for trial, result in findings)

    def to_dict(self) -> dict[str, Any]:
        policies = list(dict.fromkeys(trial.policy for trial in self.trials))
        return {
            "ok": self.complete and not self.escaped,
            "complete": self.complete,
            "duration_s": round(self.duration_s, 3),
            "tried": sum(trial.tried for trial in self.trials),
            "held": sum(len(trial.ended(Outcome.HELD)) for trial in self.trials),
            "escaped": [_finding(*finding) for finding in self.escaped],
            "unclear": [_finding(*finding) for finding in self.unclear],
            "not_tried": [_finding(*finding) for finding in self.not_tried],
            "does_not_apply": [
                {"policy": policy, "reason": reason, "attacks": number}
                for (policy, reason), number in self.exempt().items()
            ],
            "layers": [
                {
                    "layer": layer,
                    "policy": policy,
                    "tried": tally.total() - tally[Outcome.NOT_TRIED] - tally[_EXEMPT],
                    "held": tally[Outcome.HELD],
                    "not_tried": tally[Outcome.NOT_TRIED],
                    "does_not_apply": tally[_EXEMPT],
                }
                for layer in _LAYERS
                for policy in policies
                for tally in [self.tally(layer, policy)]
            ],
            "trials": [
                {
                    "policy": trial.policy,
                    "path": trial.path,
                    "duration_s": round(trial.duration_s, 3),
                    "error": trial.error.to_dict() if trial.error else None,
                    "outcomes": {result.attack.name: result.outcome for result in trial.results},
                }
                for trial in self.trials
            ],
            "refused": [refusal.to_dict() for refusal in self.refused],
        }

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Return the stopped attacks by layer and policy, the trials, and the reasons why attacks
        do not apply."""
        policies = tuple(dict.fromkeys(trial.policy for trial in self.trials))
        layers: list[tuple[str, ...]] = [
            (layer, *(_cell(self.tally(layer, policy)) for policy in policies)) for layer in _LAYERS
        ]
        ends = (Outcome.HELD, Outcome.ESCAPED, Outcome.UNCLEAR, Outcome.NOT_TRIED, _EXEMPT)
        trials: list[tuple[str, ...]] = [
            (
                trial.policy,
                trial.path,
                str(trial.tried),
                *(str(len(trial.ended(end))) for end in ends),
                f"{trial.duration_s:.1f} s",
            )
            for trial in self.trials
        ]
        exempt: list[tuple[str, ...]] = [
            (reason, *(str(self.exempt().get((policy, reason), "")) for policy in policies))
            for reason in dict.fromkeys(reason for _, reason in self.exempt())
        ]
        return [
            (("layer", *policies), layers),
            (("policy", "path", "tried", *map(str, ends), "took"), trials),
            (("do not apply, because", *policies), exempt),
        ]

    def sentences(self) -> list[str]:
        """Return the lines that need attention, the worst first."""
        lines = [
            f"ESCAPED: {result.attack.name} ({result.attack.kind}, {result.attack.layer}):"
            f" {trial.policy} by {trial.path} answered {result.outcome}"
            for trial, result in self.escaped
        ]
        lines += [
            f"unclear: {result.attack.name} ({result.attack.kind}): {trial.policy} by {trial.path}"
            f" answered {result.outcome or 'nothing'}"
            for trial, result in self.unclear
        ]
        groups = Counter((trial.policy, trial.path, res.reason) for trial, res in self.not_tried)
        lines += [
            f"not tried: {number} attacks on {policy} by {path}: {reason}"
            for (policy, path, reason), number in groups.items()
        ]
        lines += [
            f"not tried: {trial.policy} by {trial.path}: {trial.error.message}"
            for trial in self.trials
            if trial.error is not None
        ]
        lines += [f"not tried: {refusal.policy}: {refusal.cause}" for refusal in self.refused]
        return lines


def _cell(tally: Counter[Outcome]) -> str:
    """Return the number of stopped attacks, and that of the tried ones if they differ."""
    tried = tally.total() - tally[_EXEMPT]
    if not tried:
        return ""
    stopped = tally[Outcome.HELD]
    return f"{stopped} held" if stopped == tried else f"{stopped} of {tried} held"


def _finding(trial: AttackRunner, result: AttackResult) -> dict[str, Any]:
    return {
        "name": result.attack.name,
        "class": str(result.attack.kind),
        "layer": result.attack.layer,
        "policy": trial.policy,
        "path": trial.path,
        "outcome": result.outcome,
        "reason": result.reason if result.end is Outcome.NOT_TRIED else None,
    }


async def run_attacks(
    directory: Path | None = None, on_trial: Callable[[AttackRunner], None] = lambda _: None
) -> AttackReport:
    """Attack every policy that this host can run. Failed trials are part of the result.

    Plant host executables below `directory`. Call `on_trial` at the end of each trial.
    """
    started_at = time.monotonic()
    with laid_out() as baits:
        async with Runtime() as runtime:
            verdicts = {policy.name: verdict(policy, runtime.capabilities) for policy in shipped()}
            policies = [
                policy for policy in shipped() if policy.name in PLAN and verdicts[policy.name].runs
            ]
            policies.sort(key=lambda policy: list(PLAN).index(policy.name))
            trials = _Trials(runtime, baits, started_at + _WHOLE_S, directory, on_trial)
            results = await trials.run(policies)
    refused = [verdicts[name] for name in PLAN if name in verdicts and not verdicts[name].runs]
    return AttackReport(tuple(results), tuple(refused), time.monotonic() - started_at)


class _Trials(Struct, frozen=True):
    """The trials of one report, of which `deadline` is the end in monotonic seconds."""

    runtime: Runtime
    baits: Decoys
    deadline: float
    directory: Path | None
    on_trial: Callable[[AttackRunner], None]

    async def run(self, policies: Sequence[Policy]) -> list[AttackRunner]:
        """Run the trials of the plan. If a policy completed none of its paths, try `cold`."""
        cells = [
            (policy, PLAN[policy.name][number], number == 0)
            for number in range(max(map(len, PLAN.values())))
            for policy in policies
            if number < len(PLAN[policy.name])
        ]
        trials = await self._some_at_once(cells)
        completed = {trial.policy for trial in trials if trial.error is None}
        remaining = [
            (policy, _LAST, True)
            for policy in policies
            if policy.name not in completed and _LAST not in PLAN[policy.name]
        ]
        return trials + await self._some_at_once(remaining)

    async def _some_at_once(self, cells: Sequence[tuple[Policy, str, bool]]) -> list[AttackRunner]:
        """Start in the order of `cells`, so that each policy is attacked once before time runs
        out."""
        semaphore = asyncio.Semaphore(_AT_ONCE)

        async def run_trial(policy: Policy, path: str, runs: bool) -> AttackRunner:
            async with semaphore:
                trial = await self._in_time(policy, path, runs=runs)
                self.on_trial(trial)
                return trial

        return list(await asyncio.gather(*(run_trial(*cell) for cell in cells)))

    async def _in_time(self, policy: Policy, path: str, *, runs: bool) -> AttackRunner:
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self.deadline - started_at):
                return await try_policy(
                    self.runtime, policy, path, self.baits, runs=runs, directory=self.directory
                )
        except TimeoutError:
            error = errors.Unavailable(f"this host is too busy: {_WHOLE_S:.0f} s were not enough")
            return AttackRunner(policy.name, path, time.monotonic() - started_at, error=error)
