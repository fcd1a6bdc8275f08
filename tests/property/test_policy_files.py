"""Whatever a policy file or a unit holds, the answer is a value or an error of ours."""

import contextlib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbx.policy import check
from sbx.policy.imports import refusals
from sbx.policy.tables import Imports
from sbx.policy.units import (
    format_cpu,
    format_duration,
    format_size,
    parse_cpu,
    parse_duration,
    parse_size,
)

ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TOML = st.lists(
    st.sampled_from(
        ["schema = 1\n", "[limits]\n", "[[expect]]\n", "tasks_max = ", "9\n", '"x"\n', "[", "]",
         "extends = ", '"default"\n', "run = ", "{a = 1}\n", "[env]\n", "A = ", "'''", "inf\n",
         "\n", "[filesystem]\n", "[[filesystem.mount]]\n", "read = ", "\x00", "1979-05-27\n"]
    )
    | st.text(max_size=5)
).map("".join)  # fmt: skip


@given(st.integers(0, (1 << 63) - 1))
def test_size_survives_being_written_and_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**11))
def test_duration_survives_being_written_and_read(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(100, 10**7))
def test_cpu_survives_being_written_and_read(hundredths: int) -> None:
    cpus = parse_cpu(f"{hundredths // 100}.{hundredths % 100:02}%")
    assert parse_cpu(format_cpu(cpus)) == cpus


@given(ANYTHING)
def test_no_value_makes_a_unit_raise_anything_but_value_error(value: object) -> None:
    for parse in (parse_size, parse_duration, parse_cpu):
        with contextlib.suppress(ValueError):
            parse(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TOML | st.binary())
def test_no_file_makes_check_raise(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "lab.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for problem in check(path):
        assert str(problem).isprintable()


@given(st.text())
def test_no_cell_makes_the_import_rules_raise_anything_but_a_syntax_error(code: str) -> None:
    with contextlib.suppress(SyntaxError):
        refusals(code, Imports(allow=("os",)))
