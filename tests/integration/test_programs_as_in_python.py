"""Each program of `programs/*.toml` has the same result by `python3 FILE` and by each surface."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from python_programs import PROGRAMS, WORKSPACE, Outcome, PythonProgram, of_python
from serving import Service

from sbx import AsyncSandbox, Runtime
from sbx.client import Client


@pytest.fixture(scope="module")
async def shared_box() -> AsyncIterator[AsyncSandbox]:
    async with Runtime() as runtime, await runtime.create("default") as sandbox:
        yield sandbox


async def _run_in(box: Any, program: PythonProgram, path: str) -> Outcome:
    """Run it in a sandbox that others have used."""
    for entry in await box.files.list():
        if entry.name != "uploads":
            await box.files.delete(entry.path)
    for name, data in program.all_files.items():
        await box.files.write(name, data)
    run = await box.run_file(path, program.args, stdin=program.input)
    files = {
        entry.path.removeprefix(f"{WORKSPACE}/"): await box.files.read_bytes(entry.path)
        for entry in await box.files.list(max_depth=5)
        if entry.kind == "file"
    }
    outputs = (run.text, "") if program.merged else (run.stdout, run.stderr)
    return program.outcome(WORKSPACE, run.exit_code, *outputs, files)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_embedded(shared_box: AsyncSandbox, name: str) -> None:
    program = PROGRAMS[name]
    ended = await _run_in(shared_box, program, f"{WORKSPACE}/{program.file}")
    assert ended == of_python(name, absolute=True)
