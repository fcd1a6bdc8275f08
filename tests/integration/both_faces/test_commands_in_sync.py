"""Background commands, standard input and usage without asyncio, on both faces."""

import pytest

from sbx import Sandbox
from sbx.protocol.commands import CommandState
from sbx.protocol.runs import RunStart, Stdout

pytestmark = pytest.mark.core


@pytest.mark.full_tier
def test_the_synchronous_face_has_the_same(cells: Sandbox) -> None:
    command = cells.commands.start("while read a; do echo got $a; done; exit 2", stdin_open=True)
    command.write("x\n")
    assert next(iter(command.follow())).text == "got x\n"
    command.write(None)
    assert command.wait(60).exit_code == 2
    assert command.status().state is CommandState.EXITED
    assert command.logs().text == "got x\n"
    assert cells.commands.get(command.id).id == command.id
    assert [one.id for one in cells.commands.list()] == [command.id]
    assert cells.commands.start("sleep 100").stop(grace_s=0).exit_code == 137
    assert cells.usage().kernels == 1
    assert len([usage for usage, _ in zip(cells.stream_usage(0.2), range(2), strict=False)]) == 2
    said = ""
    for event in cells.stream_shell("cat", stdin_open=True):
        if isinstance(event, RunStart):
            cells.write_stdin(event.run_id, "typed")
            cells.write_stdin(event.run_id, None)
        said += event.text if isinstance(event, Stdout) else ""
    assert said == "typed"
