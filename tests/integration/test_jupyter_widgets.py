"""ipywidgets over the protocol that they speak in JupyterLab: comms, both ways."""

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel
from jupyter_specs import DEFAULT, jupyter_kernels, notebook  # noqa: F401
from nbclient import NotebookClient

pytest.importorskip("ipywidgets", reason="the tests' own extra brings it")

pytestmark = pytest.mark.full_tier
PATIENCE_S = 60.0
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"

Message = dict[str, Any]


class Page:
    """What a notebook's page does: it runs cells, hears all that is published, moves sliders."""

    def __init__(self, kernel: str) -> None:
        self._manager, self._client = start_new_kernel(kernel_name=kernel)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str) -> list[Message]:
        """All that this cell publishes until the kernel is idle again."""
        return self._heard(self._client.execute(code))

    def value(self, expression: str) -> str:
        """As the kernel prints it."""
        (result,) = (item for item in self.run(expression) if item["msg_type"] == "execute_result")
        text: str = result["content"]["data"]["text/plain"]
        return text

    def send(
        self, kind: str, content: Message, buffers: list[bytes] | None = None
    ) -> list[Message]:
        """A comm's message; all that its handler publishes."""
        session = self._client.session
        message = session.msg(kind, content=content)
        session.send(self._client.shell_channel.socket, message, buffers=buffers)
        return self._heard(message["header"]["msg_id"])

    def move(self, comm: str, **state: Any) -> list[Message]:
        update = {"method": "update", "state": state, "buffer_paths": []}
        return self.send("comm_msg", {"comm_id": comm, "data": update})

    def comms(self, target: str) -> set[str]:
        """The kernel's own list of those that are open."""
        request = self._client.comm_info(target_name=target)
        while True:
            reply = self._client.get_shell_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == request:
                return set(reply["content"]["comms"])

    def _heard(self, request: str) -> list[Message]:
        heard: list[Message] = []
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["content"].get("execution_state") == "idle":
                return heard
            heard.append(message)


@pytest.fixture(scope="module")
def page(jupyter_kernels: Any) -> Iterator[Page]:  # noqa: F811  # of the module
    page = Page(DEFAULT)
    page.run("import ipywidgets")
    yield page
    page.close()


def of(heard: list[Message], kind: str) -> list[Message]:
    return [message["content"] for message in heard if message["msg_type"] == kind]


def states(heard: list[Message], comm: str) -> Message:
    """What the kernel says of a widget's state, the last word for each name."""
    said: Message = {}
    for content in of(heard, "comm_msg"):
        if content["comm_id"] == comm and content["data"]["method"] in ("update", "echo_update"):
            said |= content["data"]["state"]
    return said


def slider(page: Page) -> str:
    """Its comm, as the page learns it."""
    heard = page.run("w = ipywidgets.IntSlider(value=3, max=50, description='mass'); w")
    opened = {content["comm_id"]: content for content in of(heard, "comm_open")}
    (shown,) = of(heard, "execute_result") or of(heard, "display_data")
    model: str = shown["data"][VIEW]["model_id"]
    assert opened[model]["target_name"] == "jupyter.widget"
    assert opened[model]["data"]["state"]["_model_name"] == "IntSliderModel"
    assert opened[model]["data"]["state"]["value"] == 3
    return model


@pytest.mark.ci_tier
def test_a_slider_is_shown_moved_and_read(page: Page) -> None:
    comm = slider(page)
    page.move(comm, value=7)
    assert page.value("w.value") == "7"


def test_code_moves_a_slider_on_the_page(page: Page) -> None:
    comm = slider(page)
    assert states(page.run("w.value = 9"), comm) == {"value": 9}


def test_what_a_slider_s_observer_prints_belongs_to_the_move(page: Page) -> None:
    comm = slider(page)
    page.run("w.observe(lambda change: print(change.old, '->', change.new), names='value')")
    heard = page.move(comm, value=12)
    assert [content["text"] for content in of(heard, "stream")] == ["3 -> 12\n"]
    assert "busy" in [content.get("execution_state") for content in of(heard, "status")]


def test_an_error_in_an_observer_is_told_and_the_slider_goes_on(page: Page) -> None:
    comm = slider(page)
    page.run("def broken(change): raise RuntimeError('in an observer')\nw.observe(broken, 'value')")
    heard = page.move(comm, value=4)
    answer = str([content for kind in ("error", "stream") for content in of(heard, kind)])
    assert "in an observer" in answer
    page.run("w.unobserve_all()")
    page.move(comm, value=5)
    assert page.value("w.value") == "5"


def test_sliders_move_each_other(page: Page) -> None:
    """A handler's own messages to the page, for another comm."""
    comm = slider(page)
    heard = page.run(
        "other = ipywidgets.FloatSlider(); ipywidgets.link((w, 'value'), (other, 'value')); other"
    )
    (other,) = {content["data"][VIEW]["model_id"] for content in of(heard, "execute_result")}
    assert states(page.move(comm, value=21), other) == {"value": 21.0}
    assert page.value("other.value") == "21.0"


@pytest.mark.ci_tier
def test_bytes_travel_beside_the_message(page: Page) -> None:
    heard = page.run("picture = ipywidgets.Image(value=bytes(range(256)) * 400); picture")
    (comm,) = {content["data"][VIEW]["model_id"] for content in of(heard, "execute_result")}
    (message,) = (
        item
        for item in heard
        if item["msg_type"] == "comm_open" and item["content"]["comm_id"] == comm
    )
    assert message["content"]["data"]["buffer_paths"] == [["value"]]
    assert [bytes(part) for part in message["buffers"]] == [bytes(range(256)) * 400]

    update = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    page.send("comm_msg", {"comm_id": comm, "data": update}, [b"\x00\xff" * 70_000])
    assert page.value("bytes(picture.value) == b'\\x00\\xff' * 70_000") == "True"


def test_a_button_is_pressed(page: Page) -> None:
    heard = page.run(
        "pressed = []\nb = ipywidgets.Button()\nb.on_click(lambda b: pressed.append('pressed'))\nb"
    )
    (comm,) = {content["data"][VIEW]["model_id"] for content in of(heard, "execute_result")}
    press = {"method": "custom", "content": {"event": "click"}}
    page.send("comm_msg", {"comm_id": comm, "data": press})
    assert page.value("pressed") == "['pressed']"


def test_the_page_reads_which_widgets_there_are(page: Page) -> None:
    """As JupyterLab does after a reload: the list of comms, then the state of each."""
    comm = slider(page)
    assert comm in page.comms("jupyter.widget")
    assert page.comms("no.such.target") == set()
    heard = page.send("comm_msg", {"comm_id": comm, "data": {"method": "request_state"}})
    assert states(heard, comm)["value"] == 3

    closed = page.run("w.close()")
    assert [content["comm_id"] for content in of(closed, "comm_close")] == [comm]
    assert comm not in page.comms("jupyter.widget")


def test_nbclient_keeps_the_state_of_widgets_and_plays_the_output_widget() -> None:
    """Its Output widget answers comms while the cell still runs."""
    nb = notebook(
        "import ipywidgets as ui\nw = ui.IntSlider(value=3); display(w)",
        "w.value = 8",
        "out = ui.Output()\nwith out:\n    print('captured')\nprint('not')\nout",
        "[item['text'] for item in out.outputs]",
    )
    done = NotebookClient(nb, kernel_name=DEFAULT, timeout=int(PATIENCE_S)).execute()
    state = done.metadata.widgets[STATE]["state"]
    slider_id = done.cells[0].outputs[0].data[VIEW]["model_id"]
    out_id = done.cells[2].outputs[-1].data[VIEW]["model_id"]
    assert state[slider_id]["state"]["value"] == 8
    assert state[out_id]["state"]["outputs"][0]["text"] == "captured\n"
    assert done.cells[2].outputs[0].text == "not\n"
    assert done.cells[3].outputs[0].data["text/plain"] == "['captured\\n']"
