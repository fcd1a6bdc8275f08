"""A command on a frozen copy, its changes made real or not, and files put back: each test runs
embedded and connected."""

from collections.abc import Sequence

import pytest

from both_faces.faces import Box
from sbx import Sandbox
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.protocol.dry_runs import CHECKPOINTS_MAX, DRY_RUNS_MAX, FileChange
from sbx.protocol.runs import Status

WORK = """
printf 'one\\ntwo\\nthree\\n' > kept.txt; printf x > gone; printf y > stays; printf z > named
mkdir below; printf 'echo hi' > below/tool
"""
COMMAND = """
sed -i s/two/2/ kept.txt; rm gone; mv named renamed; chmod +x below/tool; mkdir -p new/empty
printf new > new/file; ln -s kept.txt link; printf said; printf cried >&2; exit 3
"""
CHANGED = {
    "/workspace/below/tool": ("changed", 7, 7),
    "/workspace/gone": ("removed", 1, None),
    "/workspace/kept.txt": ("changed", 14, 12),
    "/workspace/link": ("added", None, None),
    "/workspace/named": ("removed", 1, None),
    "/workspace/new/empty/": ("added", None, None),
    "/workspace/new/file": ("added", None, 3),
    "/workspace/renamed": ("added", None, 1),
}
LOOK = "find . -path ./uploads -prune -o -printf '%p %y %m %s %l\\n' | sort; cat kept.txt"


def described(changes: Sequence[FileChange]) -> dict[str, tuple[str, int | None, int | None]]:
    return {one.path: (one.kind, one.size_before, one.size_after) for one in changes}


async def look(box: Box) -> str:
    run = await box.shell(LOOK)
    assert run.status is Status.OK
    return run.stdout


@pytest.mark.core
async def test_what_a_command_would_do_is_shown_and_then_done_once(box: Box) -> None:
    await box.run("x = 41")
    await box.shell(WORK)
    before = await look(box)
    dry_run = await box.dry_run(COMMAND)
    run = dry_run.run
    assert (run.stdout, run.stderr, run.exit_code) == ("said", "cried", 3)
    assert described(dry_run.changes) == CHANGED
    assert not dry_run.truncated
    diffs = {one.path: one.diff for one in dry_run.changes}
    assert diffs["/workspace/kept.txt"] == "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    assert diffs["/workspace/below/tool"] == "old mode 0644\nnew mode 0755"
    assert diffs["/workspace/link"] == "+symlink to kept.txt"
    assert await look(box) == before
    await dry_run.commit()
    assert (await box.run("x + 1, open('kept.txt').read()")).result == r"(42, 'one\n2\nthree\n')"
    after = await look(box)
    assert "./renamed f 644 1" in after
    assert "./link l 777 8 kept.txt" in after
    assert "./below/tool f 755 7" in after
    assert "./new/empty d 755" in after
    with pytest.raises(NotFound) as raised:
        await dry_run.commit()
    assert raised.value.code == "dry_run_not_found"
    assert await look(box) == after
    assert (await box.shell("touch new/file new/empty/x; rm -r new")).exit_code == 0  # its own


@pytest.mark.core
async def test_files_are_put_back_as_they_were(box: Box) -> None:
    await box.shell(WORK)
    before = await look(box)
    checkpoint = await box.checkpoint()
    await box.run(f"import subprocess; subprocess.run({COMMAND!r}, shell=True)")
    assert await look(box) != before
    changes = described(await checkpoint.restore())
    assert changes["/workspace/gone"] == ("added", None, 1)
    assert changes["/workspace/renamed"] == ("removed", 1, None)
    assert await look(box) == before
    assert not await checkpoint.restore()
    await box.shell("rm gone")
    await checkpoint.restore()
    assert await look(box) == before
    await checkpoint.discard()
    await checkpoint.discard()
    with pytest.raises(NotFound) as raised:
        await checkpoint.restore()
    assert raised.value.code == "checkpoint_not_found"


@pytest.mark.full_tier
def test_a_file_that_changed_meanwhile_refuses_all_and_others_do_not_matter(
    cells: Sandbox,
) -> None:
    talk = cells.conversation("changed")
    talk.shell(WORK)
    dry_run = talk.dry_run("echo more >> kept.txt; rm stays")
    talk.shell("printf mine > other; printf changed > named")
    dry_run.commit()
    dry_run = talk.dry_run("echo more >> kept.txt; echo x > gone; echo y > named")
    talk.shell("printf quicker > gone")
    before = talk.shell(LOOK).stdout
    with pytest.raises(Conflict) as raised:
        dry_run.commit()
    assert raised.value.code == "workspace_changed"
    assert raised.value.details["path"] == "/workspace/gone"
    assert talk.shell(LOOK).stdout == before
    with pytest.raises(NotFound):
        dry_run.commit()
    talk.dry_run("echo x > gone").commit()
    assert talk.files.read("gone") == "x\n"


def test_there_are_a_few_at_a_time_and_a_discarded_one_leaves_room(cells: Sandbox) -> None:
    talk = cells.conversation("few")
    made = [talk.dry_run(f"echo {n} > f") for n in range(DRY_RUNS_MAX)]
    with pytest.raises(Conflict) as raised:
        talk.dry_run("true")
    assert raised.value.code == "too_many_dry_runs"
    made[0].discard()
    made[0].discard()
    assert talk.dry_run("true").changes == ()
    checkpoints = [talk.checkpoint() for _ in range(CHECKPOINTS_MAX + 1)]
    checkpoints[-1].restore()
    with pytest.raises(NotFound):
        checkpoints[0].restore()


def test_what_is_asked_wrongly_is_refused_and_a_time_out_is_a_result(cells: Sandbox) -> None:
    talk = cells.conversation("asked")
    for words in ({"timeout": -1}, {"timeout": 10**9}, {"cwd": "a\0b"}):
        with pytest.raises(BadRequest):
            talk.dry_run("true", **words)
    talk.files.make_directory("below")
    dry_run = talk.dry_run("touch here; sleep 50", timeout=2, cwd="below")
    assert dry_run.run.status is Status.TIMEOUT
    assert list(described(dry_run.changes)) == ["/workspace/below/here"]


@pytest.mark.full_tier
def test_uploads_are_seen_and_cannot_be_written_and_nothing_leads_out(cells: Sandbox) -> None:
    talk = cells.conversation("uploads")
    talk.uploads.put_bytes("a.csv", b"1,2\n")
    dry_run = talk.dry_run(
        """
        cat uploads/temparea/a.csv; echo $HOME; pwd
        ! touch uploads/temparea/b && ! rm -f uploads/temparea/a.csv && echo refused
        echo made > uploads/generated/made; ln -s /etc/passwd leads; mkfifo fifo
        python3 -c 'import socket; socket.create_connection(("1.1.1.1", 53), 2)' 2>&1 | tail -n 1
        """
    )
    lines = dry_run.run.stdout.splitlines()
    assert lines[:4] == ["1,2", "/workspace", "/workspace", "refused"]
    assert "unreachable" in lines[4]
    changes = described(dry_run.changes)
    assert list(changes) == ["/workspace/leads", "/workspace/uploads/generated/made"]
    assert dry_run.left_out == ("/workspace/fifo",)
    dry_run.commit()
    assert talk.files.read("uploads/generated/made") == "made\n"
    assert talk.files.stat("leads").kind == "symlink"


@pytest.mark.full_tier
def test_a_checkpoint_without_asyncio(cells: Sandbox) -> None:
    checkpoint = cells.checkpoint()
    dry_run = cells.dry_run("echo 1 > made")
    assert (dry_run.run.exit_code, dry_run.truncated) == (0, False)
    dry_run.commit()
    assert cells.files.read("made") == "1\n"
    assert described(checkpoint.restore()) == {"/workspace/made": ("removed", 2, None)}
    checkpoint.discard()
