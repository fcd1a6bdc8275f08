"""No tool changes a file of a project before its changes are decided: by a person or a setting."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from persistent_sandboxes import eventually

from sbx import Runtime
from sbx.agent.agent import Agent
from sbx.agent.approvals import Approvals
from sbx.agent.messages import Message, Response, ToolCall
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.execution import followed
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolCallRequest
from sbx.protocol.agent import AgentEvent, ToolApproval, ToolEnd, ToolOutput, ToolPending, ToolStart
from sbx.protocol.approvals import ApprovalScope
from sbx.protocol.changes import ChangesSetting
from sbx.service.projects.sandbox import ProjectConversation, open_project
from sbx.service.projects.session import ProjectSession

pytestmark = pytest.mark.core
OWNER = 4242
ME = ApprovalScope("local")
ASK, ALLOW = ChangesSetting(), ChangesSetting("allow")
TESTS = ChangesSetting("ask", ("tests",))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    (top / "tests").mkdir(parents=True)
    (top / "src").mkdir()
    (top / "main.py").write_text("answer = 42\n")
    (top / "src/a.txt").write_text("a\n")
    (top / "tests/t.txt").write_text("t\n")
    belongs(top)
    return top


def belongs(top: Path) -> None:
    """Give it all to an ordinary user, where the tests run as root."""
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER, follow_symlinks=False)


def make_repository(top: Path) -> None:
    """As the user would, on the host."""
    for words in (["init", "-q", "."], ["add", "-A"]):
        subprocess.run(["git", "-c", "safe.directory=*", *words], cwd=top, check=True, timeout=60)
    belongs(top)


@pytest.fixture
async def box(runtime: Runtime, project: Path) -> AsyncIterator[ProjectSession]:
    box = ProjectSession(await open_project(runtime, "default", project))
    yield box
    await box.close()


def code(text: str, **more: Any) -> ToolCall:
    return ToolCall("theirs", "run_code", json.dumps({"code": text, **more}))


def command(text: str) -> ToolCall:
    return ToolCall("theirs", "execute_command", json.dumps({"command": text}))


def write(path: str, content: str) -> ToolCall:
    return ToolCall("theirs", "write_file", json.dumps({"path": path, "content": content}))


def edit(path: str, old: str, new: str) -> ToolCall:
    arguments = {"path": path, "old_string": old, "new_string": new}
    return ToolCall("theirs", "edit_file", json.dumps(arguments))


class Made:
    """What became of one call."""

    def __init__(self, events: list[AgentEvent]) -> None:
        (self.start,) = [event for event in events if isinstance(event, ToolStart)]
        questions = [event for event in events if isinstance(event, ToolPending)]
        self.question = questions[0] if questions else None
        (self.end,) = [event for event in events if isinstance(event, ToolEnd)]
        self.printed = "".join(event.text for event in events if isinstance(event, ToolOutput))
        self.order = [event.type for event in events]
        self.approved = [event.approved for event in events if isinstance(event, ToolApproval)]

    @property
    def asked(self) -> bool:
        return self.question is not None

    @property
    def changed(self) -> dict[str, str | None]:
        """The diffs that a person was shown, by path."""
        assert self.dry_run is not None
        return {one["path"]: one["diff"] for one in self.dry_run["changes"]}

    @property
    def dry_run(self) -> dict[str, Any] | None:
        return None if self.question is None else self.question.dry_run


async def made(
    box: ProjectSession,
    call: ToolCall,
    answer: bool | None = None,
    *,
    setting: ChangesSetting = ASK,
    meanwhile: Callable[[], object] = lambda: None,
    tools: Tools | None = None,
) -> Made:
    """Make a call as a model would. `answer` is the person's; None: nobody is to be asked."""
    approvals = Approvals()

    async def read() -> ChangesSetting:
        return setting

    agent = Agent(
        box,
        ReplayModel([Response("", (call,), stop="tools"), "ok"]),
        approvals=approvals,
        permissions=Permissions("project"),
        changes=read,
        tools=tools,
    )
    events = []
    async with asyncio.timeout(120), aclosing(agent.stream("go")) as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, ToolPending):
                assert answer is not None, f"asked about {event.dry_run}"
                meanwhile()
                await approvals.decide(ME, event.tool_call_id, answer)
    return Made(events)


def content(top: Path) -> dict[str, str]:
    files = (path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(top)): path.read_text() for path in files}


# -- ask -------------------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_a_cell_that_changes_files_is_asked_about_with_a_diff(
    box: ProjectSession, project: Path
) -> None:
    before = content(project)
    text = (
        "import os; kept = 7; open('main.py', 'a').write('more = 1\\n');"
        " os.mkdir('d'); open('d/new.txt', 'w').write('new\\n'); os.remove('src/a.txt')"
    )
    no = await made(box, code(text), False, meanwhile=unchanged(project))
    assert no.changed == {
        "/workspace/d/new.txt": "@@ -0,0 +1,1 @@\n+new",
        "/workspace/main.py": "@@ -1,1 +1,2 @@\n answer = 42\n+more = 1",
        "/workspace/src/a.txt": "@@ -1,1 +0,0 @@\n-a",
    }
    assert no.end.is_error
    assert "changes of files were dropped" in no.end.result
    assert "variables are kept" in no.end.result
    assert content(project) == before
    look = await made(box, code("kept, sorted(os.listdir()), open('main.py').read()"))
    assert look.end.result.strip().endswith("(7, ['main.py', 'src', 'tests'], 'answer = 42\\n')")

    yes = await made(box, code(text), True)
    assert yes.changed == no.changed
    assert not yes.end.is_error
    assert content(project) == {
        "main.py": "answer = 42\nmore = 1\n",
        "d/new.txt": "new\n",
        "tests/t.txt": "t\n",
    }
    if os.geteuid() == 0:
        assert owners(project) == {OWNER}


def unchanged(project: Path) -> Callable[[], None]:
    """What checks, when it is called, that the project is as it is now."""
    before = content(project)

    def check() -> None:
        assert content(project) == before

    return check


def owners(project: Path) -> set[int]:
    return {path.stat().st_uid for path in project.rglob("*")}


async def test_a_call_that_changes_nothing_is_never_asked_about(
    box: ProjectSession, project: Path
) -> None:
    (project / ".git").mkdir()
    belongs(project)
    for call in (
        code("print('shown'); 6 * 7"),
        code("echo from bash; cat main.py", language="bash"),
        command("ls -la; cat main.py"),
        command("echo x > /tmp/beside; mkdir d && rmdir d; touch t && rm t"),
        write("main.py", "answer = 42\n"),
        ToolCall("theirs", "read_file", '{"path": "main.py"}'),
        ToolCall("theirs", "list_files", "{}"),
        write("/tmp/x", "y"),
    ):
        result = await made(box, call)
        assert not result.asked, call
        assert not result.end.is_error, result.end.result
    cell = await made(box, code("print('shown'); 6 * 7"))
    assert (cell.printed, "42" in cell.end.result) == ("shown\n", True)
    assert cell.order.index("tool_start") < cell.order.index("tool_output")
    assert sorted(content(project)) == ["main.py", "src/a.txt", "tests/t.txt"]


@pytest.mark.full_tier
async def test_git_status_and_diff_change_nothing(box: ProjectSession, project: Path) -> None:
    """On a copy every file looks touched to git, which would note that in its index."""
    await asyncio.to_thread(make_repository, project)
    for text in ("git status --short", "git diff", "git ls-files"):
        result = await made(box, command(text))
        assert (result.asked, result.end.is_error) == (False, False), text


@pytest.mark.full_tier
async def test_files_that_a_tool_writes_are_asked_about_with_the_same_diff(
    box: ProjectSession, project: Path
) -> None:
    os.chmod(project / "main.py", 0o755)
    before = content(project)
    for call, path, diff in (
        (edit("main.py", "42", "43"), "main.py", "@@ -1,1 +1,1 @@\n-answer = 42\n+answer = 43"),
        (write("new/deep/x.txt", "x\n"), "new/deep/x.txt", "@@ -0,0 +1,1 @@\n+x"),
    ):
        no = await made(box, call, False, meanwhile=unchanged(project))
        assert no.changed == {f"/workspace/{path}": diff}
        assert "changes of files were dropped" in no.end.result
        assert content(project) == before
        yes = await made(box, call, True)
        assert not yes.end.is_error, yes.end.result
        assert content(project) != before
        before = content(project)
    assert before["main.py"] == "answer = 43\n"
    assert before["new/deep/x.txt"] == "x\n"
    assert (project / "main.py").stat().st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        assert owners(project) == {OWNER}
    seen = await made(box, code("open('main.py').read(), open('new/deep/x.txt').read()"))
    assert "('answer = 43\\n', 'x\\n')" in seen.end.result


@pytest.mark.full_tier
async def test_scripts_and_commands_are_tried_on_the_same_copy(
    box: ProjectSession, project: Path
) -> None:
    script = code("echo from a script > s.txt", language="bash")
    no = await made(box, script, False)
    assert list(no.changed) == ["/workspace/s.txt"]
    assert not (project / "s.txt").exists()
    await made(box, script, True)
    assert (await made(box, code("open('s.txt').read()"))).end.result.find("from a script") >= 0
    moved = await made(box, command("mv s.txt moved.txt && echo done"), True)
    assert moved.dry_run is not None
    assert (moved.dry_run["exit_code"], moved.dry_run["output"]) == (0, "done\n")
    assert (project / "moved.txt").read_text() == "from a script\n"
    assert "False" in (await made(box, code("import os; os.path.exists('s.txt')"))).end.result


@pytest.mark.full_tier
async def test_a_binary_file_is_told_by_its_sizes(box: ProjectSession, project: Path) -> None:
    text = "open('b.bin', 'wb').write(bytes(range(256)) * 1000)"
    result = await made(box, code(text), True)
    assert result.dry_run is not None
    (change,) = result.dry_run["changes"]
    assert (change["size_before"], change["size_after"]) == (None, 256_000)
    assert change["diff"] == "content not shown: binary"
    assert (project / "b.bin").read_bytes() == bytes(range(256)) * 1000


@pytest.mark.full_tier
async def test_what_a_cell_began_without_a_wait_is_part_of_a_later_change(
    box: ProjectSession, project: Path
) -> None:
    """A thread, or a file that is flushed later, changes nothing by itself."""
    begin = "f = open('late.txt', 'w'); f.write('late'); 1"
    opened = await made(box, code(begin), False)
    assert list(opened.changed) == ["/workspace/late.txt"]
    again = await made(box, code("f = open('late.txt', 'w'); f.write('late'); 1"), True)
    assert again.asked
    assert (project / "late.txt").read_text() == ""
    flushed = await made(box, code("f.flush()"), True)
    assert flushed.changed == {
        "/workspace/late.txt": "@@ -0,0 +1,1 @@\n+late\n\\ No newline at end of file"
    }
    assert (project / "late.txt").read_text() == "late"


@pytest.mark.full_tier
async def test_writes_of_a_thread_between_two_calls_are_dropped(
    box: ProjectSession, project: Path
) -> None:
    """They counted as changes of the next call, and its permission covered them."""
    thread = (
        "import os, threading, time\n"
        "def later():\n"
        "    while not os.path.exists('/uploads/go'): time.sleep(0.01)\n"
        "    open('late.txt', 'w').write('late'); os.chmod('main.py', 0o777)\n"
        "    os.remove('src/a.txt')\n"
        "threading.Thread(target=later).start()"
    )
    assert not (await made(box, code(thread))).asked
    await box.uploads.put_bytes("go", b"")
    talk = box.sandbox.conversation("default")
    assert isinstance(talk, ProjectConversation)
    copy = talk.working._main._copy
    assert copy is not None
    await eventually(lambda: not (copy.path / "files/src/a.txt").exists())
    before = content(project)
    for call in (command("ls -l; cat main.py"), code("open('new.txt', 'w').write('new')")):
        await made(box, call, setting=ALLOW)
    assert content(project) == {**before, "new.txt": "new"}
    assert (project / "main.py").stat().st_mode & 0o777 == 0o644
    looked = await made(box, code("sorted(os.listdir()), os.listdir('src')"))
    assert "(['main.py', 'new.txt', 'src', 'tests'], ['a.txt'])" in looked.end.result


@pytest.mark.full_tier
async def test_thread_that_writes_all_the_time_loses_no_variables(box: ProjectSession) -> None:
    """The copy could not be restored while it was written to, and the kernel ended for that."""
    thread = (
        "import threading, time\n"
        "def write():\n"
        "    n = 0\n"
        "    while True:\n"
        "        n += 1; open('main.py', 'a').write('x'); open(f'log{n % 3}', 'a').write('x')\n"
        "        time.sleep(0.001)\n"
        "kept = 7; threading.Thread(target=write, daemon=True).start()"
    )
    await made(box, code(thread), False)
    for _ in range(5):
        looked = await made(box, code("print('kept', kept)"), False)
        shown = looked.dry_run
        assert "kept 7" in (looked.printed if shown is None else shown["output"])


@pytest.mark.full_tier
async def test_what_was_shown_is_committed_whatever_a_thread_writes_meanwhile(
    box: ProjectSession, project: Path
) -> None:
    thread = (
        "import threading, time\n"
        "open('x.txt', 'w').write('shown')\n"
        "def later():\n"
        "    n = 0\n"
        "    while go:\n"
        "        n += 1\n"
        "        open('y.txt', 'w').write(str(n)); open('x.txt', 'w').write(f'not shown {n}')\n"
        "go = True\n"
        "threading.Thread(target=later, daemon=True).start(); None"
    )
    approved = await made(box, code(thread), True)
    diff = approved.changed["/workspace/x.txt"]
    shown = [line[1:] for line in (diff or "").split("\n") if line.startswith("+")]
    assert [(project / "x.txt").read_text()] == (shown or [""])
    await made(box, code("go = False"), False)


async def test_an_abort_in_a_cell_drops_its_changes(box: ProjectSession, project: Path) -> None:
    before = content(project)
    endless = "kept = 1; open('a', 'w').write('a'); open('main.py', 'w').close()\nwhile True: pass"
    agent = Agent(
        box,
        ReplayModel([Response("", (code(endless),), stop="tools"), "ok"]),
        approvals=Approvals(),
        permissions=Permissions("project"),
    )
    running = asyncio.ensure_future(agent.run("go"))
    talk = box.sandbox.conversation("default")
    assert isinstance(talk, ProjectConversation)
    await eventually(lambda: talk.working.python.busy and talk.working.python.alive)
    agent.abort()
    async with asyncio.timeout(60):
        assert (await running).reason == "aborted"
    assert content(project) == before
    looked = await made(box, code("import os; sorted(os.listdir()), open('main.py').read()"))
    assert "(['main.py', 'src', 'tests'], 'answer = 42\\n')" in looked.end.result


async def test_a_tool_of_a_users_own_is_no_way_round(box: ProjectSession, project: Path) -> None:
    @tool
    async def own(call: ToolCallRequest) -> str:
        """Change files by every way there is."""
        await call.sandbox.files.write("by_files.txt", "1")
        run = call.sandbox.start_run("open('by_code.txt', 'w').write('2')")
        assert (await followed(call.sandbox, run)).ok
        return (await call.sandbox.files.read_bytes("by_code.txt")).decode()

    @tool(effect="write")
    async def writes(call: ToolCallRequest) -> str:
        """Write files, and read them."""
        await call.sandbox.files.write("d/w.txt", "3")
        return (await call.sandbox.files.read_bytes("d/w.txt")).decode()

    before = content(project)
    for name, paths in (("own", ["by_code.txt", "by_files.txt"]), ("writes", ["d/w.txt"])):
        call = ToolCall("theirs", name, "{}")
        no = await made(box, call, False, tools=Tools([own, writes]))
        assert list(no.changed) == [f"/workspace/{path}" for path in paths]
        assert content(project) == before
        yes = await made(box, call, True, tools=Tools([own, writes]))
        assert yes.end.result in ("2", "3")
        assert content(project).keys() - before.keys() == set(paths)
        before = content(project)


@pytest.mark.full_tier
async def test_a_kernel_that_dies_loses_its_variables_and_no_approved_change(
    box: ProjectSession, project: Path
) -> None:
    dies = "x = 1; open('a', 'w').write('a'); import os; os._exit(1)"
    died = await made(box, code(dies), True)
    assert died.end.is_error
    assert (project / "a").read_text() == "a"
    after = await made(box, code("'x' in globals(), open('a').read()"))
    assert "(False, 'a')" in after.end.result


# -- the person's own edits ------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_the_persons_own_edits_are_seen_by_the_next_call(
    box: ProjectSession, project: Path
) -> None:
    read = code("import os; sorted(os.listdir('src')), open('main.py').read()")
    assert "(['a.txt'], 'answer = 42\\n')" in (await made(box, read)).end.result
    (project / "main.py").write_text("answer = 44\n")
    (project / "src/a.txt").rename(project / "src/b.txt")
    assert "(['b.txt'], 'answer = 44\\n')" in (await made(box, read)).end.result
    (project / "src").rename(project / "lib")
    (project / "src").write_text("a file now")
    belongs(project)
    looked = await made(box, command("cat src lib/b.txt"))
    assert "a file nowa\n" in looked.end.result
    assert not looked.asked


async def test_a_kernel_whose_directory_is_gone_goes_on(box: ProjectSession, project: Path) -> None:
    await made(box, code("import os; f = open('src/a.txt'); os.chdir('src'); 1"))
    (project / "src").rename(project / "lib")
    (project / "main.py").chmod(0o600)
    looked = await made(box, code("f.read(), sorted(os.listdir('/workspace'))"))
    assert "('a\\n', ['lib', 'main.py', 'tests'])" in looked.end.result
    again = await made(box, code("os.chdir('/workspace'); open('lib/a.txt').read()"))
    assert "'a\\n'" in again.end.result


async def test_the_persons_edit_wins_over_what_was_never_approved(
    box: ProjectSession, project: Path
) -> None:
    await made(box, code("open('main.py', 'w').write('theirs')"), False)
    (project / "main.py").write_text("mine")
    assert "'mine'" in (await made(box, code("open('main.py').read()"))).end.result


@pytest.mark.full_tier
@pytest.mark.parametrize(
    "call",
    [
        code("open('main.py', 'a').write('more\\n')"),
        command("echo more >> main.py"),
        edit("main.py", "42", "43"),
        write("main.py", "other"),
    ],
)
async def test_an_edit_before_the_yes_leaves_the_call_undone(
    box: ProjectSession, project: Path, call: ToolCall
) -> None:
    edited = await made(
        box, call, True, meanwhile=lambda: (project / "main.py").write_text("mine\n")
    )
    assert edited.end.is_error
    assert "workspace_changed" in edited.end.result
    assert (project / "main.py").read_text() == "mine\n"
    seen = await made(box, code("open('main.py').read()"))
    assert "'mine\\n'" in seen.end.result


async def test_an_edit_during_a_cell_is_not_overwritten(box: ProjectSession, project: Path) -> None:
    waits = (
        "import os, time\n"
        "while not os.path.exists('/uploads/go'): time.sleep(0.01)\n"
        "open('main.py', 'a').write('more\\n')"
    )
    await made(box, code("1"))
    going = asyncio.ensure_future(made(box, code(waits), setting=ALLOW))
    talk = box.sandbox.conversation("default")
    assert isinstance(talk, ProjectConversation)
    await eventually(lambda: talk.working.python.busy)
    (project / "main.py").write_text("mine\n")
    await box.uploads.put_bytes("go", b"")
    result = await going
    assert "workspace_changed" in result.end.result
    assert (project / "main.py").read_text() == "mine\n"


@pytest.mark.full_tier
async def test_two_conversations_have_copies_of_their_own(
    runtime: Runtime, box: ProjectSession, project: Path
) -> None:
    other = ProjectSession(await open_project(runtime, "default", project))
    try:
        await made(box, code("x = 1; open('one.txt', 'w').write('1')"), False)
        seen = await made(other, code("import os; 'x' in globals(), os.path.exists('one.txt')"))
        assert "(False, False)" in seen.end.result
        await made(box, code("open('one.txt', 'w').write('1')"), True)
        conflict = await made(
            other,
            code("open('one.txt', 'a').write('2')"),
            True,
            meanwhile=lambda: (project / "one.txt").write_text("3"),
        )
        assert "workspace_changed" in conflict.end.result
        assert (project / "one.txt").read_text() == "3"
    finally:
        await other.close()


# -- the setting -----------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_changes_are_made_at_once_where_all_are_allowed(
    box: ProjectSession, project: Path
) -> None:
    for call in (
        code("open('a.txt', 'w').write('a')"),
        command("echo b > b.txt"),
        write("c.txt", "c"),
        code("echo d > d.txt", language="bash"),
    ):
        result = await made(box, call, setting=ALLOW)
        assert (result.asked, result.end.is_error) == (False, False), result.end.result
    found = content(project)
    assert [found[f"{name}.txt"].strip() for name in "abcd"] == ["a", "b", "c", "d"]
    assert (
        "['a.txt', 'b.txt', 'c.txt', 'd.txt'"
        in (await made(box, code("import os; sorted(os.listdir())"))).end.result
    )


@pytest.mark.parametrize(
    ("call", "asks"),
    [
        (code("open('tests/new.txt', 'w').write('x')"), False),
        (command("rm tests/t.txt; mkdir -p tests/d/e; echo x > tests/d/e/f"), False),
        (write("tests/deep/x", "x"), False),
        (edit("tests/t.txt", "t", "u"), False),
        (command("mv tests/t.txt tests/u.txt; ln -s u.txt tests/link; ln -s ../ tests/x/y"), False),
        (code("open('tests/../main.py', 'w').write('x')"), True),
        (write("tests/../main.py", "x"), True),
        (command("mv tests/t.txt src/t.txt"), True),
        (command("mv src/a.txt tests/a.txt"), True),
        (command("echo x > tests/x; echo x > main.py"), True),
        (command("ln -s ../src tests/out"), True),
        # the guard refuses the second link, which could lead anywhere
        (command("ln -s . tests/here; ln -s here/../src tests/out; echo x > tests/x"), False),
        (command("rm -r tests; ln -s src tests"), True),
        # the guard gives the second name a file of its own before it is written
        (command("ln src/a.txt tests/hard; echo more >> tests/hard"), False),
        (command("chmod +x main.py"), True),
        (command("echo x > tests2"), True),
    ],
)
async def test_only_changes_outside_of_the_named_directories_are_asked_about(
    box: ProjectSession, project: Path, call: ToolCall, asks: bool
) -> None:
    before = content(project)
    result = await made(box, call, False if asks else None, setting=TESTS)
    assert result.asked == asks
    if asks:
        assert content(project) == before
    else:
        assert content(project) != before


async def test_mode_of_one_name_of_a_file_stays_with_that_name(
    box: ProjectSession, project: Path
) -> None:
    """`tests/l.txt` was made a further name of `src/a.txt` by its owner. `chmod` of it needed no
    question, and changed the mode of `src/a.txt`, too."""
    await made(box, code("1"))
    os.link(project / "src/a.txt", project / "tests/l.txt")
    result = await made(box, command("chmod 0777 tests/l.txt"), setting=TESTS)
    assert not result.end.is_error
    modes = [(project / name).stat().st_mode & 0o777 for name in ("src/a.txt", "tests/l.txt")]
    assert modes == [0o644, 0o777]
    assert content(project)["tests/l.txt"] == "a\n"


async def test_modes_of_new_files_and_set_id_bits_are_asked_about(
    box: ProjectSession, project: Path
) -> None:
    (project / "main.py").chmod(0o4755)
    text = (
        "mkdir nd; echo x > nd/f; chmod 0777 nd nd/f; echo x > ls; chmod 0755 ls; echo y >> main.py"
    )
    yes = await made(box, command(text), True)
    assert yes.changed == {
        "/workspace/ls": "new file mode 100755\n@@ -0,0 +1,1 @@\n+x",
        "/workspace/main.py": "set-id bits 4000: not kept\n@@ -1,1 +1,2 @@\n answer = 42\n+y",
        "/workspace/nd/": "new directory mode 040777",
        "/workspace/nd/f": "new file mode 100777\n@@ -0,0 +1,1 @@\n+x",
    }
    assert (project / "main.py").stat().st_mode & 0o7777 == 0o755
    assert (project / "nd/f").stat().st_mode & 0o7777 == 0o777


async def test_a_write_through_a_symlink_counts_where_the_file_is(
    box: ProjectSession, project: Path
) -> None:
    (project / "tests/out").symlink_to("../src")
    belongs(project)
    before = content(project)
    for call in (code("open('tests/out/a.txt', 'w').write('x')"), command("echo > tests/out/z")):
        assert (await made(box, call, False, setting=TESTS)).asked
    refused = await made(box, write("tests/out/a.txt", "x"), setting=TESTS)
    assert refused.end.is_error
    assert content(project) == before


async def test_where_nobody_can_be_asked_the_setting_is_named(
    box: ProjectSession, project: Path
) -> None:
    before = content(project)
    for call in (code("open('x', 'w').write('x')"), command("echo > x"), write("x", "x")):
        model = ReplayModel([Response("", (call,), stop="tools"), "ok"])
        agent = Agent(box, model, permissions=Permissions("project"))
        await agent.run("go")
        said = await last_message(agent)
        assert "none can be asked" in said.content
        assert "`changes`" in said.content
        assert content(project) == before


async def last_message(agent: Agent) -> Message:
    (found,) = [one.message for one in await agent.history.messages() if one.message.role == "tool"]
    return found


@pytest.mark.full_tier
async def test_what_would_run_on_the_host_is_not_committed(
    box: ProjectSession, project: Path
) -> None:
    (project / ".envrc").write_text("as it was")
    belongs(project)
    for call in (write(".envrc", "planted"), code("open('.envrc', 'w').write('planted')")):
        result = await made(box, call, setting=ALLOW)
        assert result.end.is_error
    assert (project / ".envrc").read_text() == "as it was"


# -- a project that cannot be copied ---------------------------------------------------------------


async def test_a_project_that_is_too_large_is_asked_about_before_the_call(
    runtime: Runtime, project: Path
) -> None:
    (project / "large").write_bytes(os.urandom(3 << 20))
    belongs(project)
    sandbox = await open_project(
        runtime, "default", project, narrower={"limits": {"workspace_max": "2MiB"}}
    )
    box = ProjectSession(sandbox)
    try:
        no = await made(box, code("x = 1; open('a', 'w').write('a')"), False)
        assert no.dry_run is None
        assert not (project / "a").exists()
        yes = await made(box, code("x = 2; open('a', 'w').write('a')"), True)
        assert not yes.end.is_error, yes.end.result
        assert (project / "a").read_text() == "a"
        assert "2" in (await made(box, code("x"), True)).end.result
        wrote = await made(box, write("b", "b\n"), True)
        assert wrote.changed == {"/workspace/b": "@@ -0,0 +1,1 @@\n+b"}
        assert (project / "b").read_text() == "b\n"
        allowed = await made(box, command("echo c > c"), setting=ALLOW)
        assert not allowed.end.is_error
        assert (project / "c").exists()
    finally:
        await box.close()


async def test_sockets_and_fifos_of_the_project_stay(
    box: ProjectSession, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)  # a socket's path has at most 107 bytes
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        belongs(project)
        assert not (await made(box, code("import os; sorted(os.listdir())"))).asked
        await made(box, code("open('a', 'w').write('a')"), True)
        assert {"pipe", "s", "a"} <= set(os.listdir(project))


@pytest.mark.full_tier
async def test_nothing_is_left_of_the_copies(own_runtime: Runtime, project: Path) -> None:
    box = ProjectSession(await open_project(own_runtime, "default", project))
    await made(box, code("open('a', 'w').write('a')"), True)
    await made(box, write("b", "b"), False)
    await box.close()
    assert not own_runtime.copies
    assert not own_runtime.data.sandboxes()
