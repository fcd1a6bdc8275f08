"""A conversation reaches its own files, keeps what is pinned in place, and sees nobody else's."""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from attacking import Fresh, Without, altered, attack, attack_by_shell, by, one_path, tell

from sbx.policy import Policy, load
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = pytest.mark.core
PINNED = ("EBUSY", "EXDEV")


# -- uploads ---------------------------------------------------------------------------------------

MOVES = {
    "rename": "os.rename('/workspace/uploads', '/workspace/mine')",
    "rename temparea": "os.rename('/workspace/uploads/temparea', '/workspace/uploads/mine')",
    "rename by the link": "os.rename('/sandbox/workspace/uploads', '/workspace/mine')",
    "rename by /proc": "os.rename('/proc/self/cwd/uploads', '/workspace/mine')",
    "replace": "os.mkdir('/workspace/mine'); os.rename('/workspace/mine', '/workspace/uploads')",
    "remove": "os.rmdir('/workspace/uploads/temparea')",
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.unprivileged
async def test_uploads_cannot_be_moved_or_replaced(
    box: AsyncSandbox, without: Without, how: str
) -> None:
    """A mount pins itself and not its parent: hence one on `uploads` as well."""
    clean = "import shutil; shutil.rmtree('/workspace/mine', ignore_errors=True)"
    assert await attack(box, MOVES[how]) in (*PINNED, "EACCES")
    assert await attack_by_shell(box, MOVES[how]) in (*PINNED, "EACCES", "EEXIST")
    await attack(box, clean)
    bare = await without("pins")
    await attack(bare, clean)
    assert await attack(bare, MOVES[how]) in ("ok", "ENOTEMPTY")
    await bare.stop()


WRITES = {
    "create": "open('/workspace/uploads/temparea/new', 'w')",
    "write": "open('/workspace/uploads/temparea/data', 'a')",
    "truncate": "os.truncate('/workspace/uploads/temparea/data', 0)",
    "remove": "os.remove('/workspace/uploads/temparea/data')",
    "chmod": "os.chmod('/workspace/uploads/temparea/data', 0o777)",
    "utime": "os.utime('/workspace/uploads/temparea/data', (0, 0))",
    "link": "os.link('/workspace/uploads/temparea/data', '/workspace/data')",
    "symlink": "os.symlink('/', '/workspace/uploads/temparea/link')",
    "rename": "os.rename('/workspace/uploads/temparea/data', '/workspace/data')",
}


@pytest.mark.parametrize("how", WRITES)
async def test_what_a_user_uploaded_stays_as_it_was(box: AsyncSandbox, how: str) -> None:
    await box.uploads.put_bytes("data", b"as it was")
    assert await attack(box, WRITES[how]) in ("EROFS", "EXDEV", "EACCES")
    assert await attack_by_shell(box, WRITES[how]) in ("EROFS", "EXDEV", "EACCES")
    assert await box.uploads.read_bytes("data") == b"as it was"


@pytest.mark.unprivileged
async def test_uploads_are_read_only_by_their_mount_alone(fresh: Fresh) -> None:
    """The control: with the mount writable nothing else stands in the way, save that under a root
    runtime they do not belong to the jail's uid."""
    box = await fresh()
    await box.uploads.put_bytes("data", b"as it was")
    with altered("read-only"):
        expected = "EACCES" if os.geteuid() == 0 else "ok"
        assert await attack(box, WRITES["create"]) == expected


async def test_what_is_generated_can_be_written(box: AsyncSandbox) -> None:
    assert await attack(box, "open('/workspace/uploads/generated/x', 'w').close()") == "ok"


# -- a directory of the host -----------------------------------------------------------------------


@pytest.fixture
def project(own_temporary_directory: Path) -> Iterator[Path]:
    """A repository that belongs to an ordinary user."""
    top = own_temporary_directory / "project"
    for name in (".git/hooks", ".git/objects", ".vscode", "src"):
        (top / name).mkdir(parents=True, exist_ok=True)
    for name in (".git/config", ".envrc", "src/main.py", ".git/hooks/pre-commit"):
        (top / name).write_text("theirs\n")
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, 1000, 1000)
    yield top
    shutil.rmtree(top)


RUN_LATER = {
    "hook": "open('.git/hooks/post-commit', 'w')",
    "hook edited": "open('.git/hooks/pre-commit', 'a')",
    "config": "open('.git/config', 'a')",
    "envrc": "open('.envrc', 'a')",
    "editor": "open('.vscode/tasks.json', 'w')",
    "hooks renamed": "os.rename('.git/hooks', '.git/old')",
    "parent renamed": "os.rename('.git', '.old')",
    "parent exchanged": "call(316, -100, b'.git', -100, b'src', 2)",
    "config replaced": "open('new', 'w').close(); os.rename('new', '.git/config')",
    "removed": "import shutil; os.remove('.envrc')",
}


@pytest.mark.parametrize("how", RUN_LATER)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="renameat2 has another number")
@pytest.mark.unprivileged
async def test_what_would_run_later_on_the_host_cannot_be_written(
    fresh: Fresh, project: Path, how: str
) -> None:
    box = await fresh(workspace=project)
    assert await attack(box, RUN_LATER[how]) in ("EROFS", "EBUSY", "EXDEV", "EACCES")
    assert (project / ".envrc").read_text() == "theirs\n"
    assert sorted(os.listdir(project / ".git/hooks")) == ["pre-commit"]
    assert await attack(box, "open('src/main.py', 'a').write('ours')") == "ok"
    await box.close()
    trusting = load("default").model_copy(update={"host_executables": "allow"})
    control = await fresh(trusting, workspace=project)
    assert await attack(control, RUN_LATER[how]) == "ok"


async def test_nothing_of_ours_is_written_into_a_directory_of_the_host(
    fresh: Fresh, project: Path
) -> None:
    before = sorted(path for path in project.rglob("*"))
    box = await fresh(workspace=project)
    await box.uploads.put_bytes("data", b"x")
    assert await attack(box, "import json; open(os.path.expanduser('~/x'), 'w').close()") == "ok"
    assert await attack(box, "open('/uploads/data').read()") == "ok"
    await box.stop()
    assert sorted(path for path in project.rglob("*")) == before


async def test_a_link_in_a_directory_of_the_host_leads_nowhere(
    fresh: Fresh, project: Path, own_temporary_directory: Path
) -> None:
    secret = own_temporary_directory / "secret"
    secret.write_text("host secret")
    (project / "link").symlink_to(secret)
    box = await fresh(workspace=project)
    assert await attack(box, "open('link').read()") == "ENOENT"


# -- another conversation --------------------------------------------------------------------------


@pytest.mark.unprivileged
async def test_a_conversation_sees_no_file_of_another_one(fresh: Fresh) -> None:
    box = await fresh()
    for name in ("a", "b"):
        write = f"[open(f'{{d}}/{name}', 'w').close() for d in ('/workspace', '/tmp', '/dev/shm')]"
        assert (await box.conversation(name).run(write)).ok
    look = "[sorted(set(os.listdir(d)) & {'a', 'b'}) for d in ('/workspace', '/tmp', '/dev/shm')]"
    found = await box.conversation("b").run(f"import os; {look}")
    assert found.result == "[['b'], ['b'], ['b']]"


async def test_a_conversation_sees_no_process_or_variable_of_another_one(fresh: Fresh) -> None:
    box = await fresh()
    a, b = box.conversation("a"), box.conversation("b")
    assert (await a.run("import os, subprocess; os.environ['SECRET'] = 'x'; secret = 1")).ok
    sleeper = "s = subprocess.Popen(['sleep', '300'], env={'SECRET': 'x'}); s.pid"
    assert (await a.run(sleeper)).ok
    assert "sleep" not in (await b.shell("cat /proc/[0-9]*/comm")).stdout
    assert "SECRET" not in (await b.shell("env; cat /proc/[0-9]*/environ 2>/dev/null")).stdout
    assert (await b.run("secret")).error is not None
    assert "sleep" in (await a.shell("cat /proc/[0-9]*/comm")).stdout


async def test_conversations_share_no_abstract_socket_and_no_ipc(fresh: Fresh) -> None:
    box = await fresh()
    a, b = box.conversation("a"), box.conversation("b")
    listen = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0here'); s.listen()"
    assert (await a.run(listen)).ok
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('\\0here')"
    refused = await b.run(connect)
    assert refused.error is not None
    assert refused.error.name == "ConnectionRefusedError"
    assert (await a.run(connect)).ok


async def test_killing_one_conversation_leaves_the_other(fresh: Fresh) -> None:
    box = await fresh()
    a, b = box.conversation("a"), box.conversation("b")
    assert (await b.run("x = 41")).ok
    await a.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (await b.run("x + 1")).result == "42"


async def test_a_file_of_another_sandbox_has_no_path(fresh: Fresh) -> None:
    """Where workspaces lie on the host is told by mountinfo, and leads nowhere inside."""
    one, other = await fresh(), await fresh()
    await other.files.write("theirs", "x")
    opened = await other._default.opened()
    path = str(opened.files_path / "theirs")
    assert os.path.exists(path)
    for prefix in ("", "/proc/1/root", "/sys/kernel"):
        assert await attack(one, f"open({prefix + path!r})") in ("ENOENT", "EACCES")
    if os.geteuid() == 0:
        assert os.stat(path).st_uid != (await one.start()).host_uid
    assert await tell(one, "os.listdir('/workspace')") == ["uploads"]


@one_path()
@pytest.mark.parametrize(
    ("name", "start"),
    rows(
        product(("uploads", "uploads/temparea", "uploads/generated", "shared"), ("cold", "fork")),
        ci_tier=[("uploads", "cold"), ("uploads/temparea", "fork"), ("shared", "cold")],
    ),
)
async def test_a_link_at_a_mount_point_makes_nothing_on_the_host(
    fresh: Fresh, tmp_path: Path, name: str, start: str
) -> None:
    """CVE-2026-87766: before 0.12.0, the set-up of bubblewrap follows a link below the new root to
    the host's files by /oldroot. Here the link is in the stored files, however it came there (an
    import, a restored checkpoint, a kernel that escaped), and the next kernel starts over it."""
    tmp_path.chmod(0o777)
    box = await fresh(Policy.model_validate({"name": "sharing", "shared": True}))
    await box.start()
    opened = await box._default.opened()
    await box.stop()
    for target in (f"/oldroot{tmp_path}", str(tmp_path), f"../../../../../../../oldroot{tmp_path}"):
        place = opened.files_path / name
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)
        else:
            shutil.rmtree(place)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(target)
        with by(start):
            assert (await box.run("open('uploads/generated/x', 'w').close()")).ok
        assert box.receipt is not None
        assert box.receipt.path == start
        assert await attack(box, "open('uploads/temparea/x', 'w')") == "EROFS"
        assert (await box.run("open('shared/y', 'w').close()")).ok
        await box.stop()
        assert os.listdir(tmp_path) == []
        assert not place.is_symlink()
