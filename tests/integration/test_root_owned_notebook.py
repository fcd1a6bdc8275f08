"""A notebook in a directory of root, executed by nbclient with the shipped policy."""

import os
from pathlib import Path

import pytest
from jupyter_specs import (  # noqa: F401
    NOTEBOOK,
    STANDALONE_HERE,
    jupyter_kernels,
    notebook,
    ours_only,
)
from nbclient import NotebookClient

from tests.tiers import rows

pytestmark = [pytest.mark.needs("root"), ours_only]
PATIENCE_S = 60


@pytest.mark.parametrize("kernel", rows([NOTEBOOK, STANDALONE_HERE], ci_tier=[NOTEBOOK]))
def test_a_notebook_of_root_reads_and_writes_beside_itself(kernel: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "data.csv").write_text("1,2\n")
    cells = notebook(
        "text = open('data.csv').read(); text",
        "open('made.csv', 'w').write(text); import os; os.getuid()",
    )
    resources = {"metadata": {"path": str(tmp_path)}}
    done = NotebookClient(
        cells, kernel_name=kernel, resources=resources, timeout=PATIENCE_S
    ).execute()
    shown = [cell.outputs[-1].data["text/plain"] for cell in done.cells]
    assert shown == ["'1,2\\n'", "1000"]
    made = (tmp_path / "made.csv").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (0, 0, 0o644)
    assert os.listdir(tmp_path).count("made.csv") == 1
