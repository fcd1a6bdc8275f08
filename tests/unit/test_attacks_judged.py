"""What the outcomes of attacks mean, and what is concluded of many."""

import pytest
from msgspec.structs import replace

from sbx.doctor.attacks.attack import Attack, Class, Outcome
from sbx.doctor.attacks.probe_program import MARK, outcomes
from sbx.doctor.attacks.runner import ALL, AttackResult, AttackRunner
from sbx.doctor.attacks.syscall_numbers import NUMBERS, numbers_of
from sbx.doctor.host_check import PolicyCheck
from sbx.doctor.report import AttackReport
from sbx.errors import Unavailable
from sbx.isolation.seccomp.compiler import number_of

ONE = Attack("one", Class.FS, "mounts", "1", frozenset({"ENOENT"}))
OTHER = Attack("other", Class.NET, "seccomp", "1")
HELD, ESCAPED, UNCLEAR = (
    AttackResult(ONE, "ENOENT"),
    AttackResult(OTHER, "ok"),
    AttackResult(OTHER, None),
)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("ENOENT", Outcome.HELD),
        ("EPERM", Outcome.HELD),
        ("held", Outcome.HELD),
        ("absent", Outcome.HELD),
        ("ok", Outcome.ESCAPED),
        ("EFAULT", Outcome.ESCAPED),  # linux itself looked at the arguments
        ("timeout", Outcome.ESCAPED),
        ("EMFILE", Outcome.UNCLEAR),
        ("NameError", Outcome.UNCLEAR),
        ("SIGSEGV", Outcome.UNCLEAR),
        ("", Outcome.UNCLEAR),
    ],
)
def test_an_outcome_is_judged(outcome: str, end: Outcome) -> None:
    assert ONE.judge(outcome) is end


def siege(*trials: AttackRunner) -> AttackReport:
    return AttackReport(trials, (), 1.0)


def trial(policy: str, *results: AttackResult) -> AttackRunner:
    return AttackRunner(policy, "pool", 0.5, results)


def test_a_siege_is_complete_when_each_policy_was_attacked_and_all_is_clear() -> None:
    failed = replace(trial("strict"), error=Unavailable("no room"))
    assert siege(trial("default", HELD, ESCAPED)).complete
    assert not siege(trial("default", HELD, UNCLEAR)).complete
    assert not siege(trial("strict", HELD)).complete
    assert not siege(trial("default", HELD), failed).complete
    assert siege(trial("default", HELD), failed, trial("strict", HELD)).complete
    assert not siege().complete
    refused = PolicyCheck("strict", False, cause="no cgroups")
    assert not AttackReport((trial("default", HELD),), (refused,), 1.0).complete


def test_what_escaped_comes_first_and_what_cannot_run_here_is_named() -> None:
    refused = PolicyCheck("strict", False, cause="no cgroups")
    found = AttackReport((trial("default", HELD, UNCLEAR, ESCAPED),), (refused,), 1.0)
    assert found.sentences() == [
        "ESCAPED: other (net, seccomp): default by pool answered ok",
        "unclear: other (net): default by pool answered nothing",
        "not tried: strict: no cgroups",
    ]
    assert found.tally("seccomp", "default") == (2, 0)
    assert found.to_dict()["ok"] is False


def test_only_lines_that_the_program_would_print_are_outcomes() -> None:
    printed = "\n".join(
        [
            "hello",
            f'{MARK}[0, "EPERM"]',
            f'{MARK}[7, "ok"]',
            f'{MARK}[-1, "ok"]',
            f'{MARK}[0.5, "ok"]',
            f"{MARK}[1, 2]",
            f"{MARK}[1",
            f"{MARK}5",
            f"{MARK}" + "[" * 100_000,
        ]
    )
    assert outcomes([ONE, OTHER], printed) == {"one": "EPERM"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_libseccomp(machine: str) -> None:
    assert numbers_of(machine) == {name: number_of(name, machine) for name in NUMBERS}


def test_a_machine_that_nobody_looked_at_has_no_numbers() -> None:
    assert set(numbers_of("riscv64").values()) == {None}


def test_every_call_of_the_attacks_has_its_number() -> None:
    named = {word for one in ALL for word in one.code.split("call(")[1:] if word[:1] in "'\""}
    assert {word[1:].partition(word[0])[0] for word in named} <= set(NUMBERS)
