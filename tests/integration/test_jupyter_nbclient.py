"""Real notebooks, executed by nbclient, which knows nothing of sandboxes."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jupyter_specs import (  # noqa: F401
    DEFAULT,
    HERE,
    NOTEBOOK,
    STANDALONE,
    jupyter_kernels,
    notebook,
    person_s,
)
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

pytestmark = pytest.mark.full_tier
PNG = b"\x89PNG\r\n\x1a\n"
PATIENCE_S = 60  # of nbclient, which counts in whole seconds
FOREVER = """
state = "kept"
print("begun", flush=True)
while True:
    pass
"""

PENGUINS = """
from palmerpenguins import load_penguins
penguins = load_penguins()
penguins.shape
"""
MEANS = "penguins.groupby('species')[['body_mass_g']].mean().round(1)"
FIGURE = """
import matplotlib.pyplot as plt
fig, ax = plt.subplots()
ax.scatter(penguins.bill_length_mm, penguins.bill_depth_mm)
ax.set_title("penguins");
"""


def run(kernel: str, *sources: str, cwd: Path | None = None, **options: Any) -> NotebookNode:
    """Execute a new notebook; what nbclient makes of it."""
    answer = {"timeout": PATIENCE_S, "iopub_timeout": PATIENCE_S, **options}
    resources = {"metadata": {"path": str(cwd)}} if cwd else {}
    client = NotebookClient(notebook(*sources), kernel_name=kernel, resources=resources, **answer)
    return client.execute()


def outputs(kernel: str, source: str, **options: Any) -> list[NotebookNode]:
    """Of a single cell."""
    return list(run(kernel, source, **options).cells[0].outputs)


def printed(outputs: Sequence[NotebookNode], name: str = "stdout") -> str:
    return "".join(
        item.text for item in outputs if item.output_type == "stream" and item.name == name
    )


# -- what notebooks are for ------------------------------------------------------------------------


def test_real_data_are_analysed_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("palmerpenguins", reason="the extra sbx[demo] brings the data")
    done = run(NOTEBOOK, PENGUINS, MEANS, FIGURE, cwd=person_s(tmp_path))
    shape, means, figure = (cell.outputs[-1] for cell in done.cells)
    assert shape.data["text/plain"] == "(344, 8)"
    assert "5076.0" in means.data["text/plain"]
    assert means.data["text/html"].count("<tr") == 5
    assert figure.output_type == "display_data"
    assert base64.b64decode(figure.data["image/png"]).startswith(PNG)
    assert [cell.execution_count for cell in done.cells] == [1, 2, 3]
    assert done.metadata.language_info.name == "python"
    assert done.metadata.language_info.pygments_lexer == "ipython3"


@pytest.mark.parametrize("source", ["%matplotlib inline", "plt.rcParams['figure.dpi'] = 50"])
def test_figures_are_shown_at_the_end_of_their_cell(source: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra sbx[data] brings it")
    setup = f"import matplotlib.pyplot as plt\n{source}\n"
    draw = "plt.plot([1, 4, 9]); plt.show(); print('after')"
    shown, after = outputs(NOTEBOOK, setup + draw, cwd=person_s(tmp_path))
    assert (shown.output_type, after.text) == ("display_data", "after\n")
    assert "image/png" in shown.data


def test_magics(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("answer = 42\nprint('script ran')\n")
    done = run(
        HERE,
        "%timeit -n 2 -r 2 sum(range(9))",
        "%%time\nsum(range(9))",
        "!ls script.*",
        "%%bash\necho $((6 * 7)) && echo no >&2",
        "%run script.py\nanswer",
        "%env HUE=teal\nimport os; os.environ['HUE']",
        "%%writefile made.txt\nby a magic",
        "%cat made.txt",
        "kept = !echo one; echo two\nkept",
        "%%capture caught\nprint('hidden')",
        "caught.stdout",
        "%whos",
        cwd=person_s(tmp_path),
    )
    said = [cell.outputs for cell in done.cells]
    assert "per loop (mean ± std. dev. of 2 runs, 2 loops each)" in printed(said[0])
    assert "Wall time:" in printed(said[1])
    assert said[1][-1].data["text/plain"] == "36"
    assert printed(said[2]).strip() == "script.py"
    assert (printed(said[3]), printed(said[3], "stderr")) == ("42\n", "no\n")
    assert (printed(said[4]), said[4][-1].data["text/plain"]) == ("script ran\n", "42")
    assert said[5][-1].data["text/plain"] == "'teal'"
    assert printed(said[6]) == "Writing made.txt\n"
    assert printed(said[7]).strip() == "by a magic"
    assert said[8][0].data["text/plain"] == "['one', 'two']"
    assert said[9] == []
    assert said[10][0].data["text/plain"] == "'hidden\\n'"
    assert "kept" in printed(said[11])
    assert (tmp_path / "made.txt").read_text() == "by a magic\n"


@pytest.mark.ci_tier
def test_outputs_are_updated_and_cleared() -> None:
    done = run(
        DEFAULT,
        "shown = display('begun', display_id='progress')\nother = display('same', display_id=True)",
        "shown.update('done'); other.update({'text/html': '<b>new</b>'}, raw=True)",
        """
        from IPython.display import clear_output
        for step in range(3):
            clear_output(wait=True)
            print(step)
        """,
        "print('gone'); clear_output(); display('stays')",
    )
    progress, other = done.cells[0].outputs
    assert progress.data["text/plain"] == "'done'"
    assert other.data["text/html"] == "<b>new</b>"
    assert printed(done.cells[2].outputs) == "2\n"
    assert [item.output_type for item in done.cells[3].outputs] == ["display_data"]


def test_streams_keep_their_order_and_their_names() -> None:
    said = outputs(
        DEFAULT,
        """
        import sys
        for turn in range(3):
            print("out", turn, flush=True)
            print("err", turn, file=sys.stderr, flush=True)
        sys.stdout.write("a\\rb\\u0000\\U0001f600"); None
        """,
    )
    assert printed(said) == "out 0\nout 1\nout 2\na\rb\x00\U0001f600"
    assert printed(said, "stderr") == "err 0\nerr 1\nerr 2\n"


def test_ten_megabytes_of_output_arrive_whole() -> None:
    (*_, size) = said = outputs(
        DEFAULT,
        """
        written = 0
        for number in range(100_000):
            written += len(line := f"{number:>99}\\n")
            print(line, end="")
        written
        """,
    )
    lines = printed(said).splitlines()
    assert size.data["text/plain"] == "10000000"
    assert lines == [f"{number:>99}" for number in range(100_000)]


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.ci_tier
def test_an_error_stops_the_notebook_and_is_told() -> None:
    nb = notebook("x = 1", "def f():\n    return 1 / 0\nf()", "x = 2")
    with pytest.raises(CellExecutionError) as caught:
        NotebookClient(nb, kernel_name=DEFAULT, timeout=PATIENCE_S).execute()
    assert (caught.value.ename, caught.value.evalue) == ("ZeroDivisionError", "division by zero")
    (error,) = nb.cells[1].outputs
    assert (error.output_type, error.evalue) == ("error", "division by zero")
    assert "ZeroDivisionError" in "".join(error.traceback)
    assert nb.cells[2].execution_count is None


def test_allowed_errors_are_outputs_and_the_rest_runs() -> None:
    done = run(
        DEFAULT,
        "x = 1; raise KeyError('k')",
        "1 +",
        "import sys; sys.exit(3)",
        "x",
        allow_errors=True,
    )
    first, second, third, last = done.cells
    assert (first.outputs[0].ename, first.outputs[0].evalue) == ("KeyError", "'k'")
    assert second.outputs[0].ename == "SyntaxError"
    assert third.outputs[0].ename == "SystemExit"
    assert last.outputs[0].data["text/plain"] == "1"


@pytest.mark.parametrize("kernel", [DEFAULT, STANDALONE])
@pytest.mark.ci_tier
def test_a_loop_without_end_is_interrupted_at_its_time_out(kernel: str) -> None:
    done = run(
        kernel,
        FOREVER,
        "state",
        allow_errors=True,
        interrupt_on_timeout=True,
        timeout_func=lambda cell: 2 if "while" in cell.source else PATIENCE_S,
    )
    begun, error = done.cells[0].outputs
    assert (begun.text, error.ename) == ("begun\n", "KeyboardInterrupt")
    assert done.cells[1].outputs[0].data["text/plain"] == "'kept'"


def test_a_time_out_without_interrupt_ends_the_notebook() -> None:
    nb = notebook(FOREVER, "state")
    with pytest.raises(CellTimeoutError):
        NotebookClient(nb, kernel_name=DEFAULT, timeout=1).execute()
    assert printed(nb.cells[0].outputs) == "begun\n"


def test_a_kernel_that_dies_is_noticed() -> None:
    """By the answer to its cell, or by looking whether it lives: nbclient does both."""
    with pytest.raises((DeadKernelError, CellExecutionError)):
        run(DEFAULT, "import os; os._exit(5)", "1")


# -- how it is reached -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [DEFAULT, STANDALONE])
def test_over_unix_sockets(kernel: str) -> None:
    seen: list[str] = []

    def look(**_: Any) -> None:
        assert client.km is not None
        seen.append(client.km.get_connection_info()["transport"])

    client: NotebookClient = NotebookClient(
        notebook("6 * 7"),
        kernel_name=kernel,
        timeout=PATIENCE_S,
        config=Config({"AsyncKernelManager": {"transport": "ipc"}}),
        on_cell_executed=look,
    )
    (said,) = client.execute().cells[0].outputs
    assert (said.data["text/plain"], seen) == ("42", ["ipc"])
