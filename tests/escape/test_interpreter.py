"""What is shown for the interpreter's sake is the interpreter, and nothing that lies beside it."""

import os
import sys
from pathlib import Path

import pytest
from attacking import Fresh, tell

from sbx.environments import interpreter
from sbx.environments.interpreter import interpreter_of
from sbx.runtime import runtime as runtime_of

pytestmark = pytest.mark.core


@pytest.mark.unprivileged
async def test_a_link_to_python_in_a_home_does_not_show_that_home(
    own_temporary_directory: Path,
) -> None:
    """`~/python` used to bind all of `~`, read-only: keys and tokens included."""
    home = own_temporary_directory / "home"
    home.mkdir()
    (home / "secret").write_text("token")
    (home / "python").symlink_to(sys.executable)
    found = interpreter_of(str(home / "python"), (sys.prefix, sys.base_prefix))
    assert str(home) not in found.prefixes
    assert (str(home / "python"), sys.executable) in found.links


async def test_a_kernel_starts_by_a_chain_of_links_and_sees_only_the_links(
    fresh: Fresh, own_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch, started_by: str
) -> None:
    place = own_temporary_directory / f"bin-{started_by}"
    place.mkdir()
    (place / "secret").write_text("token")
    (place / "python").symlink_to("python3")
    (place / "python3").symlink_to(os.path.realpath(sys.executable))  # noqa: ASYNC240
    shown = interpreter_of(str(place / "python"), (sys.prefix, sys.base_prefix))
    real = interpreter.own_interpreter()
    chained = type(real)(real.executable, shown.prefixes, shown.links)
    monkeypatch.setattr(runtime_of, "own_interpreter", lambda: chained)
    box = await fresh()
    assert await tell(box, f"sorted(os.listdir({str(place)!r}))") == ["python", "python3"]
    assert await tell(box, f"subprocess.run([{str(place / 'python')!r}, '-c', '']).returncode") == 0
