"""The provisioner under jupyter_client's own managers: blocking and not, tcp and ipc; what stays
over restarts, shutdowns and the end of whoever held it."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_core.utils import ensure_event_loop, run_sync
from jupyter_specs import DEFAULT, NOTEBOOK, jupyter_kernels, person_s  # noqa: F401

from sbx.errors import Denied, NotFound, SbxError
from sbx.jupyter.notebook_sandbox import seats_of
from sbx.runtime import shared

PATIENCE_S = 60.0


@contextmanager
def managed(kernel: str = DEFAULT, *, start: Any = None, **traits: Any) -> Iterator[KernelManager]:
    manager = KernelManager(kernel_name=kernel, **traits)
    manager.start_kernel(**(start or {}))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


@contextmanager
def client_of(manager: KernelManager) -> Iterator[BlockingKernelClient]:
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
        yield client
    finally:
        client.stop_channels()


@contextmanager
def other_thread() -> Iterator[ThreadPoolExecutor]:
    """With an event loop of its own, which jupyter_core makes and leaves open."""
    with ThreadPoolExecutor(1) as other:
        yield other
        other.submit(lambda: ensure_event_loop().close()).result()


def said(client: BlockingKernelClient, code: str) -> str:
    """What the cell gives back, or how it failed."""
    shown: list[Mapping[str, Any]] = []
    reported = client.execute_interactive(code, timeout=PATIENCE_S, output_hook=shown.append)
    reply = reported["content"]
    if reply["status"] != "ok":
        return f"{reply['ename']}: {reply['evalue']}"
    results = [one["content"] for one in shown if one["msg_type"] == "execute_result"]
    return str(results[0]["data"]["text/plain"]) if results else ""


def run(manager: KernelManager, code: str) -> str:
    with client_of(manager) as client:
        return said(client, code)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def boxes() -> set[str]:
    return {box.id for box in list(shared.shared_runtime().runtime._sandboxes)}


# -- a kernel's life -------------------------------------------------------------------------------


@pytest.mark.full_tier
def test_a_restart_keeps_ports_connections_and_files() -> None:
    with managed() as manager, client_of(manager) as client:
        said(client, "open('notes', 'w').write('kept'); x = 1")
        ports = manager.ports
        manager.restart_kernel()
        client.wait_for_ready(timeout=PATIENCE_S)  # the same client, never connected anew
        assert manager.ports == ports
        assert said(client, "open('notes').read(), 'x' in globals()") == "('kept', False)"
        manager.restart_kernel(newports=True)
        assert not set(manager.ports) & set(ports)
        assert run(manager, "open('notes').read()") == "'kept'"


def test_a_shutdown_keeps_files_for_the_manager_s_next_kernel() -> None:
    with zmq.Context() as context, managed(context=context) as manager:  # one of its own it ends
        run(manager, "open('notes', 'w').write('kept')")
        connection_file = Path(manager.connection_file)
        manager.shutdown_kernel()
        assert not manager.is_alive()
        assert not connection_file.exists()
        manager.start_kernel()
        assert run(manager, "open('notes').read()") == "'kept'"


def test_threads_with_loops_of_their_own_may_ask_by_turns() -> None:
    with managed() as manager, other_thread() as other:
        assert other.submit(manager.is_alive).result()
        other.submit(manager.restart_kernel).result()
        assert run(manager, "1 + 1") == "2"
        other.submit(manager.shutdown_kernel).result()
        assert not manager.is_alive()


@pytest.mark.full_tier
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_an_async_manager_over(transport: str, jupyter_kernels: Path) -> None:  # noqa: F811
    manager = AsyncKernelManager(kernel_name=DEFAULT, transport=transport)
    await manager.start_kernel()
    try:
        assert await answer(manager, "open('notes', 'w').write('kept')") == "4"
        await manager.restart_kernel()
        assert await answer(manager, "open('notes').read()") == "'kept'"
        if transport == "ipc":  # not in the current directory, which may be a workspace
            assert Path(manager.ip).parent == jupyter_kernels / "runtime_dir"
    finally:
        await manager.shutdown_kernel()
    if transport == "ipc":
        assert not list(Path(manager.ip).parent.glob("*-ipc-*"))


async def answer(manager: AsyncKernelManager, code: str) -> str:
    client: AsyncKernelClient = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=PATIENCE_S)
        reply = await client.execute_interactive(
            "", user_expressions={"it": code}, timeout=PATIENCE_S, output_hook=lambda _: None
        )
        return str(reply["content"]["user_expressions"]["it"]["data"]["text/plain"])
    finally:
        client.stop_channels()


def test_sigint_interrupts_the_cell_and_ends_nothing() -> None:
    with managed() as manager, client_of(manager) as client:
        with other_thread() as other:
            cell = other.submit(said, client, "import time\nx = 7\nprint('on')\ntime.sleep(600)")
            while not cell.done():
                manager.signal_kernel(signal.SIGINT)
                time.sleep(0.1)  # the cell may not have begun
        assert cell.result().startswith("KeyboardInterrupt")
        assert manager.is_alive()
        manager.signal_kernel(signal.SIGUSR1)  # for whom inside?
        assert said(client, "x") == "7"


def waited(manager: KernelManager) -> int | None:
    assert manager.provisioner is not None
    found: int | None = run_sync(manager.provisioner.wait)()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_would_end_a_process_ends_the_kernel(number: signal.Signals) -> None:
    with managed() as manager:
        manager.signal_kernel(number)
        assert waited(manager) == 0
        assert not manager.has_kernel


def test_channels_are_encrypted_where_the_manager_asks_for_it() -> None:
    with managed(start={"transport_encryption": "required"}) as manager:
        assert manager.curve_publickey
        assert run(manager, "1 + 1") == "2"


# -- what it sees ----------------------------------------------------------------------------------


def test_nothing_of_the_client_s_environment_gets_inside() -> None:
    start = {"env": {**os.environ, "JUPYTER_TOKEN": "secret", "MODE": "test"}}
    with managed(start=start) as manager:
        assert run(manager, "import os; {'JUPYTER_TOKEN', 'MODE'} & set(os.environ)") == "set()"


def test_a_notebook_works_in_its_own_directory(
    own_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = person_s(make(own_temporary_directory / "notebook-project"))
    venv = person_s(make(directory / ".venv"))
    monkeypatch.setattr("sbx.workspace.host_directory._homes_of_ours", lambda: {str(venv)})
    (directory / "table.csv").write_text("a,b\n")
    with managed(NOTEBOOK, start={"cwd": str(directory)}) as manager, client_of(manager) as client:
        assert said(client, "open('made', 'w').write(open('table.csv').read())") == "4"
        assert "Read-only" in said(client, "open('.venv/sitecustomize.py', 'w')")
        assert said(client, "import os; os.rename('.venv', 'moved')").startswith("OSError")
        assert (directory / "made").stat().st_uid == directory.stat().st_uid
        found = manager.resolve_path
        assert found("made") == found("/workspace/made") == str(directory / "made")
        assert found("../other") is found("/etc/passwd") is found("gone") is None
    assert (directory / "made").read_text() == "a,b\n"


def make(directory: Path) -> Path:
    directory.mkdir()
    return directory


def refused(kernel: str, **traits: Any) -> SbxError:
    start = traits.pop("start")
    manager = KernelManager(kernel_name=kernel, **traits)
    with pytest.raises(SbxError) as raised:
        manager.start_kernel(**start)
    assert not manager.has_kernel
    assert raised.value.hint
    assert raised.value.hint in str(raised.value)  # which is all that a notebook shows
    return raised.value


def test_a_start_that_is_refused_says_why_and_leaves_nothing(
    own_temporary_directory: Path,
) -> None:
    before = boxes()
    assert refused(NOTEBOOK, start={"cwd": "/"}).code == "directory_forbidden"
    directory = person_s(make(own_temporary_directory / "with-file"))
    file = directory / "kernel.json"
    reported = refused(NOTEBOOK, start={"cwd": str(directory)}, connection_file=str(file))
    assert (type(reported), reported.code) == (Denied, "connection_in_workspace")
    assert not file.exists()
    until(lambda: boxes() <= before)


def test_a_policy_that_is_gone_is_said_so(
    jupyter_kernels: Path,  # noqa: F811
) -> None:
    spec = jupyter_kernels / "share" / "jupyter" / "kernels"
    (spec / "lost").mkdir()
    text = (spec / DEFAULT / "kernel.json").read_text()
    (spec / "lost" / "kernel.json").write_text(text.replace('"default"', '"defualt"'))
    reported = refused("lost", start={})
    assert (type(reported), reported.code) == (NotFound, "policy_not_found")
    assert "did you mean default?" in str(reported)


# -- whose files -----------------------------------------------------------------------------------


def named(notebook: str, directory: Path) -> dict[str, Any]:
    """As jupyter_server starts the kernel of a notebook."""
    return {"cwd": str(directory), "env": {**os.environ, "JPY_SESSION_NAME": notebook}}


@pytest.mark.full_tier
def test_a_notebook_that_is_opened_again_finds_its_files_and_no_other_one_does(
    tmp_path: Path,
) -> None:
    with managed(start=named("a.ipynb", tmp_path)) as first:
        run(first, "open('notes', 'w').write('of a')")
        with managed(start=named("a.ipynb", tmp_path)) as beside:  # one kernel at a time sits there
            assert run(beside, "open('notes').read()").startswith("FileNotFoundError")
    with managed(start=named("a.ipynb", tmp_path)) as again:
        assert run(again, "open('notes').read()") == "'of a'"
    with managed(start=named("b.ipynb", tmp_path)) as other:
        assert run(other, "open('notes').read()").startswith("FileNotFoundError")
    with managed(start=named("a.ipynb", tmp_path.parent)) as elsewhere:
        assert run(elsewhere, "open('notes').read()").startswith("FileNotFoundError")


def test_a_name_that_the_program_was_started_with_is_nobody_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the notebook in which somebody ran this program, which may run many others."""
    monkeypatch.setenv("JPY_SESSION_NAME", "outer.ipynb")
    with managed(start={"cwd": str(tmp_path)}) as first:
        run(first, "open('notes', 'w')")
    with managed(start={"cwd": str(tmp_path)}) as second:
        assert run(second, "open('notes')").startswith("FileNotFoundError")


def test_only_so_many_seats_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbx.jupyter.notebook_sandbox._WAITING_MAX", 1)
    seats = seats_of(shared.shared_runtime().runtime)
    for notebook in ("c.ipynb", "d.ipynb"):
        with managed(start=named(notebook, tmp_path)) as manager:
            run(manager, f"open('notes', 'w').write({notebook!r})")
    assert len(seats._waiting) == 1
    with managed(start=named("d.ipynb", tmp_path)) as kept:
        assert run(kept, "open('notes').read()") == "'d.ipynb'"
    with managed(start=named("c.ipynb", tmp_path)) as lost:
        assert run(lost, "open('notes')").startswith("FileNotFoundError")


# -- ends ------------------------------------------------------------------------------------------


def test_a_manager_that_is_forgotten_leaves_nothing() -> None:
    before, context = boxes(), zmq.Context()
    manager = KernelManager(kernel_name=DEFAULT, context=context)
    manager.start_kernel()
    assert boxes() - before
    manager._close_control_socket()  # else pyzmq warns of it, where it is collected first
    del manager
    gc.collect()
    until(lambda: boxes() <= before)
    context.destroy(linger=0)


def test_the_end_of_the_runtime_ends_the_kernel_and_the_next_one_starts_another() -> None:
    with managed() as manager:
        shared.close()
        assert waited(manager) == 137
        manager.restart_kernel(now=True)
        assert run(manager, "1 + 1") == "2"
