"""Sandboxes to attack, kept for a module; `attacking` has what the tests do with them.

An attack leaves the shared `box` usable, or asks for one of its own by `fresh`. Whoever asks for
one of these is run with kernels from the pool, forked on order, or started cold: with all three by
--full, else with one by turns. Each kernel is seen to have come that way; `one_path` is for tests
to which it can make no difference. `attacked_policy` is, in the same manner, default or strict.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from attacking import (
    NAMESPACES,
    ONLY_COLD,
    WALLS,
    Fresh,
    Without,
    altered,
    attacked_paths,
    attacked_policies,
    by,
)

from sbx import Runtime, Settings
from sbx.runtime.sandbox import AsyncSandbox


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attacked_policy" in metafunc.fixturenames:
        policies = attacked_policies(metafunc.config)
        metafunc.parametrize("attacked_policy", policies, scope="module")
    marks = metafunc.definition.iter_markers("parametrize")
    if "started_by" in metafunc.fixturenames and all(
        mark.args[0] != "started_by" for mark in marks
    ):
        paths = attacked_paths(metafunc.config)
        metafunc.parametrize("started_by", paths, indirect=True, scope="module")


@pytest.fixture(scope="module")
def started_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """By which path every kernel of the module starts now."""
    with by(request.param):
        yield request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(started_by: str) -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare_runtime(started_by: str) -> AsyncIterator[Runtime]:
    """A runtime that uses no cgroups, as an unprivileged user without delegation has it."""
    async with Runtime(Settings(cgroups=False)) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    """The sandbox that attacks of a module share. Its kernel may be replaced, its walls not."""
    async with await runtime.create() as box:
        yield box


@pytest_asyncio.fixture(scope="module", loop_scope="module")
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


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(runtime: Runtime) -> AsyncIterator[Fresh]:
    """`await fresh(policy, …)`: a sandbox for this test alone; takes what Runtime.create takes."""
    made: list[AsyncSandbox] = []

    async def fresh(*words: Any, on: Runtime | None = None, **named: Any) -> AsyncSandbox:
        made.append(await (on or runtime).create(*words, **named))
        return made[-1]

    yield fresh
    for one in made:
        await one.close()
