"""The charge for memory and files whose size Linux hides."""

from sbx.kernels.memory_watcher import HiddenGrowth


def test_growth_of_the_host_is_charged_after_two_looks_with_a_hiding_place() -> None:
    hidden = HiddenGrowth()
    assert hidden.charge(0, 1000, 100) == 0
    assert hidden.charge(1, 1500, 200) == 0  # it may be on its way for a moment
    assert hidden.charge(1, 1500, 200) == 400
    assert hidden.charge(0, 1500, 200) == 0
    assert hidden.charge(1, 1500, 200) == hidden.charge(1, 1500, 200) == 0


def test_growth_before_the_first_look_and_of_measured_files_is_not_charged() -> None:
    hidden = HiddenGrowth()
    assert hidden.charge(1, 5000, 0) == 0
    assert hidden.charge(1, 5600, 600) == 0
    assert hidden.possible(5700, 600) == 100


def test_growth_while_the_jail_did_nothing_is_left_out() -> None:
    hidden = HiddenGrowth()
    hidden.charge(0, 0, 0)
    hidden.charge(1, 10, 0)
    hidden.skip(1_000)
    assert hidden.charge(1, 1_030, 0) == 30
