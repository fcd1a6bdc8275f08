"""The quarantine on the host's side: hostile records and items, and `sbx quarantine`."""

import json
import os
import pty
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from command import COMMAND, environment, in_process

from sbx.errors import Conflict, Denied, InvalidPath, NotFound, SbxError
from sbx.workspace import quarantine
from sbx.workspace.quarantine import Quarantine

OWNER = 4242


class Planted:
    """A project, and a quarantine for it that a sandbox filled."""

    def __init__(self, top: Path) -> None:
        self.data = top / "data"
        self.store = self.data / "quarantine"
        self.project = top / "project"
        self.outside = top / "outside"
        for made in (self.project, self.outside):
            made.mkdir()
            if os.geteuid() == 0:
                os.chown(made, OWNER, OWNER)
        self._fd = os.open(self.project, os.O_PATH | os.O_DIRECTORY)
        self.used = Quarantine.open(self.store, self.project, self._fd, None)

    def add(self, path: str, *, kind: str = "file", **more: object) -> tuple[str, Path]:
        """Record an item, as code inside would claim it; the content is the caller's to make."""
        item_id = secrets.token_hex(8)
        record = {"path": path, "name": path, "program": "direnv", "kind": kind, **more}
        (self.used.inside / "records" / f"{item_id}.json").write_text(json.dumps(record))
        return item_id, self.used.inside / "items" / item_id

    def file(self, path: str, content: str = "echo\n") -> str:
        item_id, item = self.add(path)
        item.write_text(content)
        return item_id

    def link(self, path: str, item_id: str) -> Path:
        link = self.project / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/.sbx-quarantine/items/{item_id}")
        return link

    def ended(self) -> None:
        """The sandbox has ended."""
        self.used.close()

    def close(self) -> None:
        self.used._held.close()
        os.close(self._fd)


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with closing(Planted(tmp_path)) as made:
        yield made


def test_an_item_is_restored_with_its_parents_and_owner(planted: Planted) -> None:
    item_id = planted.file("sub/deep/.envrc", "echo planted\n")
    link = planted.link("sub/deep/.envrc", item_id)
    planted.ended()
    assert not os.path.lexists(link)
    (planted.project / "sub/deep").rmdir()
    (planted.project / "sub").rmdir()
    restored = Path(quarantine.restore(planted.store, item_id))
    assert restored == planted.project / "sub/deep/.envrc"
    assert restored.read_text() == "echo planted\n"
    assert {path.stat().st_uid for path in (restored, restored.parent)} == {
        planted.project.stat().st_uid
    }
    assert quarantine.items(planted.store) == []
    assert os.listdir(planted.store) == []


def test_modes_keep_execution_and_lose_set_id(planted: Planted) -> None:
    item_id, item = planted.add(".git", kind="directory")
    (item / "hooks").mkdir(parents=True)
    (item / "hooks" / "pre-commit").write_text("#!/bin/sh\n")
    (item / "hooks" / "pre-commit").chmod(0o6755)
    (item / "hooks").chmod(0o2777)
    planted.ended()
    quarantine.restore(planted.store, item_id)
    assert (planted.project / ".git/hooks/pre-commit").stat().st_mode & 0o7777 == 0o755
    assert (planted.project / ".git/hooks").stat().st_mode & 0o7000 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's items belong to another user")
def test_hard_links_of_a_cloned_repository_are_restored(planted: Planted) -> None:
    """As root the items belong to the jail's user: `git clone` links objects of one to another."""
    item_id, item = planted.add(".git", kind="directory")
    item.mkdir()
    (item / "a").write_text("object")
    os.link(item / "a", item / "b")
    for path in (item.parent, item, item / "a"):
        os.chown(path, OWNER, OWNER)
    planted.ended()
    quarantine.restore(planted.store, item_id)
    assert (planted.project / ".git/b").read_text() == "object"


def test_an_item_with_a_socket_is_restored_in_part_and_stays(planted: Planted) -> None:
    item_id, item = planted.add(".git", kind="directory")
    item.mkdir()
    (item / "config").write_text("[core]\n")
    with socket.socket(socket.AF_UNIX) as listening:
        fd = os.open(item, os.O_PATH)
        listening.bind(f"/proc/self/fd/{fd}/s")  # its path has a limit of 108 bytes
        os.close(fd)
    planted.ended()
    with pytest.raises(Conflict) as raised:
        quarantine.restore(planted.store, item_id)
    assert raised.value.code == "restored_in_part"
    assert (planted.project / ".git/config").exists()
    assert [one.id for one in quarantine.items(planted.store)] == [item_id]


@pytest.mark.parametrize(
    "path",
    [
        "../outside/x",
        "/etc/x",
        "a/../../outside/x",
        "",
        "a//b",
        "a/./b",
        "x\0y",
        "\ud800",
        "a/" * 3000,
    ],
)
def test_a_record_that_leads_out_is_ignored(planted: Planted, path: str) -> None:
    item_id = planted.file(path)
    planted.file(".envrc")
    planted.ended()
    assert [item.path for item in quarantine.items(planted.store)] == [".envrc"]
    for act in (quarantine.restore, quarantine.drop):
        with pytest.raises(NotFound):
            act(planted.store, item_id)
    assert os.listdir(planted.outside) == []


@pytest.mark.parametrize("record", ["[]", "{", '{"path": 1}', "[" * 70_000, "\udcff"])
def test_a_damaged_record_is_ignored(planted: Planted, record: str) -> None:
    item_id = planted.file(".envrc")
    path = planted.used.inside / "records" / f"{item_id}.json"
    path.write_bytes(record.encode(errors="surrogateescape"))
    assert list(quarantine.items_of(planted.used.top)) == []
    planted.ended()
    assert os.listdir(planted.store) == []


def test_a_record_that_is_a_fifo_or_a_link_is_ignored(planted: Planted) -> None:
    (planted.outside / "record").write_text(
        json.dumps({"path": ".envrc", "name": "x", "program": "x", "kind": "file"})
    )
    for number in range(2):
        item_id = planted.file(".envrc")
        record = planted.used.inside / "records" / f"{item_id}.json"
        record.unlink()
        os.mkfifo(record) if number else record.symlink_to(planted.outside / "record")
    assert quarantine.items(planted.store) == []


def test_an_item_that_is_a_symlink_is_never_followed(planted: Planted) -> None:
    secret = planted.outside / "secret"
    secret.write_text("secret")
    item_id, item = planted.add(".envrc")
    item.symlink_to(secret)
    inner, directory = planted.add(".vscode", kind="directory")
    directory.mkdir()
    (directory / "tasks.json").symlink_to(secret)
    planted.ended()
    with pytest.raises(InvalidPath):
        quarantine.restore(planted.store, item_id)
    quarantine.restore(planted.store, inner)
    assert (planted.project / ".vscode/tasks.json").is_symlink()
    for words in ([item_id], [item_id, "x"]):
        shown = in_process("quarantine", "show", *words, "--data-dir", planted.data)
        assert "secret" not in shown.stdout.replace(str(secret), "")
    quarantine.drop(planted.store, item_id)
    assert secret.read_text() == "secret"


def test_a_place_behind_a_symlink_is_refused(planted: Planted) -> None:
    """A record's parent may have become a symlink since."""
    item_id = planted.file("sub/.envrc")
    planted.ended()
    (planted.project / "sub").symlink_to(planted.outside)
    with pytest.raises(InvalidPath):
        quarantine.restore(planted.store, item_id)
    assert os.listdir(planted.outside) == []


def test_a_directory_that_is_a_symlink_now_is_refused(planted: Planted) -> None:
    item_id = planted.file(".envrc")
    planted.ended()
    planted.project.rmdir()
    planted.project.symlink_to(planted.outside)
    with pytest.raises(Conflict) as raised:
        quarantine.restore(planted.store, item_id)
    assert raised.value.code == "directory_moved"
    assert os.listdir(planted.outside) == []
    quarantine.drop(planted.store, item_id)


@pytest.mark.parametrize("path", [".envrc", "main.py"])
def test_a_file_that_is_there_is_never_replaced(planted: Planted, path: str) -> None:
    item_id = planted.file(path, "planted")
    planted.ended()
    (planted.project / path).write_text("mine")
    with pytest.raises(Conflict) as raised:
        quarantine.restore(planted.store, item_id)
    assert raised.value.code == "file_exists"
    assert (planted.project / path).read_text() == "mine"
    assert [one.id for one in quarantine.items(planted.store)] == [item_id]


def test_a_quarantine_in_use_is_not_restored_from(planted: Planted) -> None:
    item_id = planted.file(".envrc")
    for act in (quarantine.restore, quarantine.drop):
        with pytest.raises(Conflict) as raised:
            act(planted.store, item_id)
        assert raised.value.code == "quarantine_in_use"


def test_a_moved_link_is_removed_and_its_item_follows(planted: Planted) -> None:
    """`git clone x tmp; mv tmp repo`: the record names the first place."""
    item_id = planted.file("tmp/.git")
    link = planted.link("repo/.git", item_id)
    planted.ended()
    assert not os.path.lexists(link)
    assert [item.path for item in quarantine.items(planted.store)] == ["repo/.git"]
    assert quarantine.restore(planted.store, item_id) == str(link)


def test_a_killed_runtime_leaves_no_link_behind(planted: Planted) -> None:
    item_id = planted.file(".envrc")
    link = planted.link(".envrc", item_id)
    planted.used._held.close()  # as the end of its process would
    fd = os.open(planted.project, os.O_PATH | os.O_DIRECTORY)
    later = Quarantine.open(planted.store, planted.project, fd, None)
    try:
        assert not os.path.lexists(link)
        assert [item.id for item in quarantine.items(planted.store)] == [item_id]
    finally:
        later.close()
        os.close(fd)


def test_items_are_reported_once(planted: Planted) -> None:
    first = planted.file(".envrc")
    assert [item.id for item in planted.used.unreported()] == [first]
    second = planted.file(".npmrc")
    assert [item.id for item in planted.used.unreported()] == [second]
    assert planted.used.unreported() == ()


# -- the command -----------------------------------------------------------------------------------


def test_list_and_show_escape_hostile_text(planted: Planted) -> None:
    hostile = "\x1b]0;title\x07.envrc\nnext"
    item_id, item = planted.add(hostile, program="\x1b[2Jdirenv")
    evil = "echo \x1b[8mhidden\x1b]52;c;AAAA\x07\nevil\rgood \u202e\u200b\n"
    item.write_text(evil + "x" * (80 << 10))
    planted.ended()
    for words in (["list"], ["show", item_id]):
        shown = in_process("quarantine", *words, "--data-dir", planted.data)
        assert shown.returncode == 0
        assert "\x1b" not in shown.stdout + shown.stderr
        assert ".envrc" in shown.stdout
    assert "hidden" in shown.stdout
    assert "evil\\rgood \\u202e\\u200b\n" in shown.stdout
    assert "the output is incomplete" in shown.stderr
    listed = in_process("quarantine", "list", planted.project, "--json", "--data-dir", planted.data)
    (body,) = json.loads(listed.stdout)["items"]
    assert (body["id"], body["path"], body["directory"]) == (
        item_id,
        hostile,
        str(planted.project),
    )
    other = in_process("quarantine", "list", planted.outside, "--json", "--data-dir", planted.data)
    assert json.loads(other.stdout) == {"items": []}


def test_show_lists_a_directory_and_prints_a_file_of_it(planted: Planted) -> None:
    item_id, item = planted.add(".git", kind="directory")
    item.mkdir()
    (item / "config").write_text("[core]\n\tfsmonitor = touch x\n")
    (item / "link").symlink_to("../../elsewhere")
    planted.ended()
    shown = in_process("quarantine", "show", item_id, "--data-dir", planted.data)
    assert "config" in shown.stdout
    assert "link -> ../../elsewhere" in shown.stdout
    file = in_process("quarantine", "show", item_id, "config", "--data-dir", planted.data)
    assert "fsmonitor = touch x" in file.stdout
    out = in_process("quarantine", "show", item_id, "../x", "--data-dir", planted.data)
    assert out.returncode == 2


def test_restore_and_drop_want_a_yes(planted: Planted) -> None:
    kept, gone = planted.file(".envrc"), planted.file(".npmrc")
    planted.ended()
    for verb in ("restore", "drop"):
        refused = in_process("quarantine", verb, kept, "--data-dir", planted.data)
        assert refused.returncode == 2
        assert "--yes" in refused.stderr
    restored = in_process("quarantine", "restore", kept, "--yes", "--data-dir", planted.data)
    assert restored.stdout == f"restored {planted.project}/.envrc\n"
    dropped = in_process("quarantine", "drop", gone, "-y", "--json", SBX_DATA_DIR=str(planted.data))
    assert json.loads(dropped.stdout) == {"dropped": [f"{planted.project}/.npmrc"], "errors": []}
    assert os.listdir(planted.project) == [".envrc"]
    missing = in_process("quarantine", "drop", gone, "-y", "--data-dir", planted.data)
    assert (missing.returncode, "sbx quarantine list" in missing.stderr) == (2, True)


def test_restore_all_goes_on_after_a_failure(planted: Planted) -> None:
    planted.file(".envrc")
    planted.file(".npmrc")
    planted.ended()
    (planted.project / ".envrc").write_text("mine")
    words = ("quarantine", "restore", "--all", "--directory", planted.project, "--yes")
    ended = in_process(*words, "--data-dir", planted.data)
    assert ended.returncode == 3
    assert ended.stdout == f"restored {planted.project}/.npmrc\n"
    assert "exists already" in ended.stderr
    for wrong in (("restore",), ("drop", "--all", "x" * 16), ("drop", "x", "--directory", "/")):
        assert in_process("quarantine", *wrong, "--data-dir", planted.data).returncode == 2


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 3), ("", 3)])
def test_restore_asks_at_a_terminal(planted: Planted, answer: str, code: int) -> None:
    item_id = planted.file(".envrc")
    planted.ended()
    ours, theirs = pty.openpty()
    words = [*COMMAND, "quarantine", "restore", item_id, "--data-dir", str(planted.data)]
    with subprocess.Popen(
        words, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment()
    ) as process:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        assert process.wait(60) == code
    os.close(ours)
    assert b"direnv would obey it" in shown
    assert (planted.project / ".envrc").exists() is (code == 0)


def test_a_store_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "quarantine").write_text("")
    with pytest.raises(SbxError):
        quarantine.items(tmp_path / "quarantine")
    assert quarantine.items(tmp_path / "none") == []


@pytest.mark.parametrize("foreign", ["store", "parent", "link"])
def test_a_store_that_another_user_made_is_refused(tmp_path: Path, foreign: str) -> None:
    """Without a home the store is /tmp/sbx-UID/quarantine: a fixed name, which another user could
    make first, and then read and replace what is in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    project, parent = tmp_path / "project", tmp_path / "sbx-0"
    project.mkdir()
    if foreign == "link":
        (tmp_path / "elsewhere").mkdir()
        parent.symlink_to(tmp_path / "elsewhere")
        os.lchown(parent, 4242, 4242)
    else:
        (parent / "quarantine").mkdir(parents=True)
        os.chown(parent if foreign == "parent" else parent / "quarantine", 4242, 4242)
    with pytest.raises(Denied) as refused:
        Quarantine.open(parent / "quarantine", project, -1, None)  # the store is looked at first
    assert refused.value.code == "data_directory_not_private"
    assert refused.value.hint
