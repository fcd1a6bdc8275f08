"""The matrix of tests/data_matrix.py: the kernel of a notebook, by Jupyter's own client."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from jupyter_specs import HERE, PERSON, jupyter_kernels, ours_only
from matrix_acts import cells
from matrix_places import below, has, new_mark
from places import short_directory
from test_jupyter_provisioner import client_of, run, until

from tests.data_matrix import Cell, cell_of

__all__ = ["jupyter_kernels"]
THING = "notebook kernel"
pytestmark = ours_only


@pytest.fixture
def notebooks() -> Iterator[Path]:
    with short_directory() as directory:
        if os.geteuid() == 0:
            os.chown(directory, PERSON, PERSON)
        yield directory


@pytest.mark.parametrize("act", [act for _, act in cells((THING,))])
def test_cell(act: str, notebooks: Path, own_temporary_directory: Path) -> None:
    mark, manager = new_mark(), KernelManager(kernel_name=HERE)
    manager.start_kernel(cwd=str(notebooks))
    try:
        answers = [*_answers(manager, act, mark), "alive" if manager.is_alive() else "dead"]
    finally:
        manager.shutdown_kernel(now=True)
    places = {"files": own_temporary_directory.glob("sbx-*"), "directory": [notebooks]}
    found = [
        name
        for name, tops in places.items()
        if any(has(path, mark.encode()) for top in tops for path in below(top))
    ]
    cell = cell_of(THING, act)
    answer, disk = ", then ".join(answers), " ".join(found) or "nowhere"
    assert Cell(answer, "", disk, cell.note) == cell


def _answers(manager: KernelManager, act: str, mark: str) -> list[str]:
    if act == "create":
        with client_of(manager):
            return ["starts"]
    written = run(manager, f"open('{mark}', 'w').write('{mark}')")
    assert written == str(len(mark))
    match act:
        case "use":
            return ["ok"]
        case "stop":
            manager.interrupt_kernel()
            return ["interrupted"]
        case "delete":
            manager.shutdown_kernel()
            return ["shut down"]
        case "delete while it runs":
            with client_of(manager) as client:
                client.execute("import time; time.sleep(600)")
                manager.shutdown_kernel(now=True)
            return ["shut down"]
        case "kill -9 and restart":
            with client_of(manager) as client:
                client.execute("import os; os.kill(os.getpid(), 9)")
                until(lambda: not manager.is_alive())
            manager.restart_kernel(now=True)
            with client_of(manager):
                return []
        case _:
            raise AssertionError(act)
