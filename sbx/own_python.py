"""The command that starts a module of this sbx in a separate process.

It needs nothing from the working directory, to which code inside may write, nor from PYTHONPATH,
in which an empty entry means the working directory. The path of the package makes it work for an
installation by `pip install --target` or `--user`, too, which `-I` alone does not find.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
_START = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "root in sys.path or sys.path.insert(0, root); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def own_module(module: str, *words: str) -> list[str]:
    """Return the command for a module, such as `sbx`, with these arguments."""
    return [sys.executable, "-I", "-c", _START, _ROOT, module, *words]
