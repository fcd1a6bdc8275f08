"""A directory of the workspace is on PATH: the next command of the user runs a program in it."""

import os
from pathlib import Path

import pytest
from planting import make_place, sandbox

from sbx import Runtime
from sbx.errors import Denied
from tests.tiers import rows

pytestmark = [
    pytest.mark.parametrize(
        "started_by", rows(["fork", "cold"], ["fork"]), indirect=True, scope="module"
    ),
]
ATTEMPTS = {
    "a new program": "echo x > node_modules/.bin/pg",
    "an existing program": "echo x >> node_modules/.bin/tsc",
    "another name": "ln node_modules/.bin/tsc other && echo x >> other",
    "in place of the directory": "mv node_modules old",
    "where the symlink leads": "echo x > tools/pg",
    "another symlink": "mkdir mine && ln -sfn mine linked",
    "a missing directory": "mkdir -p bin && echo x > bin/pg",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
async def test_code_inside_writes_no_program_of_path(
    runtime: Runtime,
    own_temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    started_by: str,
    attempt: str,
) -> None:
    place = make_place(own_temporary_directory / f"path-{started_by}-{abs(hash(attempt))}")
    place.user("sh", "-c", "mkdir -p node_modules/.bin tools && ln -s tools linked")
    place.user("sh", "-c", "echo compiler > node_modules/.bin/tsc")
    entries = (str(place.directory / name) for name in ("node_modules/.bin", "linked", "bin"))
    monkeypatch.setenv("PATH", os.pathsep.join([*entries, os.environ["PATH"]]))
    async with sandbox(runtime, place) as box:
        assert (await box.shell("echo x > node_modules/free && echo x > free")).ok
        assert not (await box.shell(ATTEMPTS[attempt])).ok
        with pytest.raises(Denied) as raised:
            await box.files.write("node_modules/.bin/pg", "x")
        assert raised.value.code == "runs_on_the_host"
    for program in ("node_modules/.bin/pg", "linked/pg", "bin/pg"):
        assert not (place.directory / program).exists()
    assert (place.directory / "node_modules/.bin/tsc").read_text() == "compiler\n"
    assert (place.directory / "linked").readlink() == Path("tools")
