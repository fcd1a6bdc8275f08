"""papermill: notebooks with parameters, as a pipeline runs them."""

import json
from pathlib import Path

import nbformat
import pytest
from jupyter_specs import DEFAULT, code, jupyter_kernels, notebook  # noqa: F401
from nbformat import NotebookNode

papermill = pytest.importorskip("papermill", reason="the tests' own extra brings it")

pytestmark = pytest.mark.full_tier


def written(directory: Path, kernel: str, *sources: str) -> Path:
    """A notebook file with a cell of parameters first."""
    nb = notebook(code("count = 1\nname = 'nobody'", "parameters"), *sources)
    nb.metadata.kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    path = directory / "report.ipynb"
    path.write_text(json.dumps(nb))
    return path


def read(path: Path) -> NotebookNode:
    """What papermill wrote."""
    written: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return written


def execute(path: Path, **parameters: object) -> Path:
    result = path.with_name("result.ipynb")
    papermill.execute_notebook(path, result, parameters=parameters, progress_bar=False)
    return result


@pytest.mark.ci_tier
def test_the_result_holds_its_parameters_and_what_they_gave(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        DEFAULT,
        "import pandas as pd\ntable = pd.DataFrame({name: range(count)})\ntable",
        "print(name, count, options['deep'][1], len(table))",
    )
    answer = {"count": 3, "name": 'Ünïcode "quoted"', "options": {"deep": [1, None]}}
    done = read(execute(path, **answer))
    assert done.metadata.papermill.parameters == answer
    assert done.metadata.papermill.exception is None
    assert done.metadata.kernelspec.name == DEFAULT
    assert done.metadata.language_info.name == "python"
    injected = done.cells[1]
    assert injected.metadata.tags == ["injected-parameters"]
    assert "count = 3" in injected.source
    assert 'Ünïcode "quoted"' in done.cells[2].outputs[0].data["text/html"]
    assert done.cells[3].outputs[0].text == 'Ünïcode "quoted" 3 None 3\n'
    assert [cell.metadata.papermill.status for cell in done.cells] == ["completed"] * 4


def test_a_failure_is_raised_and_kept_in_the_result(tmp_path: Path) -> None:
    path = written(tmp_path, DEFAULT, "print('so far')\n1 / (count - 3)", "print('never')")
    with pytest.raises(papermill.PapermillExecutionError, match="division by zero") as caught:
        execute(path, count=3)
    assert caught.value.ename == "ZeroDivisionError"
    done = read(tmp_path / "result.ipynb")
    failed = next(cell for cell in done.cells if "count - 3" in cell.source)
    *printed, error = failed.outputs
    assert "".join(item.text for item in printed) == "so far\n"  # in one piece or two
    assert error.output_type == "error"
    assert done.cells[-1].outputs == []
    assert done.metadata.papermill.exception is True
