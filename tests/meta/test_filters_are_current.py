"""The shipped programs are those of the table; `scripts/filters` makes them so."""

import os

import pytest

from sbx.isolation.seccomp import MACHINES, NAMES, file_of


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", NAMES)
def test_file_is_what_the_table_compiles_to(name: str, machine: str) -> None:
    try:
        import pyseccomp  # noqa: F401
    except (ImportError, RuntimeError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"cannot compile: {error}")
    from sbx.isolation.seccomp.compiler import listing

    assert file_of(name, machine).read_text() == listing(name, machine), "run scripts/filters"


def test_no_file_lies_there_that_nothing_loads() -> None:
    wanted = {file_of(name, machine) for name in NAMES for machine in MACHINES}
    assert set(file_of("x", "y").parent.glob("*.bpf")) == wanted
