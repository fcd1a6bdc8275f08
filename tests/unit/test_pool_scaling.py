"""What to keep ready and what to replace: decided from plain values, compared as whole values."""

from hypothesis import given
from hypothesis import strategies as st

from sbx.kernels.pool.scaling import (
    QUIET_S,
    PoolDemand,
    ZygoteAge,
    delay,
    failures_after,
    least_used,
    missed,
    needs_replacing,
    settled,
    short_of_memory,
    taken,
)

GIB = 1 << 30


def test_first_who_comes_begins_the_use_of_a_pool() -> None:
    assert missed(PoolDemand(0, 0, 5.0), least=2, most=4) == PoolDemand(2, 0, 5.0)


def test_miss_of_a_pool_that_was_full_once_raises_its_target_up_to_the_most() -> None:
    demand = PoolDemand(1, 1, 5.0, filled=True)
    for expected in (2, 3, 4, 4):
        demand = missed(demand, least=1, most=4)
        assert demand == PoolDemand(expected, 0, 5.0, filled=True)


def test_miss_of_a_pool_that_is_still_filling_says_nothing_of_its_size() -> None:
    assert missed(PoolDemand(1, 0, 5.0), least=1, most=4) == PoolDemand(1, 0, 5.0)


def test_smallest_rest_of_a_quiet_time_is_what_nobody_wanted() -> None:
    demand = PoolDemand(4, 4, 0.0, filled=True)
    for left in (3, 1, 2):
        demand = taken(demand, left)
    assert settled(demand, 4, 1, QUIET_S) == PoolDemand(3, 3, QUIET_S, filled=True)


def test_target_stays_until_a_whole_quiet_time_is_over() -> None:
    demand = PoolDemand(4, 4, 0.0, filled=True)
    assert settled(demand, 4, 1, QUIET_S - 0.1) == demand


def test_unwanted_kernels_go_down_to_the_least_and_no_pool_grows_by_waiting() -> None:
    assert settled(PoolDemand(4, 4, 0.0), 4, 1, QUIET_S).target == 1
    assert settled(PoolDemand(0, 0, 0.0), 0, 1, QUIET_S).target == 0


SIZES = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
STEPS = st.lists(st.sampled_from(["take", "miss", "wait"]), max_size=40)


@given(SIZES, STEPS)
def test_target_is_never_more_than_the_most_and_never_negative(
    sizes: list[int], steps: list[str]
) -> None:
    least, most = sizes
    demand, now = PoolDemand(0, 0, 0.0, filled=True), 0.0
    for step in steps:
        match step:
            case "take" if demand.target:
                demand = taken(demand, demand.target - 1)
            case "wait":
                now += QUIET_S
                demand = settled(demand, demand.target, least, now)
            case _:
                demand = missed(demand, least, most)
        assert 0 <= demand.target <= most
        assert 0 <= demand.spare <= most


@given(SIZES, st.integers(0, 8))
def test_pool_that_nobody_comes_to_is_at_its_least_after_two_quiet_times(
    sizes: list[int], target: int
) -> None:
    least, most = sizes
    demand = PoolDemand(min(target, most), 0, 0.0, filled=True)
    for now in (QUIET_S, 2 * QUIET_S):
        demand = settled(demand, demand.target, least, now)
    assert demand.target <= least


def test_zygote_serves_until_forks_age_or_growth_say_otherwise() -> None:
    assert needs_replacing(ZygoteAge(age_s=3599, forks=999, grown=63 << 20)) == ""
    assert needs_replacing(ZygoteAge(0, 1000, 0)) == "it has forked 1000 kernels"
    assert needs_replacing(ZygoteAge(3600, 1, 0)) == "it is 3600 s old"
    assert needs_replacing(ZygoteAge(0, 1, 64 << 20)) == "it has grown by 64 MiB"


def test_delays_double_with_each_failure_up_to_five_minutes() -> None:
    assert [delay(n) for n in (0, 1, 2, 3, 9, 10, 10_000)] == [0, 1, 2, 4, 256, 300, 300]


def test_zygote_that_lived_long_is_replaced_at_once_and_one_that_did_not_is_waited_for() -> None:
    assert failures_after(3, lived_s=60.0) == 0
    assert failures_after(3, lived_s=59.0) == 4


def test_room_is_made_by_who_was_used_longest_ago_and_is_not_in_use() -> None:
    assert least_used([(31.0, False), (99.0, True), (32.0, False)]) == 2
    assert least_used([(33.0, True)]) is None
    assert least_used([]) is None


def test_what_was_used_just_now_makes_no_room() -> None:
    assert least_used([(29.9, False), (0.0, False)]) is None
    assert least_used([(29.9, False), (30.0, False)]) == 1


def test_memory_is_short_below_a_twentieth_and_enough_again_above_a_tenth() -> None:
    total = 100 * GIB
    assert short_of_memory(4 * GIB, total, 0.0, was_short=False)
    assert not short_of_memory(6 * GIB, total, 0.0, was_short=False)
    assert short_of_memory(6 * GIB, total, 0.0, was_short=True)
    assert not short_of_memory(11 * GIB, total, 0.0, was_short=True)


def test_programs_that_wait_for_memory_are_a_sign_whatever_is_available() -> None:
    assert short_of_memory(90 * GIB, 100 * GIB, 10.1, was_short=False)
