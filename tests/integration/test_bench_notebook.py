"""The client that the rows of Jupyter are measured with."""

from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_specs import DEFAULT, jupyter_kernels  # noqa: F401  # the fixture

from bench.notebook import NotebookKernel, client_thread
from bench.samples import NotMeasured


@pytest.fixture
def kernel(tmp_path: Path) -> NotebookKernel:
    return NotebookKernel(DEFAULT, KernelSpecManager(), tmp_path)


@pytest.mark.full_tier
async def test_only_what_a_cell_shows_itself_ends_its_sample(kernel: NotebookKernel) -> None:
    """What an earlier one showed, and its idle status, may not have been read yet."""

    def measured() -> float:
        with kernel.started() as notebook:
            notebook.ready()
            notebook.reply("6 * 7")
            return notebook.cell_ms()

    async with client_thread() as in_thread:
        assert await in_thread(measured) > 0


@pytest.mark.full_tier
async def test_a_first_cell_that_fails_is_no_sample(kernel: NotebookKernel) -> None:
    async with client_thread() as in_thread:
        with pytest.raises(NotMeasured, match="ZeroDivisionError"):
            await in_thread(kernel.start_ms, "1 / 0")
        assert await in_thread(kernel.start_ms, "1 + 1", True) > 0
