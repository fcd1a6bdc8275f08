"""Errors as readers see them: the traceback of a run, plain and coloured, and the hint of sbx."""

import traceback

from sbx.agent.tools.execution import describe_run
from sbx.errors import BadRequest
from sbx.protocol.events import error_from_json, error_to_json, run_from_json, run_to_json
from sbx.protocol.runs import Run, RunError, Status

COLOURED = "\x1b[0;31mZeroDivisionError\x1b[0m: division by zero\x1b]8;;http://x\x07"
PLAIN = "ZeroDivisionError: division by zero"
ERROR = RunError("ZeroDivisionError", "division by zero", COLOURED)


def test_a_traceback_is_plain_and_its_colours_are_in_another_field() -> None:
    assert (ERROR.traceback, ERROR.traceback_ansi) == (PLAIN, COLOURED)
    sent = error_to_json(ERROR)
    assert (sent["traceback"], sent["traceback_ansi"]) == (PLAIN, COLOURED)
    assert error_from_json(sent) == ERROR


def test_an_error_that_an_earlier_version_stored_is_read() -> None:
    old = {"name": "ZeroDivisionError", "value": "division by zero", "traceback": COLOURED}
    assert error_from_json(old) == ERROR


def test_a_model_reads_the_plain_traceback() -> None:
    run = Run("r", Status.ERROR, error=ERROR)
    assert run_from_json(run_to_json(run)) == run
    assert describe_run(run) == f"[error]\n{PLAIN}"


def test_python_shows_the_hint_below_the_message() -> None:
    shown = traceback.format_exception_only(BadRequest("no", hint="say yes"))
    assert shown == ["sbx.errors.BadRequest: no\n", "hint: say yes\n"]
    assert not hasattr(BadRequest("no"), "__notes__")
