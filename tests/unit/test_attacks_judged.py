"""What the outcomes of attacks mean, and what is concluded of many."""

import pytest
from msgspec.structs import replace

from sbx.doctor.attacks.attack import Attack, Class, Outcome
from sbx.doctor.attacks.probe_program import CONTROLS, MARK, controls_of, outcomes
from sbx.doctor.attacks.runner import ALL, TOGETHER, AttackResult, AttackRunner, results_of
from sbx.doctor.attacks.syscall_numbers import NUMBERS, numbers_of
from sbx.doctor.host_check import PolicyCheck
from sbx.doctor.report import AttackReport
from sbx.errors import Unavailable
from sbx.isolation.seccomp.compiler import number_of
from sbx.policy import load

ONE = Attack("one", Class.FS, "mounts", "1", frozenset({"ENOENT"}))
OTHER = Attack("other", Class.NET, "seccomp", "1")
HELD, ESCAPED, UNCLEAR, SILENT = (
    AttackResult(ONE, "ENOENT"),
    AttackResult(OTHER, "ok"),
    AttackResult(OTHER, "EMFILE"),
    AttackResult(OTHER, None),
)
WITHOUT_CONTROL = AttackResult(ONE, "ENOENT", "the control of opens answered EACCES")
EXEMPT = AttackResult(ONE, "EPERM", "the control of os.link answered EPERM", "strict refuses it")


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("ENOENT", Outcome.HELD),
        ("EPERM", Outcome.HELD),
        ("held", Outcome.HELD),
        ("absent", Outcome.NOT_APPLICABLE),
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
    assert siege(trial("default", HELD, EXEMPT)).complete
    assert not siege(trial("default", HELD, UNCLEAR)).complete
    assert not siege(trial("default", HELD, SILENT)).complete
    assert not siege(trial("default", HELD, WITHOUT_CONTROL)).complete
    assert not siege(trial("strict", HELD)).complete
    assert not siege(trial("default", HELD), failed).complete
    assert siege(trial("default", HELD), failed, trial("strict", HELD)).complete
    assert not siege().complete
    refused = PolicyCheck("strict", False, cause="no cgroups")
    assert not AttackReport((trial("default", HELD),), (refused,), 1.0).complete


def test_what_escaped_comes_first_and_what_cannot_run_here_is_named() -> None:
    refused = PolicyCheck("strict", False, cause="no cgroups")
    results = (HELD, UNCLEAR, ESCAPED, WITHOUT_CONTROL, SILENT, EXEMPT)
    found = AttackReport((trial("default", *results),), (refused,), 1.0)
    assert found.sentences() == [
        "ESCAPED: other (net, seccomp): default by pool answered ok",
        "unclear: other (net): default by pool answered EMFILE",
        "not tried: 1 attacks on default by pool: the control of opens answered EACCES",
        "not tried: 1 attacks on default by pool: it reported nothing",
        "not tried: strict: no cgroups",
    ]
    assert found.tally("mounts", "default") == {
        Outcome.HELD: 1,
        Outcome.NOT_TRIED: 1,
        Outcome.NOT_APPLICABLE: 1,
    }
    document = found.to_dict()
    assert (document["ok"], document["tried"], document["held"]) == (False, 3, 1)
    assert [one["name"] for one in document["not_tried"]] == ["one", "other"]
    assert document["does_not_apply"] == [
        {"policy": "default", "reason": "strict refuses it", "attacks": 1}
    ]


def test_a_seal_attack_that_cannot_look_is_not_held() -> None:
    """Such an attack reads a file that names the wall. An error of the read counted as the wall."""
    seal = Attack("seal", Class.SEAL, "namespaces", "held_if(True)")
    assert seal.judge("held") is Outcome.HELD
    assert seal.judge("EACCES") is not Outcome.HELD


def test_each_attack_has_a_control_beyond_its_search() -> None:
    without = {one.name for one in TOGETHER if not controls_of(one)}
    assert without == {  # which only look at their own process
        "have an id of root",
        "find a variable of the program that uses sbx",
        "hold a pipe or a socket of a terminal",
        "import from the current directory before the packages",
    }


def test_an_attack_counts_only_if_the_controls_of_its_acts_succeed() -> None:
    """All attacks of a sandbox that could write nothing counted as held (holes 1.11)."""
    attack = next(one for one in TOGETHER if one.name == "link a program into the workspace")
    succeeded = dict.fromkeys(controls_of(attack), "ok")
    for policy, failed, end in (
        ("default", {}, Outcome.HELD),
        ("default", {"control of os.link(": "EPERM"}, Outcome.NOT_TRIED),
        ("default", {"control of os.link(": "EOPNOTSUPP"}, Outcome.NOT_APPLICABLE),
        ("strict", {"control of os.link(": "EPERM"}, Outcome.NOT_APPLICABLE),
        ("strict", {"control of os.link(": "EROFS"}, Outcome.NOT_TRIED),
    ):
        outcomes = {attack.name: "EACCES", **succeeded, **failed}
        (result,) = results_of((attack,), outcomes, load(policy))
        assert result.end is end, (policy, failed)
    (silent,) = results_of((attack,), succeeded, load("default"))
    assert silent.end is Outcome.NOT_TRIED


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
    codes = [*(one.code for one in ALL), *CONTROLS.values()]
    named = {word for code in codes for word in code.split("call(")[1:] if word[:1] in "'\""}
    assert {word[1:].partition(word[0])[0] for word in named} <= set(NUMBERS)
