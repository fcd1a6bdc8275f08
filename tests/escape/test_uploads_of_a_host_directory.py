"""Uploads next to a host directory: code inside cannot put false ones in their place."""

import os
from pathlib import Path

import pytest

import sbx
from sbx import Sandbox

_REPLACE = """
import os
for name in ("/workspace/uploads", "/uploads"):
    try:
        os.rename(name, name + "-true")
        os.makedirs(name + "/temparea")
        for place in (name, name + "/temparea"):
            with open(place + "/report.csv", "w") as file:
                file.write("false")
    except OSError:
        pass
"""


def _given(directory: Path) -> Path:
    directory.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(directory, 4242, 4242)
    return directory


@pytest.mark.parametrize("mounted", [False, True], ids=["copied", "mounted"])
def test_uploads_cannot_be_replaced_by_renaming_their_parent(
    own_temporary_directory: Path, mounted: bool
) -> None:
    top = own_temporary_directory / f"uploads-{mounted}"
    project = _given(top / "project")
    _given(project / "uploads")
    _given(project / "uploads" / "temparea")
    source = _given(top / "source")
    (source / "report.csv").write_text("true")
    with Sandbox(workspace=project, uploads=source if mounted else None) as box:
        if not mounted:
            box.uploads.put_bytes("report.csv", b"true")
        box.run(_REPLACE)
        assert box.run("open('/uploads/report.csv').read()").result == "'true'"
        assert box.files.read("/uploads/report.csv") == "true"
    sbx.close()
