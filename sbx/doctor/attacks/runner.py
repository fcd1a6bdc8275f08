"""Attack sandboxes of a policy, and collect the results."""

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from sbx import errors
from sbx.doctor.attacks import probe_program
from sbx.doctor.attacks.attack import Attack, Class, Outcome
from sbx.doctor.attacks.calls import CALLS
from sbx.doctor.attacks.decoys import MOUNTED, UPLOAD, Decoys
from sbx.doctor.attacks.files import FILES
from sbx.doctor.attacks.host_executables import FEW_MEANS, HOST_EXECUTABLES, MEANS, plant
from sbx.doctor.attacks.host_side import HOST_SIDE, VERBS, act_on, act_on_own
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
CONTROLS = tuple(
    Attack(probe_program.control_name(act), Class.RESOURCES, "runtime", code)
    for act, code in probe_program.CONTROLS.items()
)
_GUARDED_AS_DEFAULT = ("networked", "data-science")
_HOST_PATH = re.compile(r"'(/(?:boot|dev|etc|proc|root|sys|var)/[\w./-]+)'")
_RUN_S = 25.0  # of all attacks that are tried together; some 300 of them take two


class AttackResult(Struct, frozen=True):
    """The result of one attack. Without a report, `outcome` is None.

    `failed_control` is the reason why a refusal proves nothing. `exempt` is the reason why the
    attack does not apply to this policy or host.
    """

    attack: Attack
    outcome: str | None
    failed_control: str | None = None
    exempt: str | None = None

    @property
    def end(self) -> Outcome:
        end = Outcome.NOT_TRIED if self.outcome is None else self.attack.judge(self.outcome)
        if end not in (Outcome.HELD, Outcome.NOT_TRIED):
            return end
        if self.exempt:
            return Outcome.NOT_APPLICABLE
        return Outcome.NOT_TRIED if self.failed_control else end

    @property
    def reason(self) -> str:
        if self.end is Outcome.NOT_APPLICABLE:
            return self.exempt or "this host has nothing to attack there"
        return self.failed_control or "it reported nothing"


class AttackRunner(Struct, frozen=True):
    """All attacks on one policy by one path. `error` is the reason why some were not tried. The
    duration is in seconds."""

    policy: str
    path: str
    duration_s: float
    results: tuple[AttackResult, ...] = ()
    error: errors.SbxError | None = field(default=None)

    @property
    def tried(self) -> int:
        skipped = (Outcome.NOT_TRIED, Outcome.NOT_APPLICABLE)
        return sum(result.end not in skipped for result in self.results)

    def ended(self, end: Outcome) -> list[AttackResult]:
        return [result for result in self.results if result.end is end]


async def try_policy(
    runtime: Runtime,
    policy: Policy,
    path: str,
    baits: Decoys,
    *,
    runs: bool,
    directory: Path | None = None,
) -> AttackRunner:
    """Attack one sandbox with all attacks of `TOGETHER`.

    With `runs`, attack a separate sandbox with each attack of `RUNS`, and sandboxes in private
    subdirectories of `directory`. A failure is part of the result.
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
            results = results_of(TOGETHER, outcomes, policy)
        if runs:
            results += tuple(
                await asyncio.gather(*(_alone(runtime, policy, path, attack) for attack in RUNS))
            )
            means = FEW_MEANS if policy.name in _GUARDED_AS_DEFAULT else MEANS
            attacks = [attack for attack in HOST_EXECUTABLES if attack.act[0] in means]
            outcomes = await plant(runtime, policy, directory, attacks)
            results += results_of(attacks, outcomes, policy)
    except errors.SbxError as error:
        return AttackRunner(policy.name, path, time.monotonic() - started_at, results, error)
    return AttackRunner(policy.name, path, time.monotonic() - started_at, results)


async def attack(box: AsyncSandbox, attacks: Sequence[Attack], baits: Decoys) -> dict[str, str]:
    """Return the outcomes by the names of the attacks and controls that reported one."""
    attacks = (*CONTROLS, *attacks)
    await box.uploads.put_bytes(UPLOAD, b"as it was uploaded\n")
    with suppress(errors.Unavailable):  # this host cannot mount into a live sandbox
        await box.mount(baits.shown, MOUNTED)
    code = probe_program.program(attacks, baits.parameters, limits(box.policy))
    run = await box.run(code, timeout=min(_RUN_S, box.policy.limits.wall_time))
    outcomes = probe_program.outcomes(attacks, run.stdout)
    if any(planted.act for planted in attacks):
        for verb in VERBS:
            outcomes[probe_program.control_name(verb)] = await act_on_own(box, verb)
    for planted in attacks:
        if planted.act and outcomes.get(planted.name) == "ok":
            outcomes[planted.name] = await act_on(box, planted, baits)
    return outcomes


def results_of(
    attacks: Sequence[Attack], outcomes: Mapping[str, str], policy: Policy
) -> tuple[AttackResult, ...]:
    """Return the results of attacks, with `outcomes` of them and of their controls."""
    return tuple(_result(attack, outcomes, policy) for attack in attacks)


def _result(attack: Attack, outcomes: Mapping[str, str], policy: Policy) -> AttackResult:
    outcome = outcomes.get(attack.name)
    failed_control = exempt = None
    for control in probe_program.controls_of(attack):
        word = outcomes.get(control, "nothing")
        act = control.removeprefix(probe_program.control_name(""))
        act_name = act.strip(".(")
        refused = {act, f"os.{act}("}.intersection(probe_program.REFUSED_BY_STRICT)
        if word in ("absent", "EOPNOTSUPP"):
            exempt = f"this host or file system does not offer {act_name}"
        elif word in ("denied", "EPERM", "EACCES") and policy.filter == "strict" and refused:
            exempt = f"{policy.name} refuses {act_name} everywhere"
        if word != "ok":
            failed_control = f"the control of {act_name} answered {word}"
    if not policy.processes and probe_program.is_fatal(attack):
        exempt = f"{policy.name} has no process that this attack could end"
    paths = _HOST_PATH.findall(attack.code)
    if outcome in ("ENOENT", "ENXIO", "ENODEV") and not all(map(os.path.lexists, paths)):
        exempt = "this host does not have the file that they open"
    return AttackResult(attack, outcome, failed_control, exempt)


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
        control = outcome_of(await box.run(run_of(attack, is_control=True)))
        failed = None if control == "ok" else f"the control within the limit answered {control}"
        return AttackResult(attack, outcome_of(await box.run(run_of(attack))), failed)


def run_of(attack: Attack, *, is_control: bool = False) -> str:
    """Return the cell of an attack of `RUNS`, or of its control."""
    return f"import sys, time\nCONTROL = {is_control}\n{attack.code}"


def outcome_of(run: Run) -> str:
    """Return the outcome of a whole run as one word, as in attack.py."""
    if run.cause is not None:
        return f"killed:{run.cause}"
    if run.status is Status.ERROR and run.error is not None:
        return run.error.name
    return str(run.status)
