"""A box of a project: the person's own files, Python that starts nothing, commands beside it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sbx import Runtime
from sbx.errors import Denied, InvalidPath, SbxError
from sbx.protocol.runs import Run
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession

pytestmark = pytest.mark.core
OWNER = 4242
RUN_LATER = (".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An ordinary user's, with what would run on the host some day."""
    top = tmp_path / "project"
    for name in RUN_LATER:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("as it was")
    (top / "main.py").write_text("answer = 42\n")
    (top / "out").symlink_to("/etc")
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER, follow_symlinks=False)
    return top


@pytest.fixture
async def box(runtime: Runtime, project: Path) -> AsyncIterator[ProjectSession]:
    box = ProjectSession(await open_project(runtime, "default", project))
    yield box
    await box.close()


async def cell(box: ProjectSession, code: str) -> Run:
    return await box.start_run(code).result()


async def changed(box: ProjectSession, code: str) -> Run:
    """Run a cell whose changes of files are approved."""
    changes = await box.begin("code")
    run = await changes.sandbox.start_run(code).result()
    assert run.ok
    await changes.compare()
    await changes.commit()
    return run


async def command(box: ProjectSession, text: str) -> Run:
    return await box.start_shell(text).result()


def listing(project: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: path.lstat() for path in (project, *project.rglob("*"))}
    return {str(path): (one.st_mtime_ns, one.st_size, one.st_mode) for path, one in found.items()}


def owners(project: Path, *names: str) -> set[int]:
    return {(project / name).stat().st_uid for name in names}


def replaced(project: Path, by_symlink: bool) -> None:
    project.rename(project.parent / "moved")
    if by_symlink:
        project.symlink_to("moved")
    else:
        project.mkdir()


@pytest.mark.full_tier
async def test_python_and_commands_share_files_and_nothing_else(
    box: ProjectSession, project: Path
) -> None:
    await changed(box, "from main import answer; open('a.txt', 'w').write('hey')")
    assert (await cell(box, "answer")).result == "42"
    assert (await command(box, "cat a.txt; echo more > b.txt; pwd")).stdout == "hey/workspace\n"
    assert (await changed(box, "open('b.txt').read()")).result == "'more\\n'"
    assert await box.files.read_bytes("/workspace/b.txt") == b"more\n"
    assert await box.files.write("d/c.txt", "x") == 1
    assert owners(project, "a.txt", "b.txt", "d", "d/c.txt") == owners(project, ".")


LEAVES = "setsid sh -c 'sleep 0.5; echo late > late.txt' > /dev/null 2>&1 & echo begun"


async def test_a_command_leaves_nothing_running(box: ProjectSession, project: Path) -> None:
    """A command that was approved left a process, which changed files after its call had ended."""
    for live in (box.start_shell(LEAVES), box.start_script(LEAVES, "bash")):
        run = await live.result()
        assert (run.ok, run.stdout) == (True, "begun\n"), run
        assert not box.sandbox.conversation("default").processes
    assert (await command(box, "sleep 1; ls late.txt")).exit_code == 2
    assert (await command(box, "exit 3")).exit_code == 3
    assert not (project / "late.txt").exists()


@pytest.mark.full_tier
async def test_looks_at_the_links_of_a_directory_at_once_leave_the_last_rules(
    box: ProjectSession, project: Path
) -> None:
    """A kernel once did not start because the watch of the links wrote the rules meanwhile."""
    await cell(box, "1")
    opened = box.sandbox.conversation("default")._opened
    assert opened is not None
    assert opened.quarantine is not None
    for number in range(50):
        (project / f"other-{number}").write_text("")
        (project / ".envrc").unlink(missing_ok=True)
        (project / ".envrc").hardlink_to(project / f"other-{number}")
        await asyncio.gather(*(opened.call(opened.look_at_links) for _ in range(4)))
        rules = json.loads((opened.quarantine.inside / "rules.json").read_text())
        status = (project / ".envrc").stat()
        assert [status.st_dev, status.st_ino] in rules["linked"]


@pytest.mark.full_tier
async def test_the_variables_of_python_stay_when_a_command_ends(box: ProjectSession) -> None:
    await cell(box, "kept = 1")
    assert (await command(box, LEAVES)).ok
    run = await cell(box, "kept")
    assert (run.result, run.state_lost) == ("1", False)


@pytest.mark.full_tier
async def test_a_command_may_leave_a_process_once_commands_are_allowed(box: ProjectSession) -> None:
    await box.allow_commands()
    assert (await command(box, LEAVES)).ok
    assert (await command(box, "until test -e late.txt; do sleep 0.02; done")).ok


@pytest.mark.full_tier
async def test_python_starts_no_process(box: ProjectSession) -> None:
    for code in (
        "import subprocess; subprocess.run(['id'])",
        "!id",
        "%%bash\nid",
        "import os; os.system('id')",
        "import os; getattr(os, 'fo' + 'rk')()",
        "import os; os.posix_spawn('/bin/id', ['id'], {})",
        "import os; os.execv('/bin/id', ['id'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import asyncio; await asyncio.create_subprocess_exec('id')",
    ):
        run = await cell(box, code)
        assert run.status == "error", code
        assert run.error is not None
        assert "allows no processes" in run.error.value, code


@pytest.mark.full_tier
async def test_no_system_call_starts_one_either(box: ProjectSession) -> None:
    """By ctypes, past every name: what linux itself answers is EPERM."""
    await cell(box, "import ctypes; libc = ctypes.CDLL(None, use_errno=True)")
    for call in (
        "libc.fork()",
        "libc.syscall(56, 17, 0, 0, 0, 0)",  # clone
        "libc.execve(b'/bin/true', None, None)",
        "libc.execveat(-100, b'/bin/true', None, None, 0)",
    ):
        assert (await cell(box, f"{call}, ctypes.get_errno()")).result == "(-1, 1)", call


@pytest.mark.full_tier
async def test_python_may_start_processes_once_commands_are_allowed(box: ProjectSession) -> None:
    await cell(box, "kept = 1")
    assert (await command(box, "true")).ok
    await box.allow_commands()
    first = await cell(box, "'kept' in globals()")
    assert (first.result, first.state_lost) == ("False", True)
    second = await cell(box, "!echo by a process")
    assert (second.stdout.strip(), second.state_lost) == ("by a process", False)
    assert box.commands_allowed


async def test_nothing_is_lost_where_there_was_nothing(box: ProjectSession) -> None:
    await box.allow_commands()
    assert not (await cell(box, "1")).state_lost


async def test_a_cell_that_runs_while_commands_are_allowed_is_run_to_its_end(
    box: ProjectSession,
) -> None:
    live = box.start_run(
        "print('on', flush=True)\nimport os, time\n"
        "while not os.path.exists('/uploads/go'): time.sleep(0.01)\n1 + 1"
    )
    async for event in live.events():
        if event.type == "stdout":
            break
    await box.allow_commands()
    await box.uploads.put_bytes("go", b"")
    assert (await live.result()).result == "2"
    assert (await cell(box, "1")).state_lost


@pytest.mark.full_tier
async def test_a_run_that_nobody_waits_for_is_given_up(box: ProjectSession) -> None:
    live = box.start_run("import time; print('on', flush=True); time.sleep(60)")
    async for event in live.events():
        if event.type == "stdout":
            break
    await box.give_up(live)
    assert (await live.result()).status == "interrupted"


@pytest.mark.unprivileged
async def test_what_would_run_on_the_host_stays_as_it_is(
    box: ProjectSession, project: Path
) -> None:
    for name in RUN_LATER:
        run = await cell(box, f"open({name!r}, 'w').write('planted')")
        assert run.status == "error", name
        assert not (await command(box, f"echo planted > {name}")).ok
        with pytest.raises(Denied) as raised:
            await box.files.write(name, "planted")
        assert (raised.value.code, bool(raised.value.hint)) == ("runs_on_the_host", True)
    for name in (".git", ".vscode", ".envrc"):
        assert (await cell(box, f"import os; os.rename({name!r}, 'moved')")).status == "error"
        with pytest.raises(Denied):
            await box.files.move(name, "moved")
        with pytest.raises(Denied):
            await box.files.delete(name)
    assert {(project / name).read_text() for name in RUN_LATER} == {"as it was"}
    with pytest.raises(Denied):
        await box.files.write(".git/index", "its own")  # git trusts the paths in it


async def test_file_calls_stay_in_the_directory(box: ProjectSession, project: Path) -> None:
    (project.parent / "secret").write_text("secret")
    for path in (
        "../secret",
        "/etc/passwd",
        str(project.parent / "secret"),
        "out/passwd",
        "/tmp/x",
    ):
        with pytest.raises(InvalidPath):
            await box.files.read_bytes(path)
        with pytest.raises(InvalidPath):
            await box.files.write(path, "x")
    for path in ("/mnt/results/../../etc/passwd", "/mnt/results/..", "/mnt/results/a/b"):
        with pytest.raises(InvalidPath):
            await box.files.read_bytes(path)
    assert (await cell(box, f"open({str(project.parent / 'secret')!r})")).status == "error"


async def test_nothing_of_ours_is_written_into_it(box: ProjectSession, project: Path) -> None:
    before = listing(project)
    await cell(box, "import json, matplotlib, main; x = 1")
    await command(box, "cd ~ && touch mine && python3 -c 'import json'")
    await box.uploads.put_bytes("u.csv", b"1,2\n")
    path = await box.save_result("long.txt", b"all of it")
    assert await box.files.read_bytes(path) == b"all of it"
    assert (await command(box, "cat /uploads/u.csv")).stdout == "1,2\n"
    await box.close()
    assert listing(project) == before


async def test_a_result_that_was_saved_is_found(box: ProjectSession) -> None:
    path = await box.save_result("long.txt", b"all of it")
    assert (await box.files.stat(path)).path == path
    assert [entry.path for entry in await box.files.list("/mnt/results")] == [path]
    assert (await cell(box, f"open({path!r}).read()")).result == "'all of it'"
    assert (await command(box, f"cat {path}")).stdout == "all of it"
    with pytest.raises(InvalidPath):
        await box.save_result("../out", b"")
    with pytest.raises(InvalidPath):
        await box.files.write(path, "x")


async def test_a_symlink_in_its_place_is_not_opened(runtime: Runtime, project: Path) -> None:
    replaced(project, by_symlink=True)
    before = runtime.unowned_directories
    with pytest.raises(Denied) as raised:
        await open_project(runtime, "default", project)
    assert raised.value.code == "not_granted"
    assert runtime.unowned_directories <= before


async def test_another_directory_in_its_place_is_not_mounted(
    box: ProjectSession, project: Path
) -> None:
    replaced(project, by_symlink=False)
    with pytest.raises(SbxError):
        await cell(box, "1")


async def test_nothing_is_left_of_it_but_the_directory(own_runtime: Runtime, project: Path) -> None:
    box = ProjectSession(await open_project(own_runtime, "default", project))
    await box.uploads.put_bytes("u.csv", b"1,2\n")
    assert own_runtime.unowned_directories  # so that no collection takes its files for left over
    await box.close()
    assert not own_runtime.unowned_directories
    assert not own_runtime.data.sandboxes()
    assert (project / "main.py").exists()


async def test_a_dry_run_of_a_command_is_committed(box: ProjectSession, project: Path) -> None:
    before = listing(project)
    dry_run = await box.dry_run("echo 43 > main.py; echo new > new.txt; echo done")
    assert dry_run.run.stdout == "done\n"
    assert {one.path for one in dry_run.changes} == {"/workspace/main.py", "/workspace/new.txt"}
    assert listing(project) == before
    checkpoint = await box.checkpoint()
    await dry_run.commit()
    assert await box.files.read_bytes("main.py") == b"43\n"
    await checkpoint.restore()
    assert sorted(listing(project)) == sorted(before)
    assert await box.files.read_bytes("main.py") == b"answer = 42\n"


@pytest.mark.full_tier
async def test_no_dry_run_changes_what_would_run_on_the_host(
    box: ProjectSession, project: Path
) -> None:
    before = {name: await box.files.read_bytes(name) for name in RUN_LATER}
    for name in RUN_LATER:
        dry_run = await box.dry_run(
            f"echo planted > {name}; rm -rf {name}; mv .git moved; echo on > new.txt"
        )
        assert [one.path for one in dry_run.changes] == ["/workspace/new.txt"], name
        await dry_run.discard()
    assert {name: await box.files.read_bytes(name) for name in RUN_LATER} == before
