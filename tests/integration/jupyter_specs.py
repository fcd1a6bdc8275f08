"""Kernels for Jupyter's own clients, in Jupyter directories of the tests' own.

    from jupyter_specs import jupyter_kernels  # noqa: F401

in a test module makes the kernels named below known to it and to the processes that it starts.

    SBX_TEST_KERNEL=stock pytest tests/integration/test_jupyter_*.py

puts ipykernel, without a sandbox, behind the same names: a test that fails there says nothing about
ours. What is only about sandboxes is left out then.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nbformat.v4
import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_core.utils import ensure_event_loop
from zmq.utils.garbage import gc as garbage

from sbx.jupyter import kernelspec
from sbx.runtime import shared

STOCK = os.environ.get("SBX_TEST_KERNEL") == "stock"
ours_only = pytest.mark.skipif(STOCK, reason="about sandboxes, and this kernel has none")

PERSON = 1000  # whose the notebooks are: a directory of root's is refused as a workspace

DEFAULT = "default"
NOTEBOOK = "notebook"  # in the directory of its notebook, with pandas imported
HERE = "here"  # the same without its modules, which is quicker
BY_SIGNAL = "by-signal"  # interrupted by SIGINT, the others by a message
STANDALONE = "standalone"  # a process of its own, without a provisioner
STANDALONE_HERE = "standalone-here"  # the same in the directory of its notebook
_POLICIES = {NOTEBOOK: NOTEBOOK, DEFAULT: DEFAULT, BY_SIGNAL: DEFAULT, STANDALONE: DEFAULT}
_POLICIES |= {HERE: "here.toml", STANDALONE_HERE: "here.toml"}
_HERE = 'schema = 1\nextends = "default"\nworkspace = "cwd"\n'


@pytest.fixture(scope="module", autouse=True)
def jupyter_kernels() -> Iterator[Path]:
    """Jupyter's directories, with these kernels before all others of this host."""
    top = Path(tempfile.mkdtemp(prefix="jupyter-"))
    top.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("DATA_DIR", "RUNTIME_DIR", "CONFIG_DIR"):
            patch.setenv(f"JUPYTER_{kind}", str(top / kind.lower()))
        patch.setenv("JUPYTER_PATH", str(top / "share" / "jupyter"))
        patch.setenv("IPYTHONDIR", str(top / "ipython"))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # else jupyter_core warns of what will change
        (top / "here.toml").write_text(_HERE)
        for name, policy in _POLICIES.items():
            _install(name, str(top / policy) if policy.endswith(".toml") else policy, top)
        yield top
        shared.close()
        garbage.stop()  # pyzmq's thread behind large messages, with a context of its own
        ensure_event_loop().close()  # jupyter_core made it for this thread, and keeps it
    shutil.rmtree(top)


def _install(name: str, policy: str, prefix: Path) -> None:
    path = prefix / "share" / "jupyter" / "kernels" / name / "kernel.json"
    if STOCK:
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**get_kernel_dict(), "interrupt_mode": "message"}))
    else:
        alone = name in (STANDALONE, STANDALONE_HERE)
        kernelspec.install(name, policy, place=kernelspec.KernelspecDir(prefix), standalone=alone)
    if name == BY_SIGNAL:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"interrupt_mode": "signal"}))


def notebook(*cells: str | nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A new one with these cells, of code where only the source is given."""
    made = [code(cell) if isinstance(cell, str) else cell for cell in cells]
    new: nbformat.NotebookNode = nbformat.v4.new_notebook(cells=made)  # type: ignore[no-untyped-call]
    return new


def code(source: str, *tags: str) -> nbformat.NotebookNode:
    answer = {"metadata": {"tags": list(tags)}} if tags else {}
    cell: nbformat.NotebookNode = nbformat.v4.new_code_cell(dedent(source), **answer)  # type: ignore[no-untyped-call]
    return cell


def person_s(directory: Path) -> Path:
    """`directory`, as one that may be a workspace whoever runs the tests."""
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    return directory
