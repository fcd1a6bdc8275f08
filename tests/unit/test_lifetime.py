"""When the watch of an embedded sandbox looks again, and which limits are refused."""

import math

import pytest

from sbx.errors import BadRequest
from sbx.runtime.lifetime import Lifetime


@pytest.mark.parametrize(
    ("ttl_s", "idle_s", "unused_s", "expected"),
    [
        (100.0, math.inf, 30.0, 70.0),
        (100.0, 20.0, 5.0, 15.0),
        (100.0, 20.0, 20.0, 80.0),  # the kernels have ended
        (math.inf, 20.0, 21.0, 5.0),
        (math.inf, 0.1, 1.0, 0.05),
        (10.0, math.inf, 9.999, 0.05),
    ],
)
def test_the_next_look_is_at_the_next_limit(
    ttl_s: float, idle_s: float, unused_s: float, expected: float
) -> None:
    assert Lifetime(ttl_s, idle_s).next_look_s(unused_s) == pytest.approx(expected)


@pytest.mark.parametrize("limits", [{"ttl_s": 0}, {"idle_s": -1.0}, {"ttl_s": math.nan}])
def test_a_limit_is_a_number_above_0(limits: dict[str, float]) -> None:
    with pytest.raises(BadRequest) as raised:
        Lifetime(**limits)
    assert raised.value.code == "invalid_lifetime"


def test_no_limit_is_no_watch() -> None:
    assert (Lifetime().limited, Lifetime(idle_s=1).limited) == (False, True)
