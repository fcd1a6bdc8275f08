"""Execute a notebook with a sandboxed kernel, by nbclient. Its cells see only their directory.

python run_notebook.py [DIRECTORY]
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from sbx.jupyter import kernelspec

CELLS = ("import os; os.listdir()", "sum(range(10))", "os.path.exists('/etc/shadow')")


def main(directory: Path) -> None:
    v4: Any = nbformat.v4  # without types
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in CELLS])
    (directory / "table.csv").write_text("x\n1\n")
    with tempfile.TemporaryDirectory() as place:
        os.environ["JUPYTER_PATH"] = f"{place}/share/jupyter"
        kernelspec.install(place=kernelspec.KernelspecDir(Path(place)))
        client = NotebookClient(
            notebook,
            kernel_name="sbx",
            resources={"metadata": {"path": str(directory)}},
        )
        for cell in client.execute().cells:
            print(cell.source, "->", cell.outputs[0].data["text/plain"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
