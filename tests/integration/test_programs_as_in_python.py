"""Each program of `programs/*.toml` has the same result by `python3 FILE` and by each surface.

The surfaces are all calls that take a file: the commands, the embedded sandbox and the client of a
service. The SDKs of other products have none: they run code, or `python3 FILE` as a command.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from command import in_process
from python_programs import (
    PROGRAMS,
    WORKSPACE,
    Outcome,
    PythonProgram,
    files_in,
    of_python,
    text_of_both_outputs,
    write,
)
from serving import Service

from sbx import AsyncSandbox, Runtime
from sbx.client import Client
from sbx.policy import load
from sbx.policy.narrow import narrow
from tests.tiers import rows

T = TypeVar("T")

_REASONS_MAX = 5
_OF_THE_SERVICE = (  # one of each kind; the full tier runs the others
    *("arguments", "exit_with_a_number", "uncaught_error", "segmentation_fault", "term_itself"),
    *("syntax_error", "open_file", "data_next_to_it", "file_of_main", "source_of_main"),
    *("binary_stdin", "large_output", "asyncio_run", "thread_after_main", "process_by_spawn"),
)
_WITHOUT_PROCESSES = [name for name in PROGRAMS if not PROGRAMS[name].processes]
_OF_THE_KERNEL = ("exit_with_a_number", "open_file", "large_output", "input_and_its_end")


@pytest.fixture(scope="module")
async def embedded() -> AsyncIterator[AsyncSandbox]:
    async with Runtime() as runtime, await runtime.create("default") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
async def strict() -> AsyncIterator[AsyncSandbox]:
    policy = narrow(load("default"), {"processes": False})
    async with Runtime() as runtime, await runtime.create(policy) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
async def remote(service: Service) -> AsyncIterator[Any]:
    async with Client(service.socket) as client, await client.create() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def sandbox_id(service: Service) -> str:
    return service.quick("create").stdout.strip()


async def _put(box: Any, files: dict[str, bytes]) -> None:
    """Let these files be the only ones of the workspace."""
    for entry in await box.files.list():
        if entry.name != "uploads":
            await box.files.delete(entry.path)
    for name, data in files.items():
        await box.files.write(name, data)


async def _files(box: Any) -> dict[str, bytes]:
    return {
        entry.path.removeprefix(f"{WORKSPACE}/"): await box.files.read_bytes(entry.path)
        for entry in await box.files.list(max_depth=5)
        if entry.kind == "file"
    }


async def _run_file(box: Any, program: PythonProgram, path: str) -> Outcome:
    await _put(box, program.all_files)
    run = await box.run_file(path, program.args, stdin=program.input)
    return program.outcome(WORKSPACE, run.exit_code, run.stdout, run.stderr, await _files(box))


def check(name: str, ended: Outcome, surface: str, *, absolute: bool = True) -> None:
    """Compare an outcome with that of python3. A permitted difference must be one."""
    program, expected = PROGRAMS[name], of_python(name, absolute=absolute)
    if program.differs and surface in (program.differs_on or [surface]):
        assert ended != expected, f"{name} no longer differs on {surface}"
    else:
        assert ended == expected


def test_few_differences_are_permitted() -> None:
    assert len(PROGRAMS) >= 200
    assert len({program.differs for program in PROGRAMS.values()} - {""}) <= _REASONS_MAX


@pytest.mark.parametrize("name", PROGRAMS)
async def test_embedded_file(embedded: AsyncSandbox, name: str) -> None:
    program = PROGRAMS[name]
    path = f"{WORKSPACE}/{program.file}"
    check(name, await _run_file(embedded, program, path), "embedded")


@pytest.mark.parametrize("name", rows(_WITHOUT_PROCESSES, _OF_THE_KERNEL))
async def test_file_under_a_policy_without_processes(strict: AsyncSandbox, name: str) -> None:
    program = PROGRAMS[name]
    path = f"{WORKSPACE}/{program.file}"
    check(name, await _run_file(strict, program, path), "strict")


@pytest.mark.parametrize("name", rows(PROGRAMS, _OF_THE_SERVICE))
async def test_file_of_a_client(remote: Any, name: str) -> None:
    program = PROGRAMS[name]
    ended = await _run_file(remote, program, f"./{program.file}")
    check(name, ended, "client", absolute=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_file_of_sbx_run(tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    directory, out = tmp_path / "program", tmp_path / "out"
    write(directory, program)
    words: list[str | Path] = ["--workspace", directory] if program.mounted else ["--out", out]
    if program.stdin is not None:
        words.append("-i")
    file = directory / program.file
    ended = in_process("run", *words, file, "--", *program.args, stdin=program.input or b"")
    files = files_in(directory if program.mounted else out)
    lines = ended.stderr.splitlines(keepends=True)
    err = "".join(line for line in lines if "saved: " not in line)
    check(name, program.outcome(WORKSPACE, ended.returncode, ended.stdout, err, files), "run")


@pytest.mark.parametrize("name", rows(PROGRAMS, _OF_THE_SERVICE))
def test_file_of_sbx_exec(service: Service, sandbox_id: str, tmp_path: Path, name: str) -> None:
    """The command brings the FILE; those next to it lie in the sandbox."""
    program = PROGRAMS[name]
    others = {path: data for path, data in program.all_files.items() if path != program.file}

    async def with_box(act: Callable[[Any], Awaitable[T]]) -> T:
        async with Client(service.socket) as client:
            return await act(client.sandbox(sandbox_id))

    asyncio.run(with_box(lambda box: _put(box, others)))
    write(tmp_path, program)
    words = ["exec", sandbox_id, *([] if program.stdin is None else ["-i"])]
    ended = service.quick(
        *words, tmp_path / program.file, "--", *program.args, stdin=program.input or b""
    )
    files = asyncio.run(with_box(_files))
    outputs = (ended.stdout, ended.stderr)
    check(name, program.outcome(WORKSPACE, ended.returncode, *outputs, files), "exec")


async def test_both_outputs_are_in_order(embedded: AsyncSandbox) -> None:
    code = PROGRAMS["order_of_both_streams"].code
    run = await embedded.run_file(code.encode())
    assert run.text == text_of_both_outputs(code)


async def test_refused_import_of_a_file_shows_no_function_of_sbx() -> None:
    async with Runtime() as runtime, await runtime.create("strict") as sandbox:
        run = await sandbox.run_file(b"import ctypes")
    assert run.stderr.startswith("ImportRefused: line 1: ")
    assert (run.exit_code, "/opt/sbx" in run.stderr) == (1, False)
