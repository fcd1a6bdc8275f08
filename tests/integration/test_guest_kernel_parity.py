"""The same cells in our kernel and in ipykernel say the same things.

What differs on purpose is not compared: how text is cut into stream frames, status and
execute_input messages (which we do not send), and `\\r\\n` of `!cmd`, which we send as `\\n`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest_client import KernelClient

manager = pytest.importorskip("jupyter_client.manager")
ensure_event_loop = pytest.importorskip("jupyter_core.utils").ensure_event_loop

_PUBLISHED = {
    "stream",
    "display_data",
    "update_display_data",
    "execute_result",
    "error",
    "clear_output",
}

_TOLD_ONLY_ON_STDERR = {"usage", "group"}  # Jupyter's reply has no traceback then; ours has

Seen = list[tuple[str, Any]]


class Both:
    """One of each kernel; `run` gives what each published and its reply, in the same form."""

    def __init__(self, cwd: Path) -> None:
        environment = {**os.environ, "IPYTHONDIR": str(cwd / ".jupyter-ipython")}
        environment["MPLCONFIGDIR"] = str(cwd / ".mpl")  # that of our kernel
        # matplotlib writes a warning if the search for fonts takes more than 5 seconds
        search = [sys.executable, "-c", "import matplotlib.font_manager"]
        subprocess.run(search, env=environment, check=True, capture_output=True, timeout=300)
        self.ours = KernelClient(cwd, home=os.path.expanduser("~"))
        environment["JPY_SESSION_NAME"] = ""
        self._manager = manager.KernelManager()
        self._manager.kernel_spec.argv[0] = sys.executable
        self._manager.start_kernel(cwd=str(cwd), env=environment)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self.ours.__exit__()
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        ensure_event_loop().close()  # jupyter_client made it for this thread, and keeps it

    def run(self, code: str) -> tuple[tuple[Seen, Any], tuple[Seen, Any]]:
        return self._run_ours(code), self._run_theirs(code)

    def complete(self, code: str, position: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The matches and the part of the code that they replace, of both."""
        ours = self.ours.request("complete_request", code=code, cursor_pos=position)
        request = self._client.complete(code, position)
        while (reply := self._client.get_shell_msg(timeout=60))["parent_header"][
            "msg_id"
        ] != request:
            pass
        theirs = reply["content"]
        names = ("matches", "cursor_start", "cursor_end")
        return tuple(ours[name] for name in names), tuple(theirs[name] for name in names)

    def _run_ours(self, code: str) -> tuple[Seen, Any]:
        cell = self.ours.run(code)
        seen = [(frame.type, frame.content) for frame in cell.frames]
        return _normal(seen), _essence(cell.reply)

    def _run_theirs(self, code: str) -> tuple[Seen, Any]:
        request = self._client.execute(code, allow_stdin=False)
        seen: Seen = []
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] in _PUBLISHED:
                seen.append((message["msg_type"], message["content"]))
            elif message["content"].get("execution_state") == "idle":
                break
        while True:  # a slow start leaves answers to the client's first questions behind
            reply = self._client.get_shell_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == request:
                return _normal(seen), _essence(reply["content"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    pair = Both(tmp_path_factory.mktemp("parity"))
    yield pair
    pair.close()


def _normal(seen: Seen) -> Seen:
    """Neighbouring texts joined; addresses, display ids, paths and pictures made comparable."""
    joined: Seen = []
    for kind, content in seen:
        last = joined[-1] if joined else None
        if kind == "stream" and last and last[0] == kind and last[1]["name"] == content["name"]:
            last[1]["text"] += content["text"]
        else:
            joined.append((kind, dict(content)))
    return [(kind, _comparable(content)) for kind, content in joined]


def _comparable(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _comparable(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if key == "image/png":
        return value[:40]
    if isinstance(value, str):
        value = re.sub(r"\x1b\[[0-9;]*m", "", value)
        value = re.sub(r"0x[0-9a-f]{6,}", "0x", value).replace("\r\n", "\n")
        value = re.sub(r"[\w/.-]*/ipykernel_\d+/\d+\.py|/tmp/cells/\S+?\.py", "CELL", value)
        return re.sub(r"\([0-9a-f-]+\.py, line", "(CELL, line", value)
    return value


def _essence(reply: dict[str, Any]) -> dict[str, Any]:
    keys = ("status", "execution_count", "ename", "evalue", "traceback", "payload")
    return {key: _comparable(reply[key]) for key in keys if key in reply}


CELLS = {
    "arithmetic": "1 + 1",
    "nothing": "x = 5",
    "semicolon": "x;",
    "empty": "",
    "comment": "# only",
    "underscore": "_",
    "string": "'é\\n' * 3",
    "containers": "{'a': [1, (2, 3)], 'b': {4}, 'long': list(range(50))}",
    "float": "0.1 + 0.2",
    "print": "print('hi')\nprint('there')",
    "stderr": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "print and result": "print('a')\n'b'",
    "html": "from IPython.display import *\nHTML('<b>x</b>')",
    "display": "display(HTML('<i>y</i>'), 3)\n4",
    "markdown": "display(Markdown('*m*'), Latex('$x$'), SVG('<svg></svg>'), JSON({'a': [1]}))",
    "image": "Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + b'0' * 60, format='png', width=3)",
    "javascript": "Javascript('1')",
    "raw": "display({'text/plain': 'p', 'x/y': {'n': 1}}, raw=True, metadata={'m': 1})",
    "update": "h = display('one', display_id='the-id')\nh.update('two')\n"
    "update_display('three', display_id='the-id')",
    "clear": "clear_output(wait=True)\nclear_output()",
    "mimebundle": "class M:\n  def _repr_mimebundle_(self, **k):\n"
    "    return {'text/html': 'h'}, {'text/html': {'k': 1}}\nM()",
    "repr fails": "class B:\n  def __repr__(self): return 1 / 0\nprint(1)",
    "zero division": "def f(n):\n    return n / 0\n\nf(1)",
    "nested": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('v') from e",
    "name": "undefined_name",
    "import": "import no_such_module",
    "syntax": "x = = 1",
    "indent": "if True:\nx = 1",
    "return": "return 3",
    "usage": "%no_such_magic",
    "group": "raise ExceptionGroup('g', [ValueError(1)])",
    "exit": "import warnings; warnings.simplefilter('ignore'); import sys; sys.exit(2)",
    "assert": "assert 1 == 2, 'not so'",
    "library": "import json\njson.loads('{')",
    "await": "import asyncio\nawait asyncio.sleep(0, 'x')",
    "await error": "async def boom(): raise OSError(2, 'gone')\nawait boom()",
    "help": "f?",
    "next input": "get_ipython().set_next_input('z')",
    "shell": "!echo shell; echo twice",
    "shell result": "v = !echo {x}\nv",
    "bash": "%%bash\necho from bash",
    "capture": "%%capture c\nprint('captured')\ndisplay(1)",
    "captured": "c.stdout, len(c.outputs)",
    "pandas": "import pandas as pd\npd.DataFrame({'a': [1, 2]})",
    "series": "pd.Series([1.5], name='s')",
    "numpy": "import numpy as np\nnp.float64(1.5), np.arange(3)",
    "figure": "import matplotlib.pyplot as plt\n"
    "fig, ax = plt.subplots(figsize=(1, 1)); ax.plot([1, 2]); print('drawn')",
    "show": "plt.figure(figsize=(1, 1)); plt.show(); print('shown')",
    "inline magic": "%matplotlib inline\nplt.figure(figsize=(1, 1));",
    "notebook": "type(get_ipython()).__name__, __name__, 'IPKernelApp' in get_ipython().config",
    "history": "In[2], len(Out) > 3",
}  # fmt: skip


@pytest.mark.full_tier
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_says_what_it_says_in_jupyter(both: Both, name: str) -> None:
    ours, theirs = both.run(CELLS[name])
    if name in _TOLD_ONLY_ON_STDERR:
        assert ours[1].pop("traceback")
        assert theirs[1].pop("traceback") == []
        if name == "group":  # its text names the frames of IPython and of ipykernel
            ours[0].clear()
            theirs[0].clear()
    if name == "import":
        for error in (ours[0][0][1], ours[1]):
            assert "sbx env create" in error["traceback"].pop()
    assert ours == theirs


def test_figures_are_png_and_the_frame_is_html(both: Both) -> None:
    """So that the comparison above cannot hold for want of both."""
    both.run("import matplotlib.pyplot as plt; import pandas as pd")
    (seen, _), _ = both.run("fig, ax = plt.subplots(figsize=(1, 1)); pd.DataFrame({'a': [1]})")
    kinds = {mime for kind, content in seen for mime in content["data"]}
    assert {"image/png", "text/html"} <= kinds


_NAMES = """
import functools, json, os, pathlib
x = "abc"
d = {"alpha": 1, "beta": 2}
class Named:
    ñandu = 1
    ñame = 2
obj = Named()
def f(alpha, beta): pass
"""
_COMPLETED = (
    "'abc'.isnume",
    "os.pat",
    "import os\nos.pat",
    "impor",
    "import jso",
    "from os import pat",
    "json.dum",
    "frame = {'größe': 1}; frame['grö",
    "größe = 1\ngrö",
    "len('a').bit_l",
    "[].app",
    "x.",
    "print(x.upp",
    "d['al",
    "%tim",
    "%%bas",
    "open('/etc/host",
    "'abc'.upper().isn",
    "(1).rea",
    "pathlib.Path('.').exi",
    "for i in ran",
    "obj.ña",
    "f(al",
    "zzz.qq",
    "  x.upp",
    "!ls /et",
    "@functo",
    "class A:\n    def f(self): pass\nA().f",
)


def test_completions_are_those_of_ipykernel(both: Both) -> None:
    both.run(_NAMES)
    for code in _COMPLETED:
        ours, theirs = both.complete(code, len(code))
        assert ours == theirs, code
    ours, theirs = both.complete("x.upp er", 5)  # in the middle of the code
    assert ours == theirs == (["upper"], 2, 5)
