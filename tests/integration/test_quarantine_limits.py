"""The quarantine has a limit, and keeps no item of changes that were dropped."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sbx import AsyncSandbox, Runtime
from sbx.runtime.settings import Settings
from sbx.service.projects.changes import CodeChanges
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession
from sbx.workspace import quarantine
from sbx.workspace.quarantine import QuarantineItem

pytestmark = pytest.mark.core
SMALL = {"limits": {"workspace_max": "8MiB"}}
FILL = """
import os, time
os.mkdir(".git")
with open(".git/large", "wb") as file:
    for _ in range(64):
        file.write(bytes(1 << 20))
        file.flush()
time.sleep(50)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    top.mkdir()
    if os.geteuid() == 0:
        os.chown(top, 4242, 4242)
    return top


@pytest.fixture
async def box(runtime: Runtime, project: Path) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(workspace=project, narrower=SMALL) as box:
        yield box


@pytest.fixture
async def tried(runtime: Runtime, project: Path) -> AsyncIterator[ProjectSession]:
    box = ProjectSession(await open_project(runtime, "default", project, narrower=SMALL))
    yield box
    await box.close()


def items(runtime: Runtime, project: Path) -> list[QuarantineItem]:
    """The items of this project; all tests of a process have one store."""
    assert runtime._resources is not None
    store = runtime._resources.protection.quarantines
    return [one for one in quarantine.items(store) if one.directory == str(project)]


async def test_run_that_fills_the_quarantine_is_killed(box: AsyncSandbox) -> None:
    """The quarantine of a directory of the host was not measured."""
    done = await box.run(FILL)
    assert (str(done.status), str(done.cause)) == ("killed", "disk")


async def act(box: ProjectSession, code: str) -> CodeChanges:
    changes = await box.begin("code")
    assert isinstance(changes, CodeChanges)
    await changes.start_run(code).result()
    return changes


@pytest.mark.full_tier
async def test_dry_run_that_fills_the_quarantine_is_killed(tried: ProjectSession) -> None:
    """Only the copy was measured, and not the quarantine beside it."""
    changes = await tried.begin("command")
    assert isinstance(changes, CodeChanges)
    fill = "mkdir .git; head -c 64M /dev/zero > .git/large; sleep 30"
    run = await changes.start_shell(fill).result()
    assert (str(run.status), str(run.cause)) == ("killed", "disk")
    await changes.rollback()


async def test_items_of_a_call_stay_only_where_it_is_committed(
    tried: ProjectSession, runtime: Runtime, project: Path
) -> None:
    """Each dry run left its items, whatever became of it."""
    talk = tried.sandbox.conversation("default")
    for path, commits in (("a", False), ("b", True), ("c", False)):
        make = f"import os; os.mkdir('{path}'); open('{path}/.envrc', 'w').write('x')"
        move = f"os.rename('{path}', '{path}2')"
        changes = await act(tried, f"{make}; {move}")
        assert (await changes.compare()).run is not None
        assert f"{path}/.envrc" in [one.path for one in items(runtime, project)]
        await (changes.commit() if commits else changes.rollback())
    assert [one.path for one in items(runtime, project)] == ["b/.envrc"]
    changes = await act(tried, "print(sorted(os.listdir()))")
    there = await changes.compare()
    assert there.run is not None
    assert there.run.stdout == "['b2']\n"
    await changes.rollback()
    assert talk.busy is False
    await tried.close()
    assert len(items(runtime, project)) == 1
    assert os.listdir(project) == ["b2"]


@pytest.mark.full_tier
async def test_items_of_a_dry_run_stay_only_where_it_is_committed(
    box: AsyncSandbox, runtime: Runtime, project: Path
) -> None:
    """Each dry run left its items, whatever became of it."""
    made = [await box.dry_run("echo x > .envrc") for _ in range(3)]
    assert len(items(runtime, project)) == 3
    await made[0].discard()
    assert len(items(runtime, project)) == 2
    await made[1].commit()
    await box.close()
    assert len(items(runtime, project)) == 1


@pytest.mark.full_tier
async def test_names_that_an_operator_added_are_quarantined_in_a_dry_run(project: Path) -> None:
    """The copy had the table without them: such a change was dropped without a word."""
    settings = Settings(host_executables_add=("deploy.ini",))
    async with Runtime(settings) as runtime:
        tried = ProjectSession(await open_project(runtime, "default", project))
        changes = await act(tried, "open('deploy.ini', 'w').write('x')")
        there = await changes.compare()
        assert there.run is not None
        assert [one.path for one in there.run.quarantined] == ["deploy.ini"]
        await changes.commit()
        await tried.close()
        assert [one.path for one in items(runtime, project)] == ["deploy.ini"]
    assert os.listdir(project) == []
