"""The program that an agent's tools send inside, here on directories of the host."""

import base64
import json
import os
from typing import Any

import pytest

from sbx.guest.tools import tmp_files


def listed(capsys: pytest.CaptureFixture[str], path: str, pattern: str) -> Any:
    asked = {"act": "list", "path": path, "pattern": pattern, "most": 10}
    tmp_files.main(base64.b64encode(json.dumps(asked).encode()).decode())
    return json.loads(capsys.readouterr().out)


@pytest.mark.skipif(
    not os.path.ismount("/dev/pts") or not os.path.exists("/dev/pts/ptmx"),
    reason="this host has no file system in /dev/pts",
)
def test_a_list_stays_on_the_file_system_of_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    """A virtual environment below /tmp is mounted there, and its files used up the list."""
    found = listed(capsys, "/dev", "pt[ms]*")
    assert found["complete"]
    assert {one["path"] for one in found["entries"]} == {"/dev/pts", "/dev/ptmx"}
    (inside,) = listed(capsys, "/dev/pts", "ptmx")["entries"]
    assert inside["path"] == "/dev/pts/ptmx"
