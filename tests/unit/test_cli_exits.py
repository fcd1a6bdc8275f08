"""Every end has its exit code, and the help names them all."""

import pytest

from sbx import errors
from sbx.cli.exits import EPILOG, Exit, for_error, for_run
from sbx.protocol.runs import Run, RunError, Status


def subclasses(kind: type[errors.SbxError]) -> list[type[errors.SbxError]]:
    below = [one for one in kind.__subclasses__() if one.__module__ == "sbx.errors"]
    return [*below, *(deep for one in below for deep in subclasses(one))]


@pytest.mark.parametrize("kind", subclasses(errors.SbxError))
def test_only_what_is_broken_is_called_a_bug(kind: type[errors.SbxError]) -> None:
    assert (for_error(kind("x")) == Exit.BROKEN) == (kind is errors.Broken)


def test_a_wrong_call_and_a_refusal_differ() -> None:
    assert for_error(errors.PolicyError("x")) == for_error(errors.NotFound("x")) == 2
    assert for_error(errors.CannotEnforce("x")) == for_error(errors.Denied("x")) == 3


@pytest.mark.parametrize("status", Status)
def test_only_a_run_that_went_well_ends_with_0(status: Status) -> None:
    assert (for_run(Run("r", status)) == 0) == (status is Status.OK)


def test_the_help_names_every_code() -> None:
    named = {line.split()[0] for line in EPILOG.splitlines() if line.startswith("  ")}
    assert named == {str(int(code)) for code in Exit}


@pytest.mark.parametrize("code", [0, 1, 3, 143, 255])
def test_exit_code_of_the_guest_is_that_of_the_command(code: int) -> None:
    """The text of SystemExit does not count: `sys.exit("5")` has the code 1."""
    error = RunError("SystemExit", "5", "")
    assert for_run(Run("r", Status.ERROR, error=error, exit_code=code)) == code
