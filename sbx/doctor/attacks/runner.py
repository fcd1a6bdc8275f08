"""Attack sandboxes of a policy, and collect the results."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from sbx import errors
from sbx.doctor.attacks import probe_program
from sbx.doctor.attacks.attack import Attack, Outcome
from sbx.doctor.attacks.calls import CALLS
from sbx.doctor.attacks.decoys import MOUNTED, UPLOAD, Decoys
from sbx.doctor.attacks.files import FILES
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES, plant
from sbx.doctor.attacks.host_side import HOST_SIDE, act_on
from sbx.doctor.attacks.network import NETWORK
from sbx.doctor.attacks.processes import PROCESSES
from sbx.doctor.attacks.resources import RESOURCES, RUNS
from sbx.doctor.attacks.seal import SEAL
from sbx.policy import Policy
from sbx.protocol.runs import Run, Status
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

# The attacks that one program tries in one sandbox. The attacks of the host side plant their files.
TOGETHER: tuple[Attack, ...] = (
    *SEAL,
    *FILES,
    *PROCESSES,
    *NETWORK,
    *CALLS,
    *RESOURCES,
    *HOST_SIDE,
)
# The name of an attack identifies it in reports and in the names of tests.
ALL = (*TOGETHER, *RUNS, *HOST_EXECUTABLES)
assert len({attack.name for attack in ALL}) == len(ALL)

# The policy of a sandbox whose kernel starts by this path.
PATHS: Mapping[str, Mapping[str, Any]] = {
    "cold": {"pool": {"start": "cold"}},
    "pool": {},
    "fork": {"pool": {"max_idle": 0}},
}
# The limits of the attacked sandbox: with more tasks, Linux would spend the time on creating them.
FEW: Mapping[str, Any] = {"limits": {"tasks_max": 40}}
_PRELUDE = "import sys, time\n"
_RUN_S = 25.0  # of all attacks that are tried together; some 300 of them take two


class AttackResult(Struct, frozen=True):
    """The result of one attack. Without a report, `outcome` is None."""

    attack: Attack
    outcome: str | None

    @property
    def end(self) -> Outcome:
        return Outcome.UNCLEAR if self.outcome is None else self.attack.judge(self.outcome)


class AttackRunner(Struct, frozen=True):
    """All attacks on one policy by one path. `error` is the reason why some were not tried. The
    duration is in seconds."""

    policy: str
    path: str
    duration_s: float
    results: tuple[AttackResult, ...] = ()
    error: errors.SbxError | None = field(default=None)

    def ended(self, end: Outcome) -> list[AttackResult]:
        return [result for result in self.results if result.end is end]


async def try_policy(
    runtime: Runtime, policy: Policy, path: str, baits: Decoys, *, runs: bool
) -> AttackRunner:
    """Attack one sandbox with all attacks of `TOGETHER`.

    With `runs`, attack a separate sandbox with each attack of `RUNS`, and two sandboxes in a
    directory of the host. A failure is part of the result.
    """
    started_at = time.monotonic()
    results: tuple[AttackResult, ...] = ()
    try:
        if path == "pool":
            await runtime.warm(policy)
        async with await runtime.create(policy, narrower={**FEW, **PATHS[path]}) as box:
            receipt = await box.start()
            if receipt.path != path:
                why = receipt.fallback or "the setting fast_path (SBX_FAST_PATH) is off"
                raise errors.Unavailable(f"the path {receipt.path} served instead: {why}")
            outcomes = await attack(box, TOGETHER, baits)
            results = _results(TOGETHER, outcomes)
        if runs:
            results += tuple(
                await asyncio.gather(*(_alone(runtime, policy, path, attack) for attack in RUNS))
            )
            results += _results(HOST_EXECUTABLES, await plant(runtime, policy))
    except errors.SbxError as error:
        return AttackRunner(policy.name, path, time.monotonic() - started_at, results, error)
    return AttackRunner(policy.name, path, time.monotonic() - started_at, results)


async def attack(box: AsyncSandbox, attacks: Sequence[Attack], baits: Decoys) -> dict[str, str]:
    """Return the outcomes by the names of the attacks that reported one."""
    await box.uploads.put_bytes(UPLOAD, b"as it was uploaded\n")
    with suppress(errors.Unavailable):  # this host cannot mount into a live sandbox
        await box.mount(baits.shown, MOUNTED)
    code = probe_program.program(attacks, baits.parameters, limits(box.policy))
    run = await box.run(code, timeout=min(_RUN_S, box.policy.limits.wall_time))
    outcomes = probe_program.outcomes(attacks, run.stdout)
    for planted in attacks:
        if planted.act and outcomes.get(planted.name) == "ok":
            outcomes[planted.name] = await act_on(box, planted, baits)
    return outcomes


def _results(attacks: Sequence[Attack], outcomes: Mapping[str, str]) -> tuple[AttackResult, ...]:
    return tuple(AttackResult(attack, outcomes.get(attack.name)) for attack in attacks)


def limits(policy: Policy) -> dict[str, int]:
    """Return the limits that the attacks on resources exceed."""
    return {
        "tasks": policy.limits.tasks_max,
        "open_files": policy.limits.open_files,
        "file_size": policy.limits.file_size_max,
        "tmp_size": policy.limits.tmp_size,
        "shm_size": policy.limits.shm_size,
    }


async def _alone(runtime: Runtime, policy: Policy, path: str, attack: Attack) -> AttackResult:
    narrower = {**PATHS[path], **(attack.narrower or {})}
    async with await runtime.create(policy, narrower=narrower) as box:
        return AttackResult(attack, outcome_of(await box.run(_PRELUDE + attack.code)))


def outcome_of(run: Run) -> str:
    """Return the outcome of a whole run as one word, as in attack.py."""
    if run.cause is not None:
        return f"killed:{run.cause}"
    if run.status is Status.ERROR and run.error is not None:
        return run.error.name
    return str(run.status)
