"""From a rule to a decision, and the limits of the instruction set."""

from errno import EPERM

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbx.isolation.seccomp import compiler
from sbx.isolation.seccomp.rules import AtLeast, HasAny, HasNone, In, NotIn, Refuse, Test
from sbx.linux import bpf
from tests.tiers import examples

NATIVE = compiler.AUDIT_ARCH["x86_64"]
CACHESTAT, MSEAL = 451, 462  # numbers that need no libseccomp

words = st.integers(0, 0xFFFFFFFF)
tests = st.one_of(
    st.builds(HasAny, st.integers(0, 5), words),
    st.builds(HasNone, st.integers(0, 5), words),
    st.builds(AtLeast, st.integers(0, 5), words),
    st.builds(In, st.integers(0, 5), st.tuples(words, words, words), words),
    st.builds(NotIn, st.integers(0, 5), st.tuples(words, words, words), words),
)


def holds(test: Test, arguments: list[int]) -> bool:
    value = arguments[test.argument] & 0xFFFFFFFF
    match test:
        case HasAny(_, bits):
            return value & bits != 0
        case HasNone(_, bits):
            return value & bits == 0
        case AtLeast(_, least):
            return value >= least
        case In(_, values, mask):
            return value & mask in values
        case NotIn(_, values, mask):
            return value & mask not in values


@settings(max_examples=examples(300))
@given(
    rules=st.lists(st.lists(tests, max_size=3), max_size=4),
    seen=st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6),
)
def test_first_rule_whose_tests_all_hold_answers(rules: list[list[Test]], seen: list[int]) -> None:
    table = [Refuse("cachestat", 1 + n, "", tuple(rule)) for n, rule in enumerate(rules)]
    fitting = [rule.errno for rule in table if all(holds(test, seen) for test in rule.when)]
    program = compiler.compile_filter(table, "x86_64")
    action = bpf.decide(program, architecture=NATIVE, number=CACHESTAT, arguments=seen)
    assert action == (bpf.errno_action(fitting[0]) if fitting else bpf.ALLOW)


def test_values_that_are_compared_are_met_exactly() -> None:
    rule = Refuse("cachestat", EPERM, "", (In(0, (3, 5)), NotIn(1, (7,), 0xF), AtLeast(2, 9)))
    program = compiler.compile_filter([rule], "x86_64")

    def refused(*arguments: int) -> bool:
        action = bpf.decide(program, architecture=NATIVE, number=CACHESTAT, arguments=arguments)
        return action == bpf.errno_action(EPERM)

    assert refused(3, 0, 9)
    assert refused(5 | 1 << 32, 8, 2**32 - 1)
    assert not refused(4, 0, 9)
    assert not refused(3, 0x17, 9)
    assert not refused(3, 0, 8)


def test_jump_farther_than_a_byte_can_say_arrives() -> None:
    filler = [bpf.answer(n) for n in range(600)]
    program = [bpf.load_number(), *bpf.jump_if("==", 1, true=599, false=300), *filler]
    assert bpf.decide(program, architecture=0, number=1) == 599
    assert bpf.decide(program, architecture=0, number=2) == 300


def test_unpack_gives_back_what_was_packed() -> None:
    program = [bpf.load_argument(5), bpf.mask(0xF), *bpf.jump_if("&", 8, true=1), bpf.answer(1)]
    assert bpf.unpack(bpf.pack(program)) == program


def test_misspelled_call_is_an_error() -> None:
    pytest.importorskip("pyseccomp", reason="the numbers come from libseccomp")
    with pytest.raises(ValueError, match="'ptrase'"):
        compiler.number_of("ptrase", "x86_64")


def test_call_that_one_architecture_lacks_is_left_out_there() -> None:
    pytest.importorskip("pyseccomp", reason="the numbers come from libseccomp")
    assert compiler.number_of("fork", "x86_64") == 57
    assert compiler.number_of("fork", "aarch64") is None
