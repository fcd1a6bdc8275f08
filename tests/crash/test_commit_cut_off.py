"""A service, and a runtime, that is killed while it makes an approved effect real."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sbx.protocol.runs import Status
from sbx.runtime.data_dir import DataDirLock
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.run import RunRequest
from sbx.service.service import Service

ROOT = Path(__file__).resolve().parents[2]
ME = Caller("me", "key")
OWNER = 4242
EFFECT = "rm gone; echo new > changed; mkdir made; echo x > made/file"

KILLING = f"""
import asyncio, os, signal, sys
from pathlib import Path
from sbx import Runtime
from sbx.service.caller import Caller
from sbx.service.service import Service
from sbx.service.projects.session import ProjectSession
from sbx.service.run import RunRequest
from sbx.runtime.settings import Settings
from sbx.service.projects.sandbox import open_project
from sbx.workspace.snapshots import apply

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

async def commit(talk):
    dry_run = await talk.dry_run({EFFECT!r})
    apply.exchange = kill  # the last of its steps, but for modes
    await dry_run.commit()
"""
SERVICE = (
    KILLING
    + """
async def main(data):
    me = Caller("me", "key")
    service = await Service(Settings(data_dir=data)).start()
    made = await service.sandboxes.create(me, ttl_s=3600)
    code = "open('gone', 'w').write('there'); open('changed', 'w').write('old')"
    await (await service.runs.start(me, made.id, "default", RunRequest("python", code))).result()
    print(made.id, flush=True)
    async with service.sandboxes.using(me, made.id, scope="execute", conversation="default") as use:
        await commit(use.conversation("default"))

asyncio.run(main(Path(sys.argv[1])))
"""
)
PROJECT = (
    KILLING
    + """
async def main(project):
    async with Runtime() as runtime:
        await commit(ProjectSession(await open_project(runtime, "default", project)))

asyncio.run(main(Path(sys.argv[1])))
"""
)


def killed(program: str, path: Path, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    return ended.stdout.strip()


def there(data: Path, pattern: str) -> list[Path]:
    """In conversations."""
    return list(data.glob(f"sandboxes/*/*/{pattern}"))


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


async def test_a_service_that_was_killed_has_undone_it_when_it_is_back(tmp_path: Path) -> None:
    made = killed(SERVICE, tmp_path)
    journal, *_ = there(tmp_path, "staging/journal-*")
    assert names(journal.parents[1] / "files") == ["changed", "made", "uploads"]
    async with Service(Settings(data_dir=tmp_path)) as service:
        code = (
            "import os; print(*sorted(os.listdir()), open('gone').read(), open('changed').read())"
        )
        run = await (
            await service.runs.start(ME, made, "default", RunRequest("python", code))
        ).result()
        assert (run.status, run.stdout) == (Status.OK, "changed gone uploads there old\n")
        assert there(tmp_path, "staging/*") == []


@pytest.mark.full_tier
def test_a_directory_of_the_host_is_as_it_was_when_the_next_runtime_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name, text in (("gone", "there"), ("changed", "old")):
        (project / name).write_text(text)
    if os.geteuid() == 0:
        for path in (project, *project.iterdir()):
            os.chown(path, OWNER, OWNER)
    (tmp_path / "temporary").mkdir()
    killed(PROJECT, project, TMPDIR=str(tmp_path / "temporary"))
    assert names(project) == ["changed", "made"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    DataDirLock(None).close()
    assert {path.name: path.read_text() for path in project.iterdir()} == {
        "changed": "old",
        "gone": "there",
    }
    assert names(tmp_path / "temporary") == []
