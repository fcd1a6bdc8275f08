"""Sandboxes to attack, kept for a module; `attacking` has what the tests do with them.

An attack leaves the shared `box` usable, or asks for one of its own by `fresh`. A test that uses
one of these fixtures attacks kernels from the pool. The full tier runs it with forked and cold
kernels as well. The fixture checks that each kernel came by its path. `one_path` marks a test to
which the path makes no difference.
A test that uses `attacked_policy` runs in each cell (path, policy) of `attacked_cells`.
"""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from attacking import (
    NAMESPACES,
    ONLY_COLD,
    WALLS,
    Fresh,
    Without,
    altered,
    attacked_cells,
    attacked_paths,
    by,
)

from sbx import Runtime, Settings
from sbx.runtime.sandbox import AsyncSandbox

if TYPE_CHECKING:
    from tests.conftest import SharedRuntime


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config, definition = metafunc.config, metafunc.definition
    if "attacked_policy" in metafunc.fixturenames:
        metafunc.parametrize(
            ("started_by", "attacked_policy"),
            attacked_cells(config),
            indirect=["started_by"],
            scope="module",
        )
    elif "started_by" in metafunc.fixturenames and all(
        mark.args[0] != "started_by" for mark in definition.iter_markers("parametrize")
    ):
        paths = attacked_paths(config)
        metafunc.parametrize("started_by", paths, indirect=True, scope="module")


@pytest.fixture(scope="module")
def started_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """By which path every kernel of the module starts now."""
    with by(request.param):
        yield request.param


@pytest_asyncio.fixture(scope="module")
async def runtime(
    started_by: str, shared_runtimes: "SharedRuntime", pytestconfig: pytest.Config
) -> AsyncIterator[Runtime]:
    """The runtime of this process of the run; with --private-runtimes one for each module."""
    if pytestconfig.getoption("--private-runtimes"):
        async with Runtime() as runtime:
            yield runtime
        return
    runtime = await shared_runtimes.started()
    yield runtime
    await shared_runtimes.end_sandboxes()


@pytest_asyncio.fixture(scope="module")
async def bare_runtime(started_by: str) -> AsyncIterator[Runtime]:
    """A runtime that uses no cgroups, as an unprivileged user without delegation has it."""
    async with Runtime(Settings(cgroups=False)) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module")
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    """The sandbox that attacks of a module share. Its kernel may be replaced, its walls not."""
    async with await runtime.create() as box:
        yield box


@pytest_asyncio.fixture(scope="module")
async def without(runtime: Runtime, started_by: str) -> Without:
    """`await without("landlock", …)`: a running sandbox without these walls, one for the module.

    By the module's path, save where only the cold one can lack a wall.
    """
    made: dict[tuple[str, ...], AsyncSandbox] = {}

    async def without(*walls: str) -> AsyncSandbox:
        assert set(walls) <= {*WALLS, *NAMESPACES}
        key = tuple(sorted(walls))
        if key not in made:
            made[key] = await runtime.create()
        with altered(*walls), by("cold" if ONLY_COLD & set(walls) else started_by):
            await made[key].start()
        return made[key]

    return without


@pytest_asyncio.fixture
async def fresh(runtime: Runtime) -> AsyncIterator[Fresh]:
    """`await fresh(policy, …)`: a sandbox for this test alone; takes what Runtime.create takes."""
    made: list[AsyncSandbox] = []

    async def fresh(*words: Any, on: Runtime | None = None, **named: Any) -> AsyncSandbox:
        made.append(await (on or runtime).create(*words, **named))
        return made[-1]

    yield fresh
    for one in made:
        await one.close()
