"""Log lines of work that outlives its request name neither the request nor the run."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from chain import kill, nest, tidy, until
from test_hostile_kernel import SOCKET

from sbx import Runtime
from sbx.telemetry import logs
from sbx.telemetry.background import background_context

pytestmark = pytest.mark.needs("namespaces")
IDLE = 2


@pytest.fixture
def page() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    page = io.StringIO()
    logs.configure(form="json", stream=page)
    yield page
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(page: io.StringIO, event: str) -> list[dict[str, str]]:
    every = [json.loads(line) for line in page.getvalue().splitlines()]
    return [line for line in every if line["event"].startswith(event)]


async def test_a_lasting_context_keeps_the_sandbox_and_drops_the_call(page: io.StringIO) -> None:
    async def work() -> None:
        logging.getLogger("sbx.test").info("it works")

    with logs.bound(request="r1", sandbox="s1", conversation="c1", run="u1"):
        await asyncio.create_task(work(), context=background_context())
        logging.getLogger("sbx.test").info("the call works")
    (line,) = lines(page, "it works")
    assert (line["sandbox"], line["conversation"]) == ("s1", "c1")
    assert "request" not in line
    assert "run" not in line
    assert lines(page, "the call works")[0]["request"] == "r1"


@pytest.mark.full_tier
async def test_lines_of_the_pool_name_no_request(own_runtime: Runtime, page: io.StringIO) -> None:
    with logs.bound(request="r1", sandbox="s1", conversation="c1", run="u1"):
        await own_runtime.warm(count=IDLE)
        async with await own_runtime.create() as box:
            await box.run("1")
    starter = own_runtime._starter
    assert starter is not None
    # A kernel that ends while it is prewarmed is no idle one.
    await until(lambda: all(pool.settled for pool in starter._pools.values()))
    await tidy(own_runtime)
    itself = nest()
    for jail in itself.idle():
        kill(jail.supervisor)
    await until(lambda: lines(page, "an idle kernel ended"))
    await until(lambda: own_runtime.idle == IDLE)  # so that no fork notices the end of the zygote
    kill(itself.zygote)
    await until(lambda: lines(page, "a zygote ended"))
    ids = {"request", "sandbox", "conversation", "run"}
    for line in map(json.loads, page.getvalue().splitlines()):
        assert not ids & line.keys(), line


async def test_a_kernel_that_is_cut_off_later_names_no_request(
    runtime: Runtime, page: io.StringIO
) -> None:
    later = "threading.Timer(0.5, sock.sendall, [b'x' * 4096]).start()"
    async with await runtime.create(narrower={"pool": {"max_idle": 0}}) as box:
        with logs.bound(request="r1", sandbox="s1"):
            run = await box.run("import os, socket, threading" + SOCKET + later)
        assert run.ok, run.error
        await until(lambda: lines(page, "a kernel was cut off"))
    (line,) = lines(page, "a kernel was cut off")
    assert line["sandbox"] == "s1"
    assert "request" not in line
