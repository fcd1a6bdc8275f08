"""The log of a service: one line for one thing, with the ids of what it is about."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from sbx.telemetry import logs

log = logging.getLogger("sbx.test")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_ids_level_logger_and_time() -> None:
    page = io.StringIO()
    logs.configure(form="json", stream=page)
    with logs.bound(request="r1", sandbox="s1"), logs.bound(run="u1"):
        log.info("a run of %s began", "somebody")
    log.warning("without ids")
    first, second = map(json.loads, page.getvalue().splitlines())
    assert first["event"] == "a run of somebody began"
    assert (first["request"], first["sandbox"], first["run"]) == ("r1", "s1", "u1")
    assert (first["level"], first["logger"]) == ("info", "sbx.test")
    assert first["timestamp"].endswith("Z")
    assert "sandbox" not in second


async def test_ids_stay_with_the_task_that_bound_them() -> None:
    page = io.StringIO()
    logs.configure(form="json", stream=page)

    async def one(name: str) -> None:
        with logs.bound(sandbox=name):
            await asyncio.sleep(0)
            log.info(name)

    await asyncio.gather(one("a"), one("b"))
    for line in map(json.loads, page.getvalue().splitlines()):
        assert line["event"] == line["sandbox"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_hostile_text_forges_no_line_and_no_colour(form: str) -> None:
    page = io.StringIO()
    logs.configure(form=form, stream=page)
    log.info("%s", 'x\n{"event": "forged"}\x1b[31m\x9b\u2028')
    assert page.getvalue().count("\n") == 1
    assert not {"\x1b", "\x9b", "\u2028"} & set(page.getvalue())


def test_the_level_is_kept_and_chatter_of_libraries_left_out() -> None:
    page = io.StringIO()
    logs.configure(form="json", level="warning", stream=page)
    log.info("not told")
    logging.getLogger("httpx").info("not told")
    log.error("told")
    assert [json.loads(line)["event"] for line in page.getvalue().splitlines()] == ["told"]


def test_an_exception_is_told_in_the_same_line() -> None:
    page = io.StringIO()
    logs.configure(form="json", stream=page)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    line = json.loads(page.getvalue())
    assert "ValueError: why" in line["exception"]
