"""Every call of the host's API on the names that a program of the host obeys: refused by name, and
nothing changed. A model may have asked for the call."""

import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from attacking import one_path

from sbx import Runtime
from sbx.agent.messages import ToolCall
from sbx.agent.tools.execution import unheard
from sbx.agent.tools.registry import Tools
from sbx.errors import Denied
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = one_path("fork")  # most tests start no kernel
OWNER = 4242
Act = Callable[[AsyncSandbox, str], Awaitable[object]]
NAMES = (".envrc", "sub/.git/config", ".vscode/tasks.json", "new/.envrc", "new/.git/config")
EXISTING = NAMES[:3]


def owned(top: Path) -> None:
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER, follow_symlinks=False)


def contents(top: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(top)): path.read_bytes() if path.is_file() else None
        for path in sorted(top.rglob("*"))
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    for name in EXISTING:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("as it was")
    (top / "file").write_text("planted")
    (top / "directory").mkdir()
    (top / "directory" / "config").write_text("planted")
    for name in (".envrc", ".vscode/tasks.json"):  # free there: no program reads it
        (top / "node_modules/x" / name).parent.mkdir(parents=True, exist_ok=True)
        (top / "node_modules/x" / name).write_text("planted")
    owned(top)
    return top


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    top = tmp_path / "uploads"
    (top / "repo/.git").mkdir(parents=True)
    (top / "repo/.git/config").write_text("planted")
    owned(top)
    return top


@pytest_asyncio.fixture
async def box(runtime: Runtime, project: Path, uploads: Path) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(workspace=project, uploads=uploads) as box:
        yield box


async def refused(project: Path, act: Awaitable[object]) -> None:
    before = contents(project)
    with pytest.raises(Denied) as raised:
        await act
    assert (raised.value.code, bool(raised.value.hint)) == ("runs_on_the_host", True)
    assert contents(project) == before


async def _partial(box: AsyncSandbox, path: str) -> None:
    await box.files.partials.begin(path, 1)


async def _stream(box: AsyncSandbox, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"

    await box.files.write_stream(path, pieces())


CALLS: dict[str, Act] = {
    "write": lambda box, path: box.files.write(path, "planted"),
    "write below": lambda box, path: box.files.write(f"{path}/x", "planted"),
    "stream": _stream,
    "resumable upload": _partial,
    "make directory": lambda box, path: box.files.make_directory(path),
    "copy onto": lambda box, path: box.files.copy("file", path),
    "copy onto, overwrite": lambda box, path: box.files.copy("file", path, overwrite=True),
    "copy a directory onto": lambda box, path: box.files.copy("directory", path),
    "move onto": lambda box, path: box.files.move("file", path),
    "move onto, overwrite": lambda box, path: box.files.move("file", path, overwrite=True),
    "move a directory onto": lambda box, path: box.files.move("directory", path),
    "unpack below": lambda box, path: box.files.unpack(b"", path),
}
ON_EXISTING: dict[str, Act] = {
    "replace text": lambda box, path: box.files.replace(path, "was", "is"),
    "chmod": lambda box, path: box.files.chmod(path, 0o755),
    "delete": lambda box, path: box.files.delete(path),
    "move away": lambda box, path: box.files.move(path, "elsewhere"),
}


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_onto_a_protected_name_is_refused(
    box: AsyncSandbox, project: Path, call: str, path: str
) -> None:
    await refused(project, CALLS[call](box, path))


@pytest.mark.parametrize("path", EXISTING)
@pytest.mark.parametrize("call", ON_EXISTING)
async def test_a_call_on_a_protected_file_is_refused(
    box: AsyncSandbox, project: Path, call: str, path: str
) -> None:
    await refused(project, ON_EXISTING[call](box, path))


@pytest.mark.parametrize("path", ["sub", "sub/.git", ".vscode"])
async def test_a_directory_with_a_protected_name_stays(
    box: AsyncSandbox, project: Path, path: str
) -> None:
    await refused(project, box.files.delete(path))
    await refused(project, box.files.move(path, "elsewhere"))


@pytest.mark.parametrize("target", ["x", "directory/x", "node_modules2"])
async def test_a_package_does_not_leave_its_tree_with_a_name(
    box: AsyncSandbox, project: Path, target: str
) -> None:
    """A program reads .envrc there, and none in node_modules."""
    source = "node_modules" if target == "node_modules2" else "node_modules/x"
    await refused(project, box.files.move(source, target))
    await refused(project, box.files.copy(source, target))


@pytest.mark.parametrize("source", ["sub", "/uploads/repo"])
async def test_a_copied_directory_brings_no_protected_name(
    box: AsyncSandbox, project: Path, source: str
) -> None:
    await refused(project, box.files.copy(source, "elsewhere"))
    await refused(project, box.files.copy(source, "directory/elsewhere"))


async def test_no_repository_is_made_of_its_parts(box: AsyncSandbox, project: Path) -> None:
    """Git obeys a directory that has HEAD, objects and refs, whatever its name. Code inside could
    create the others at the same time, so that HEAD is refused before there is any of them."""
    await box.files.write("bare/config", "[core]\n")
    await refused(project, box.files.write("bare/HEAD", "ref: refs/heads/main\n"))
    await refused(project, box.files.move("file", "bare/HEAD"))
    await box.files.write("bare/objects/x", "")
    await refused(project, box.files.write("fresh/.git/objects/x", ""))
    await refused(project, box.files.write("fresh.git/objects/x", ""))
    await box.files.write("other/HEAD/x", "a directory is no head")


async def test_no_repository_is_made_around_a_head_of_the_user(
    box: AsyncSandbox, project: Path
) -> None:
    (project / "bare").mkdir()
    (project / "bare/HEAD").write_text("ref: refs/heads/main\n")
    owned(project)
    for act in (
        box.files.write("bare/refs/heads/x", ""),
        box.files.make_directory("bare/objects"),
        box.files.write("bare/commondir", "../evil"),
        box.files.write("bare/HEAD", "ref: refs/heads/other\n"),
        box.files.copy("bare", "elsewhere"),
        box.files.move("bare", "elsewhere"),
        box.files.delete("bare"),
    ):
        await refused(project, act)


async def test_a_file_with_names_outside_is_replaced_not_changed(
    box: AsyncSandbox, project: Path
) -> None:
    outside = project.parent / "store"
    outside.write_text("as it was")
    os.chmod(outside, 0o644)
    os.chown(outside, *((OWNER, OWNER) if os.geteuid() == 0 else (-1, -1)))
    for name in ("written", "edited", "mode"):
        os.link(outside, project / name)
    await box.files.write("written", "new")
    await box.files.replace("edited", "was", "is")
    with pytest.raises(Denied) as raised:
        await box.files.chmod("mode", 0o777)
    assert raised.value.code == "file_not_permitted"
    assert (outside.read_text(), outside.stat().st_mode & 0o777) == ("as it was", 0o644)
    assert (project / "written").read_text() == "new"
    assert (project / "edited").read_text() == "as it is"


async def test_a_conda_environment_is_refused(box: AsyncSandbox, project: Path) -> None:
    (project / "env/bin").mkdir(parents=True)
    (project / "env/conda-meta").mkdir()
    owned(project)
    await refused(project, box.files.write("env/bin/python", "planted"))
    await refused(project, box.files.make_directory("fresh/conda-meta"))


async def test_a_committed_dry_run_brings_no_repository(box: AsyncSandbox, project: Path) -> None:
    made = "mkdir -p b/objects b/refs; echo ref: refs/heads/m > b/HEAD; echo > b/config"
    dry_run = await box.dry_run(made)
    assert [item.path for item in dry_run.run.quarantined] == ["b/HEAD"]
    await dry_run.commit()
    assert sorted(path.name for path in (project / "b").iterdir()) == ["config", "objects", "refs"]


async def test_what_a_protected_link_leads_to_is_protected_before_a_kernel_starts(
    box: AsyncSandbox, project: Path
) -> None:
    (project / "config").mkdir()
    (project / "config" / "envrc").write_text("as it was")
    (project / "evil").mkdir()
    (project / "evil" / "envrc").write_text("planted")
    (project / "sub2").mkdir()
    (project / "sub2" / ".envrc").symlink_to("../config/envrc")
    owned(project)
    await refused(project, box.files.write("config/envrc", "planted"))
    await refused(project, box.files.move("config", "old"))
    await refused(project, box.files.delete("config"))


async def test_a_second_name_of_a_protected_file_keeps_its_mode(
    box: AsyncSandbox, project: Path
) -> None:
    os.link(project / ".envrc", project / "second")
    await refused(project, box.files.chmod("second", 0o777))


async def test_no_moved_symlink_leads_out(box: AsyncSandbox, project: Path) -> None:
    (project / "a/b").mkdir(parents=True)
    (project / "a/b/link").symlink_to("../../file")
    owned(project)
    for call in (
        box.files.move("a/b/link", "link"),
        box.files.move("a/b", "b"),
        box.files.copy("a/b", "b"),
    ):
        with pytest.raises(Denied) as raised:
            await call
        assert raised.value.code == "symlink_leads_out"
    await box.files.move("a/b", "a/c")


@pytest.mark.parametrize("tool", ["write_file", "edit_file"])
@pytest.mark.parametrize("path", EXISTING)
async def test_a_model_s_tool_is_refused(
    box: AsyncSandbox, project: Path, tool: str, path: str
) -> None:
    before = contents(project)
    arguments = {"path": path, "content": "x", "old_string": "was", "new_string": "is"}
    wanted = ("path", "content") if tool == "write_file" else ("path", "old_string", "new_string")
    text = json.dumps({name: arguments[name] for name in wanted})
    tools = Tools()
    sandbox = box.conversation("default")
    await tools.call(ToolCall("call-0", "read_file", f'{{"path": "{path}"}}'), sandbox, unheard)
    result = await tools.call(ToolCall("call-1", tool, text), sandbox, unheard)
    assert result.is_error
    assert "runs_on_the_host" in result.text
    assert contents(project) == before


async def test_an_archive_goes_to_the_quarantine(box: AsyncSandbox, project: Path) -> None:
    """It is unpacked inside: no name of the table is refused there, and none arrives."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("new/.envrc", "new/.git/config", "new/free"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    await box.files.unpack(packed.getvalue(), ".")
    assert (project / "new/free").read_text() == "x"
    assert not (project / "new/.envrc").exists()
    assert not (project / "new/.git").exists()
    run = await box.shell("cat new/.envrc new/.git/config")
    assert (run.stdout, run.exit_code) == ("xx", 0)
    assert {item.path for item in run.quarantined} == {"new/.envrc", "new/.git"}


@pytest.mark.parametrize(
    ("name", "file"), [("pip", "__init__.py"), ("keyword", "__init__.so"), ("lab", "index.html.j2")]
)
async def test_a_directory_does_not_get_a_name_that_its_content_needs(
    box: AsyncSandbox, project: Path, name: str, file: str
) -> None:
    (project / "made").mkdir()
    (project / "made" / file).write_text("planted")
    (project / "way").symlink_to("made")
    owned(project)
    await refused(project, box.files.move("made", name))
    await refused(project, box.files.copy("made", name))
    await refused(project, box.files.move("way", name))
    await refused(project, box.files.write(f"{name}/{file}", "planted"))
    await box.files.move("directory", name)  # nothing in it counts
    assert (project / name / "config").read_text() == "planted"
    await refused(project, box.files.copy(f"made/{file}", f"{name}/{file}"))


async def test_free_names_stay_free(box: AsyncSandbox, project: Path) -> None:
    await box.files.write("src/main.py", "x")
    await box.files.copy("directory", "src/copied")
    await box.files.move("src", "lib")
    await box.files.move("node_modules/x", "node_modules/y")
    assert await box.files.delete("node_modules")
    assert sorted(path.name for path in (project / "lib").iterdir()) == ["copied", "main.py"]
