"""What a cell shows reaches the caller of every surface.

Each surface runs the same cells; its text is all that its caller can read of a run.
"""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from bay_calls import made
from both_sdks import Both
from command import sbx
from e2b_face import Face
from sdk_service import SdkService
from sessions_calls import new_session
from sessions_calls import run as run_in_session
from test_agent_tools import use
from test_mcp import connected, said
from test_opensandbox import Face as OpenFace

from sbx import AsyncSandbox, Run, Sandbox, close
from sbx.client import Client
from tests.tiers import rows

CELL = """
class Bad:
    def _repr_html_(self): raise ValueError('no html')
    def __repr__(self): return 'Bad'
display(Bad())
print('after')
len?
%pinfo str
get_ipython().set_next_input('again = 1')
get_ipython().ask_exit()
"""
SHOWN = (
    *("ValueError", "no html", "after"),  # an error in display() leaves the run ok, as in Jupyter
    *("number of items in a container", "Create a new string object"),
    *("again = 1", "ask_exit: only a Jupyter front end"),
)


class Surfaces:
    """The text of a cell, by each surface."""

    def __init__(
        self, box: AsyncSandbox, sdk: SdkService, client: httpx.AsyncClient, directory: Path
    ) -> None:
        self._box, self._sdk, self._client, self._directory = box, sdk, client, directory

    async def embedded(self, code: str) -> str:
        return _read(await self._box.run(code))

    async def client(self, code: str) -> str:
        async with Client(self._sdk.served.socket) as client, await client.create() as box:
            return _read(await box.run(code))

    async def command(self, code: str) -> str:
        cells = [{"cell_type": "code", "source": code}]
        notebook = self._directory / "n.ipynb"
        notebook.write_text(json.dumps({"cells": cells, "nbformat": 4}))
        done = await asyncio.to_thread(sbx, "run", notebook)
        assert done.returncode == 0
        return done.stdout + done.stderr

    async def sessions(self, code: str) -> str:
        reply = await run_in_session(self._client, await new_session(self._client), code)
        run = reply.json()
        return f"{run['stdout']}{run['error']}"

    async def bay(self, code: str) -> str:
        at = f"/v1/sandboxes/{(await made(self._client))['id']}/python/exec"
        run = (await self._client.post(at, json={"code": code})).json()
        return f"{run['output']}{run['error']}"

    async def e2b(self, code: str) -> str:
        box = await Face("async", self._sdk, await self._sdk.key("every-e2b")).create()
        run = await box.run_code(code)
        return f"{run.logs}{run.error}"

    async def opensandbox(self, code: str) -> str:
        face = OpenFace("async", self._sdk.host, await self._sdk.key("every-open"))
        try:
            box = await face.create()
            codes = Both(await face.interpreters.create(box.inner)).codes
            run = await codes.run(code)
            return f"{run.logs}{run.error}"
        finally:
            await face.close()

    async def tools(self, code: str) -> str:
        return (await use(self._box.conversation("default"), "run_code", code=code)).text

    async def mcp(self, code: str) -> str:
        async with connected() as client:
            return said(await client.call_tool("run_code", {"code": code}))

    async def smolagents(self, code: str) -> str:
        from sbx.adapters.smolagents import SbxExecutor

        def execute() -> str:
            with Sandbox() as box:
                return str(SbxExecutor(box).run_code_raise_errors(code).logs)

        try:
            return await asyncio.to_thread(execute)
        finally:
            close()


def _read(run: Run) -> str:
    return run.text + (run.error.traceback if run.error is not None else "")


NAMES = [name for name in vars(Surfaces) if not name.startswith("_")]


@pytest.fixture
def surfaces(
    box: AsyncSandbox, sdk: SdkService, client: httpx.AsyncClient, tmp_path: Path
) -> Surfaces:
    return Surfaces(box, sdk, client, tmp_path)


@pytest.mark.parametrize("name", rows(NAMES, ci_tier=[n for n in NAMES if n != "smolagents"]))
async def test_each_surface_shows_errors_and_pages(surfaces: Surfaces, name: str) -> None:
    """An ok run with an error, and help, were lost on some."""
    text = await getattr(surfaces, name)(CELL)
    assert [part for part in SHOWN if part not in text] == []


async def test_a_run_is_ok_after_an_error_in_display(box: AsyncSandbox) -> None:
    shown = await box.run(CELL)
    assert shown.ok
    assert shown.error is not None
    assert shown.error.name == "ValueError"
    assert not (await box.run("Bad()")).ok
