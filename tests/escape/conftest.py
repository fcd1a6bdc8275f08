"""Sandboxes to attack, kept for a module; `attacking` has what the tests do with them.

An attack leaves the shared `box` usable, or asks for one of its own by `fresh`.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from attacking import NAMESPACES, WALLS, Fresh, Without, altered

from sbx import Runtime, Settings
from sbx.runtime.sandbox import AsyncSandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare_runtime() -> AsyncIterator[Runtime]:
    """A runtime that uses no cgroups, as an unprivileged user without delegation has it."""
    async with Runtime(Settings(cgroups=False)) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    """The sandbox that attacks of a module share. Its kernel may be replaced, its walls not."""
    async with await runtime.create() as box:
        yield box


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def without(runtime: Runtime) -> Without:
    """`await without("landlock", …)`: a running sandbox without these walls, one for the module."""
    made: dict[tuple[str, ...], AsyncSandbox] = {}

    async def without(*walls: str) -> AsyncSandbox:
        assert set(walls) <= {*WALLS, *NAMESPACES}
        key = tuple(sorted(walls))
        if key not in made:
            made[key] = await runtime.create()
        with altered(*walls):
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
