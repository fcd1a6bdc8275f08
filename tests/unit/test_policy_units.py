"""Units: what is read is what was meant, and a wrong word is answered with the right one."""

import pytest

from sbx.policy.units import (
    GIB,
    KIB,
    MIB,
    format_cpu,
    format_duration,
    format_size,
    parse_cpu,
    parse_duration,
    parse_size,
)

HUGE = pytest.param(1 << 20000, id="more digits than python prints")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MIB),
        ("64 KiB", 64 * KIB),
        ("1.5GiB", 3 * GIB // 2),
        ("2TiB", 2048 * GIB),
        ("100B", 100),
        (4096, 4096),
    ],
)
def test_size_is_read_in_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("512MB", "512MiB"),
        ("512M", "512MiB"),
        ("1 gb", "1GiB"),
        ("1gib", "1GiB"),
        ("64k", "64KiB"),
        ("100", "100B"),
    ],
)
def test_wrong_unit_of_size_names_the_right_one(text: str, right: str) -> None:
    with pytest.raises(ValueError, match=f'did you mean "{right}"'):
        parse_size(text)


@pytest.mark.parametrize(
    "value", [True, -1, "-1MiB", 1.5, None, "0.3B", "many", "1e3MiB", 1 << 63, HUGE, "٣MiB"]
)
def test_size_that_is_no_whole_number_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(value)


def test_size_is_written_in_the_largest_unit_that_fits_exactly() -> None:
    sizes = [0, 1000, 1536 * KIB, GIB, 2048 * GIB]
    assert [format_size(size) for size in sizes] == ["0B", "1000B", "1536KiB", "1GiB", "2TiB"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("500ms", 0.5), ("5min", 300), ("2h", 7200), ("1d", 86400), (1.5, 1.5), (3, 3)],
)
def test_duration_is_read_in_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "right"),
    [("5m", "5min"), ("5 minutes", "5min"), ("9sec", "9s"), ("2hrs", "2h"), ("3msec", "3ms")],
)
def test_wrong_unit_of_duration_names_the_right_one(text: str, right: str) -> None:
    with pytest.raises(ValueError, match=f'did you mean "{right}"'):
        parse_duration(text)


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 1e300, -1, True, "0.5ms", HUGE, "4000d", "1h30min"]
)
def test_duration_without_end_or_sense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"time|between|finer"):
        parse_duration(value)


def test_duration_is_written_as_people_write_it() -> None:
    seconds = [0, 0.5, 60, 90, 300, 7200, 1.25]
    words = ["0s", "500ms", "60s", "90s", "5min", "2h", "1250ms"]
    assert [format_duration(one) for one in seconds] == words


@pytest.mark.parametrize(
    ("text", "cpus"), [("100%", 1.0), ("150 %", 1.5), ("1%", 0.01), (2.0, 2.0), ("12.5%", 0.125)]
)
def test_cpu_is_read_in_cpus(text: object, cpus: float) -> None:
    assert parse_cpu(text) == cpus
    assert parse_cpu(format_cpu(cpus)) == cpus


@pytest.mark.parametrize("value", [50, "50", "1.5", True, "0.5%", "1000000%", float("nan"), "50s"])
def test_cpu_that_could_be_misread_is_refused(value: object) -> None:
    """50 might be meant as 50% or as 50 CPUs: the second reading would be a hole."""
    with pytest.raises(ValueError, match="%"):
        parse_cpu(value)
