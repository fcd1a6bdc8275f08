"""A real Jupyter server: kernels by its REST API, cells over its websockets, as JupyterLab does."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import environment
from jupyter_specs import (  # noqa: F401
    BY_SIGNAL,
    DEFAULT,
    HERE,
    STANDALONE_HERE,
    jupyter_kernels,
    ours_only,
    person_s,
)
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.tiers import rows

pytest.importorskip("jupyter_server", reason="the tests' own extra brings it")

PATIENCE_S = 60.0
TOKEN = "the-token-of-a-test"
KINDS = (DEFAULT, BY_SIGNAL, STANDALONE_HERE)

Message = dict[str, Any]


class Channel:
    """A page's websocket to one kernel."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket

    def send(self, kind: str, channel: str = "shell", **content: Any) -> str:
        request = uuid.uuid4().hex
        header = {"msg_id": request, "msg_type": kind, "session": "page", "username": "person"}
        header |= {"version": "5.3", "date": "2026-01-01T00:00:00Z"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._socket.send(json.dumps(message | {"channel": channel}))
        return request

    def execute(self, code: str, *, allow_stdin: bool = False) -> str:
        return self.send(
            "execute_request",
            code=code,
            silent=False,
            store_history=True,
            user_expressions={},
            allow_stdin=allow_stdin,
        )

    def answer(self, value: str) -> None:
        self.send("input_reply", "stdin", value=value, status="ok")

    def messages(self, request: str | None = None) -> Iterator[tuple[str, Message]]:
        """What comes, in answer to this request where one is named: its kind and its content."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            message = json.loads(self._socket.recv(timeout=deadline - time.monotonic()))
            if request in (None, message["parent_header"].get("msg_id")):
                yield message["msg_type"], message["content"]

    def next(self, kind: str, request: str | None = None) -> Message:
        return next(content for came, content in self.messages(request) if came == kind)

    def end(self, request: str) -> tuple[str, Message]:
        """Wait until it has its reply and the kernel is idle; what it printed, and the reply.

        The two come by different ways, and in either order."""
        printed, idle, reply = "", False, None
        for kind, content in self.messages(request):
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_reply":
                reply = content
            elif content.get("execution_state") == "idle":
                idle = True
            if idle and reply is not None:
                break
        assert reply is not None
        return printed, reply

    def run(self, code: str) -> str:
        """Execute it to its end, which is a good one; what it printed."""
        printed, reply = self.end(self.execute(code))
        assert reply["status"] == "ok", reply
        return printed


class Server:
    """One that answers at `url`, over the notebooks below `notebooks`."""

    def __init__(self, url: str, notebooks: Path) -> None:
        self.notebooks = notebooks
        self._url = url
        headers = {"authorization": f"token {TOKEN}"}
        self._rest = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S)

    def close(self) -> None:
        self._rest.close()

    def ask(self, method: str, about: str, **body: Any) -> Any:
        """By REST; what it answers, None where that is nothing."""
        reply = self._rest.request(method, f"api/{about}", json=body or None)
        assert reply.is_success, f"{method} {about}: {reply.status_code} {reply.text}"
        return reply.json() if reply.content else None

    def running(self) -> set[str]:
        return {kernel["id"] for kernel in self.ask("GET", "kernels")}

    @contextmanager
    def kernel(self, name: str) -> Iterator[str]:
        """The id of a new one."""
        made = self.ask("POST", "kernels", name=name)["id"]
        yield made
        self.ask("DELETE", f"kernels/{made}")

    @contextmanager
    def page(self, kernel_id: str) -> Iterator[Channel]:
        address = f"{self._url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels"
        with connect(
            f"{address}?session_id={uuid.uuid4().hex}",
            additional_headers={"authorization": f"token {TOKEN}"},
            open_timeout=PATIENCE_S,
            max_size=None,
        ) as socket:
            yield Channel(socket)

    @contextmanager
    def notebook(self, path: str, kernel: str) -> Iterator[Channel]:
        """The page of a notebook that is opened, and shut down in the end, as JupyterLab does."""
        names = {"path": path, "name": path.rpartition("/")[2], "type": "notebook"}
        session = self.ask("POST", "sessions", kernel={"name": kernel}, **names)
        with self.page(session["kernel"]["id"]) as page:
            yield page
        self.ask("DELETE", f"sessions/{session['id']}")


def url_in(reported: Path) -> str | None:
    """Return the URL; None until the server has written the whole file."""
    try:
        url: str = json.loads(reported.read_text())["url"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return url


@pytest.fixture(scope="module")
def server(jupyter_kernels: Path) -> Iterator[Server]:  # noqa: F811  # of the module
    """A process of its own, on a port that it chose."""
    notebooks = jupyter_kernels / "notebooks"
    notebooks.mkdir()
    log = jupyter_kernels / "server.log"
    command = [sys.executable, "-m", "jupyter_server", "--port=0", "--no-browser", "--allow-root"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={person_s(notebooks)}"]
    command += ["--ServerApp.jpserver_extensions={}", "--ServerApp.terminals_enabled=False"]
    with log.open("ab") as writing:
        process = subprocess.Popen(
            command, stdout=writing, stderr=writing, env=environment(), cwd=notebooks
        )
    try:
        reported = jupyter_kernels / "runtime_dir" / f"jpserver-{process.pid}.json"
        deadline = time.monotonic() + PATIENCE_S
        while (url := url_in(reported)) is None:
            assert process.poll() is None, f"it ended: {log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"it did not start: {log.read_text()[-4000:]}"
            time.sleep(0.02)
        server = Server(url, notebooks)
        yield server
        server.close()
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(log.read_text()[-8000:])  # which pytest shows where something failed


# -- REST ------------------------------------------------------------------------------------------


@pytest.mark.full_tier
def test_the_kernels_are_listed(server: Server) -> None:
    specs = server.ask("GET", "kernelspecs")["kernelspecs"]
    assert {*KINDS, HERE} <= set(specs)
    assert specs[DEFAULT]["spec"]["language"] == "python"


@pytest.mark.parametrize("kind", rows(KINDS, [DEFAULT]))
def test_a_kernel_is_started_interrupted_restarted_and_deleted(server: Server, kind: str) -> None:
    """What is interrupted goes on; what is restarted forgets its variables and keeps its files."""
    with server.kernel(kind) as kernel:
        assert kernel in server.running()
        with server.page(kernel) as page:
            assert page.run("x = 42; open('kept', 'w').write('still here'); print(x)") == "42\n"
            endless = page.execute("print('begun', flush=True)\nwhile True: pass")
            assert page.next("stream", endless)["text"] == "begun\n"
            server.ask("POST", f"kernels/{kernel}/interrupt")
            assert page.end(endless)[1]["ename"] == "KeyboardInterrupt"
            assert page.run("print(x)") == "42\n"
            assert server.ask("POST", f"kernels/{kernel}/restart")["id"] == kernel
        with server.page(kernel) as page:
            assert page.run("print('x' in globals(), open('kept').read())") == "False still here\n"
            page.run("import os; os.unlink('kept')")
    assert kernel not in server.running()


# -- notebooks -------------------------------------------------------------------------------------


def test_a_notebook_that_is_opened_again_finds_its_files(server: Server) -> None:
    with server.notebook("again.ipynb", DEFAULT) as page:
        page.run("x = 1; open('results.txt', 'w').write('of the first kernel')")
    with server.notebook("again.ipynb", DEFAULT) as page:
        said = page.run("print('x' in globals(), open('results.txt').read())")
        assert said == "False of the first kernel\n"
        page.run("import os; os.unlink('results.txt')")


def test_a_notebook_works_in_its_own_directory(server: Server) -> None:
    """What it writes is there for the server, and the other way round."""
    deep = server.notebooks / "deep"
    deep.mkdir()
    (person_s(deep) / "input.csv").write_text("a,b\n1,2\n")
    with server.notebook("deep/report.ipynb", HERE) as page:
        assert page.run("print(open('input.csv').read(), end='')") == "a,b\n1,2\n"
        page.run("open('output.txt', 'w').write('made inside')")
    assert server.ask("GET", "contents/deep/output.txt")["content"] == "made inside"


@ours_only
def test_two_notebooks_see_nothing_of_each_other_or_the_host(server: Server) -> None:
    with server.notebook("one.ipynb", DEFAULT) as one, server.notebook("two.ipynb", DEFAULT) as two:
        one.run("open('secret', 'w').write('of one')")
        paths = ["secret", str(server.notebooks)]
        look = f"import os; print([os.path.exists(path) for path in {paths}])"
        assert one.run(look) == "[True, False]\n"
        assert two.run(look) == "[False, False]\n"
        assert "JUPYTER" not in two.run("import os; print(dict(os.environ))")


# -- a cell's life ---------------------------------------------------------------------------------


def test_a_cell_asks_and_is_answered(server: Server) -> None:
    ask = "import getpass\nname = input('name? '); pin = getpass.getpass('pin? '); print(name, pin)"
    with server.kernel(DEFAULT) as kernel, server.page(kernel) as page:
        cell = page.execute(ask, allow_stdin=True)
        assert page.next("input_request", cell) == {"prompt": "name? ", "password": False}
        page.answer("Ada")
        assert page.next("input_request", cell) == {"prompt": "pin? ", "password": True}
        page.answer("1815")
        assert page.end(cell)[0] == "Ada 1815\n"


@pytest.mark.full_tier
def test_a_kernel_that_dies_is_restarted_by_the_server(server: Server) -> None:
    """Its restarter looks every few seconds, and says so to the page."""
    with server.kernel(DEFAULT) as kernel:
        with server.page(kernel) as page:
            page.run("x = 1; open('kept', 'w').write('still here')")
            page.execute("import os; os._exit(1)")
            while page.next("status")["execution_state"] != "restarting":
                pass
        with server.page(kernel) as page:
            assert page.run("print('x' in globals(), open('kept').read())") == "False still here\n"
            page.run("import os; os.unlink('kept')")
