"""One service and one `sbx serve` for all tests of a process, with their default settings.

    served    the service of live_app.py, in the loop of the tests;  client  its operator
    service   the process of serving.py, for commands and for clients in other threads

Both are without sandboxes when a module begins. What else a module leaves there (keys, tokens,
lines of the audit log) stays, so a test that compares those needs names of its own. A test that
configures, counts, drains or kills starts its own, by `live(...)` or `serving.service(...)`.
"""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import pytest
import serving
from live_app import Served, live
from places import short_directory


def _shared(fixture_name: str, config: pytest.Config) -> Literal["module", "session"]:
    return "module" if config.getoption("--private-runtimes") else "session"


@pytest.fixture(scope=_shared)
async def shared_application(lasting: Any) -> AsyncIterator[Served]:
    before = len(os.listdir("/proc/self/fd"))
    with short_directory() as directory:
        async with live(directory) as served:
            descriptors = len(os.listdir("/proc/self/fd")) - before
            with lasting.in_process(served.service.runtime, descriptors):
                yield served


@pytest.fixture(scope="module")
async def served(shared_application: Served) -> AsyncIterator[Served]:
    """The service of all tests, and its sandboxes deleted after the module."""
    yield shared_application
    await shared_application.empty()


@pytest.fixture(scope="module")
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client() as client:
        yield client


@pytest.fixture(scope=_shared)
def shared_service(lasting: Any) -> Iterator[serving.Service]:
    with serving.service() as running, lasting.service(running.process.pid):
        yield running


@pytest.fixture(scope="module")
def service(shared_service: serving.Service) -> Iterator[serving.Service]:
    """The service of all tests, and its sandboxes deleted after the module."""
    yield shared_service
    shared_service.empty()
