"""Code inside makes the directory so large that the walk for links stops before its end."""

from pathlib import Path

import pytest
from planting import Place, make_place, sandbox

from sbx import Runtime
from sbx.runtime.sandbox import AsyncSandbox
from sbx.workspace import host_executable_links

FILL = "mkdir -p deep; for i in $(seq 800); do echo > f$i; echo > deep/f$i; done"
PLANT = """
mkdir -p {directory}
printf '#!/bin/sh\\ntouch {marker}\\n' > {directory}/pre-commit; chmod +x {directory}/pre-commit
"""


@pytest.fixture
def place(
    own_temporary_directory: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Place:
    monkeypatch.setattr(host_executable_links, "ENTRIES_MAX", 200)
    return make_place(own_temporary_directory / f"large-{abs(hash(request.node.name))}")


def configure(place: Place, where: str) -> None:
    place.user("git", "init", "-q", where)
    place.user("git", "-C", where, "config", "core.hooksPath", "tools")


async def plant(box: AsyncSandbox, place: Place, where: str) -> str:
    script = PLANT.replace("{directory}", f"{where}/tools")
    return (await box.shell(script.replace("{marker}", str(place.marker)))).text


def commit(place: Place, where: str) -> None:
    place.user("git", "-C", where, "commit", "-q", "--allow-empty", "-m", "x")


@pytest.mark.parametrize("mode", ["protect", "allow"])
@pytest.mark.parametrize("where", [".", "sub"])
async def test_files_of_an_earlier_kernel_do_not_hide_a_repository(
    runtime: Runtime, place: Place, where: str, mode: str
) -> None:
    configure(place, where)
    async with sandbox(runtime, place, mode) as box:
        assert (await box.shell(FILL)).ok
        await box.run("import os; os._exit(1)")
        output = await plant(box, place, where)
        commit(place, where)
    assert place.executed is (mode == "allow"), output


async def test_files_of_an_earlier_session_do_not_hide_a_repository(
    runtime: Runtime, place: Place
) -> None:
    configure(place, ".")
    async with sandbox(runtime, place) as box:
        assert (await box.shell(FILL)).ok
    async with sandbox(runtime, place) as box:
        output = await plant(box, place, ".")
        receipt = box.receipt
    commit(place, ".")
    assert not place.executed, output
    assert "entries only" in str(receipt)
