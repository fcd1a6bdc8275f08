"""Files as clients expect them: found, moved, edited, watched, archived; on both faces."""

import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator

import pytest

from both_faces.faces import Make
from sbx import Sandbox
from sbx.errors import (
    BadRequest,
    Conflict,
    Denied,
    InvalidPath,
    NotFound,
    SbxError,
    TooLarge,
)
from tests.tiers import rows

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def box(make: Make) -> Iterator[Sandbox]:
    with make() as box:
        yield box


def fails(
    error: type[SbxError], code: str, act: Callable[..., object], *words: object, **more: object
) -> SbxError:
    with pytest.raises(error) as raised:
        act(*words, **more)
    assert raised.value.code == code
    return raised.value


# -- found -----------------------------------------------------------------------------------------


def test_files_are_found_by_name_and_by_path(box: Sandbox) -> None:
    for path in ("found/a.py", "found/sub/b.py", "found/sub/deep/c.txt"):
        box.files.write(path, "")
    box.uploads.put_bytes("found.py", b"")

    def found(pattern: str, path: str = "found", **more: object) -> list[str]:
        return [
            entry.path.removeprefix("/workspace/")
            for entry in box.files.find(pattern, path, **more)  # type: ignore[arg-type]
        ]

    assert found("*.py") == ["found/a.py", "found/sub/b.py"]
    assert found("sub/*") == ["found/sub/b.py", "found/sub/deep"]
    assert found("sub/**") == ["found/sub/b.py", "found/sub/deep", "found/sub/deep/c.txt"]
    assert found("**/[a-b].py") == ["found/a.py", "found/sub/b.py"]
    assert found("*", kind="directory") == ["found/sub", "found/sub/deep"]
    assert "uploads/temparea/found.py" in found("*.py", ".")
    cut = box.files.find("*", "found", max_results=2)
    assert (len(cut), cut.complete) == (2, False)
    fails(BadRequest, "invalid_pattern", box.files.find, "")
    fails(NotFound, "file_not_found", box.files.find, "*", "nowhere")


def test_lines_are_found_by_text_and_by_expression(box: Sandbox) -> None:
    box.files.write("grep/a.py", "import os\n# déjà TODO one\n\nTODO two\r\n")
    box.files.write("grep/b.txt", "todo three")
    box.files.write("grep/c.bin", b"TODO\0")
    matches = box.files.grep("TODO", "grep")
    assert [(m.path, m.line, m.column, m.text) for m in matches] == [
        ("/workspace/grep/a.py", 2, 8, "# déjà TODO one"),
        ("/workspace/grep/a.py", 4, 1, "TODO two"),
    ]
    assert (matches.complete, matches.files, matches.skipped) == (True, 2, 1)
    assert len(box.files.grep("todo", "grep", ignore_case=True)) == 3
    assert len(box.files.grep("todo", "grep", ignore_case=True, include="*.txt")) == 1
    assert [m.line for m in box.files.grep(r"^TODO\s\w+", "grep", regex=True)] == [4]
    assert [m.line for m in box.files.grep(r"\AT", "grep", regex=True)] == [4]
    assert box.files.grep("T.DO", "grep") == []
    assert [m.path for m in box.files.grep("three", "grep/b.txt")] == ["/workspace/grep/b.txt"]
    cut = box.files.grep("o", "grep", max_matches=1)
    assert (len(cut), cut.complete) == (1, False)
    fails(BadRequest, "invalid_pattern", box.files.grep, "(", regex=True)
    fails(BadRequest, "invalid_pattern", box.files.grep, r"(a)\1", regex=True)


# -- moved and changed -----------------------------------------------------------------------------


def test_files_and_directories_are_moved(box: Sandbox) -> None:
    box.files.write("move/a/x.txt", "x")
    box.files.write("move/y.txt", "y")
    box.files.move("move/a", "move/new/b")
    assert box.files.read("move/new/b/x.txt") == "x"
    assert box.run("open('move/new/b/x.txt', 'a').write('!')").status == "ok"
    fails(Conflict, "file_exists", box.files.move, "move/y.txt", "move/new/b/x.txt")
    fails(Conflict, "file_exists", box.files.move, "move/new", "move/y.txt")
    box.files.move("move/y.txt", "move/new/b/x.txt", overwrite=True)
    box.files.make_directory("move/empty")
    fails(Conflict, "file_exists", box.files.move, "move/new", "move/empty", overwrite=True)
    box.files.delete("move/empty")
    assert box.files.read("move/new/b/x.txt") == "y"
    fails(NotFound, "file_not_found", box.files.move, "move/y.txt", "move/z")
    for source, target, reason in (
        ("move", "move/in", "into_itself"),
        ("uploads", "mine", "reserved"),
        ("move", "uploads/temparea/u", "read_only"),
        ("move", "../out", "path_traversal"),
    ):
        error = fails(InvalidPath, "invalid_path", box.files.move, source, target)
        assert error.details["reason"] == reason
    box.uploads.put_bytes("kept", b"1")
    error = fails(InvalidPath, "invalid_path", box.files.move, "uploads/temparea/kept", "k")
    assert error.details["reason"] == "read_only"


@pytest.mark.full_tier
def test_files_and_directories_are_copied(box: Sandbox) -> None:
    box.run(
        "import os; os.makedirs('copy/d/e'); open('copy/d/e/f', 'w').write('f'); "
        "os.symlink('/etc/shadow', 'copy/d/link'); open('copy/d/run', 'w').close(); "
        "os.chmod('copy/d/run', 0o755)"
    )
    copied = box.files.copy("copy/d", "copy/new/d")
    assert (copied.files, copied.bytes, copied.complete) == (2, 1, True)
    assert box.run("os.readlink('copy/new/d/link')").result == "'/etc/shadow'"
    assert box.run("oct(os.stat('copy/new/d/run').st_mode)").result == "'0o100755'"
    assert box.run("open('copy/new/d/e/g', 'w').close(); os.remove('copy/new/d/e/f')").error is None
    assert box.files.read("copy/d/e/f") == "f"
    fails(Conflict, "file_exists", box.files.copy, "copy/d", "copy/new")
    fails(Conflict, "file_exists", box.files.copy, "copy/d/e/f", "copy/d/run")
    assert box.files.copy("copy/d/e/f", "copy/d/run", overwrite=True).bytes == 1
    box.uploads.put_bytes("u.csv", b"1,2")
    assert box.files.copy("uploads/temparea/u.csv", "copy/u.csv").bytes == 3
    assert box.run("open('copy/u.csv', 'a').write(',3')").error is None
    box.run("os.mkfifo('copy/d/fifo')")
    assert not box.files.copy("copy/d", "copy/left").complete
    error = fails(InvalidPath, "invalid_path", box.files.copy, "copy/d/link", "copy/l")
    assert error.details["reason"] == "symlink"
    error = fails(InvalidPath, "invalid_path", box.files.copy, "copy/d/fifo", "copy/l")
    assert error.details["reason"] == "not_a_file"


def test_text_is_replaced_exactly_as_often_as_expected(box: Sandbox) -> None:
    box.files.write("replace.txt", "one\r\ntwo one é\n")
    box.files.chmod("replace.txt", 0o640)
    error = fails(Conflict, "replace_count", box.files.replace, "replace.txt", "one", "1")
    assert (error.details["found"], error.details["expected"]) == (2, 1)
    assert box.files.replace("replace.txt", "two one", "2 1") == 1
    assert box.files.replace("replace.txt", "1", "ï", count=None) == 1
    assert box.files.read("replace.txt") == "one\r\n2 ï é\n"
    assert box.run("import os; oct(os.stat('replace.txt').st_mode)").result == "'0o100640'"
    fails(Conflict, "replace_count", box.files.replace, "replace.txt", "none", "", count=None)
    fails(BadRequest, "nothing_to_replace", box.files.replace, "replace.txt", "", "x")
    fails(BadRequest, "invalid_content", box.files.replace, "replace.txt", "\ud800", "x")
    box.files.write("utf16.txt", "a é".encode("utf-16"))
    assert box.files.replace("utf16.txt", "é", "ü") == 1
    assert box.files.read_bytes("utf16.txt").decode("utf-16") == "a ü"
    box.uploads.put_bytes("fixed.txt", b"old")
    fails(InvalidPath, "invalid_path", box.files.replace, "uploads/temparea/fixed.txt", "old", "n")


def test_permissions_are_set_and_never_a_set_id(box: Sandbox) -> None:
    box.files.write("mode/run", "#!/bin/sh\necho ran\n")
    box.files.chmod("mode/run", 0o755)
    assert box.shell("mode/run").stdout == "ran\n"
    for mode in (0o4755, 0o2755, 0o1755, 0o7777):
        fails(Denied, "set_id_refused", box.files.chmod, "mode/run", mode)
        fails(Denied, "set_id_refused", box.files.chmod, "mode", mode)
    fails(BadRequest, "invalid_mode", box.files.chmod, "mode/run", 0o10000)
    fails(BadRequest, "invalid_mode", box.files.chmod, "mode/run", -1)
    box.run("import os; os.symlink('run', 'mode/link')")
    fails(InvalidPath, "invalid_path", box.files.chmod, "mode/link", 0o600)
    assert box.run("oct(os.stat('mode/run').st_mode)").result == "'0o100755'"


# -- watched ---------------------------------------------------------------------------------------


def test_changes_are_told_as_they_happen(box: Sandbox) -> None:
    box.files.write("watch/here/x", "")
    seen: list[tuple[str, str]] = []
    for change in box.files.watch("watch"):
        if change.kind == "started":
            threading.Thread(
                target=lambda: box.run(
                    "import os, time\n"
                    "def seen(path):\n"
                    "    while not os.path.exists(f'seen-{path}'): time.sleep(0.01)\n"
                    "open('watch/here/x', 'a').write('1'); os.mkdir('watch/new'); seen('new')\n"
                    "open('watch/new/f', 'w').write('1'); seen('f')\n"
                    "os.rename('watch/new', 'watch/other'); seen('other')\n"
                    "open('watch/other/g', 'w').close(); os.remove('watch/here/x')\n"
                    "open('outside', 'w').close(); open('watch/end', 'w').close()"
                )
            ).start()
        seen.append((change.kind, change.path.removeprefix("/workspace/")))
        if change.kind == "created":  # else a directory is gone before it is watched
            box.files.write(f"seen-{change.path.rpartition('/')[2]}", "")
        if change.path.endswith("/end"):
            break
    assert seen[0] == ("started", "watch")
    for answer in (
        ("modified", "watch/here/x"),
        ("created", "watch/new"),
        ("created", "watch/new/f"),
        ("deleted", "watch/new"),
        ("created", "watch/other"),
        ("created", "watch/other/f"),
        ("created", "watch/other/g"),
        ("deleted", "watch/here/x"),
    ):
        assert answer in seen, (answer, seen)
    assert not [path for _, path in seen if "outside" in path]
    fails(InvalidPath, "invalid_path", next, box.files.watch("watch/end"))
    fails(NotFound, "file_not_found", next, box.files.watch("nowhere"))


def test_a_watch_ends_with_its_sandbox(make: Make) -> None:
    box = make()
    changes = box.files.watch()
    assert next(changes).kind == "started"
    ended: list[object] = []

    def follow() -> None:
        try:
            ended.extend(changes)
        except SbxError as error:
            ended.append(error.code)
        ended.append("end")

    following = threading.Thread(target=follow)
    following.start()
    box.close()
    following.join(60)
    assert not following.is_alive()
    assert ended[-1] == "end"


# -- archives --------------------------------------------------------------------------------------

TREE = """
import os
os.makedirs('arch/sub/empty', exist_ok=True)
open('arch/a.txt', 'w').write('a' * 100_000)
open('arch/sub/run', 'w').write('x'); os.chmod('arch/sub/run', 0o755)
os.path.lexists('arch/link') or os.symlink('a.txt', 'arch/link')
os.path.lexists('arch/out') or os.symlink('/etc', 'arch/out')
os.path.lexists('arch/fifo') or os.mkfifo('arch/fifo')
open('arch/blob', 'wb').write(bytes(range(256)) * 8000)
"""


def test_a_directory_comes_as_an_archive_and_goes_back(box: Sandbox) -> None:
    assert box.run(TREE).error is None
    packed = b"".join(box.files.archive("arch"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = {member.name: member for member in tar}
    assert sorted(members) == ["a.txt", "blob", "link", "out", "sub", "sub/empty", "sub/run"]
    assert members["sub/run"].mode == 0o755
    done = box.files.unpack([packed[:10], packed[10:5000], packed[5000:]], "arch2")
    assert (done.entries, done.skipped) == (6, 1)  # without the link that leads out
    assert box.files.read_bytes("arch2/blob") == bytes(range(256)) * 8000
    assert box.run("os.readlink('arch2/link'), oct(os.stat('arch2/sub/run').st_mode)").result == (
        "('a.txt', '0o100755')"
    )
    zipped = b"".join(box.files.archive("arch", format="zip"))
    with zipfile.ZipFile(io.BytesIO(zipped)) as archive:
        assert archive.testzip() is None
        assert archive.read("blob") == bytes(range(256)) * 8000
    assert box.files.unpack(zipped, "arch3").skipped == 0
    assert box.files.read_bytes("arch3/blob") == bytes(range(256)) * 8000
    assert b"".join(box.files.archive("arch2/sub/empty"))


def test_what_does_not_fit_into_the_workspace_is_refused_before_it_is_stored(make: Make) -> None:
    """A workspace of 1 MiB took 5 MiB, and the next run was killed for it."""
    limit = 1 << 20
    with make(narrower={"limits": {"workspace_max": limit}}) as box:
        box.files.write("kept", b"k" * 600_000)
        error = fails(TooLarge, "file_too_large", box.files.write, "big", b"x" * (5 << 20))
        assert (error.details["limit"], 0 < error.details["left"] < 450_000) == (limit, True)
        fails(TooLarge, "file_too_large", box.files.write, "big", b"x" * 500_000)
        fails(TooLarge, "file_too_large", box.files.copy, "kept", "copied")
        fails(TooLarge, "file_too_large", box.files.replace, "kept", "k" * 9, "k" * 99, count=None)
        box.files.write("tree/a", b"t" * 300_000)
        fails(TooLarge, "tree_too_large", box.files.copy, "tree", "tree2")
        with io.BytesIO() as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            member = tarfile.TarInfo("big")
            member.size = 500_000
            tar.addfile(member, io.BytesIO(b"x" * member.size))
            sent = packed.getvalue()
        fails(TooLarge, "archive_too_large", box.files.unpack, sent, "unpacked")
        fails(TooLarge, "file_too_large", box.uploads.put_bytes, "up.csv", b"x" * (limit + 1))
        box.files.write("kept", b"K" * 600_000)  # a replacement needs no more room
        found = [entry.path.removeprefix("/workspace/") for entry in box.files.find("*")]
        assert set(found) == {"kept", "tree", "tree/a", "uploads"} | {
            path for path in found if path.startswith("uploads/") or path == "unpacked"
        }
        assert box.run("print('alive')").stdout == "alive\n"
        box.files.delete("tree")
        box.files.write("now", b"n" * 300_000)


def hostile() -> bytes:
    """Everything that a tar can try."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, kind, link in (
            ("../../up", tarfile.REGTYPE, ""),
            ("/workspace/../etc/abs", tarfile.REGTYPE, ""),
            ("dev", tarfile.CHRTYPE, ""),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("lnk", tarfile.SYMTYPE, "/"),
            ("lnk2", tarfile.SYMTYPE, "../../.."),
            ("hard", tarfile.LNKTYPE, "/etc/passwd"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, link, 0o6777
            tar.addfile(member)
        member = tarfile.TarInfo("set-id")
        member.mode, member.size = 0o6755, 1
        tar.addfile(member, io.BytesIO(b"x"))
    return held.getvalue()


def test_what_is_in_a_hostile_archive_stays_out(box: Sandbox) -> None:
    done = box.files.unpack(hostile(), "hostile")
    assert done.skipped >= 6
    names = {entry.name for entry in box.files.list("hostile", max_depth=9)}
    assert "set-id" in names
    assert not names & {"dev", "pipe", "lnk", "lnk2", "hard"}
    assert box.run("import os; oct(os.stat('hostile/set-id').st_mode)").result == "'0o100755'"
    assert "up" not in {entry.name for entry in box.files.list(".")}
    for broken in (b"", b"garbage" * 1000, b"\x1f\x8b\x08" + b"x" * 100, b"PK\3\4" + b"x" * 100):
        fails(BadRequest, "not_an_archive", box.files.unpack, broken, "hostile")
    error = fails(InvalidPath, "invalid_path", box.files.unpack, b"", "uploads/temparea")
    assert error.details["reason"] == "read_only"
    fails(NotFound, "file_not_found", next, box.files.archive("nowhere"))
    fails(InvalidPath, "invalid_path", next, box.files.archive("hostile/set-id"))


@pytest.mark.full_tier
@pytest.mark.parametrize("form", rows(["gz", "bz2", "xz"], ["gz"]))
def test_what_is_almost_nothing_packed_is_unpacked_piece_by_piece(box: Sandbox, form: str) -> None:
    held, size = io.BytesIO(), 200 << 20
    with tarfile.open(fileobj=held, mode=f"w:{form}") as tar:  # type: ignore[call-overload]
        member = tarfile.TarInfo("zeros")
        member.size = size
        tar.addfile(member, SparseZeros())
    assert box.files.unpack(held.getvalue(), "zeros").bytes == size
    assert box.files.stat("zeros/zeros").size == size
    box.files.delete("zeros")


class SparseZeros:
    def read(self, size: int) -> bytes:
        return bytes(size)


def test_a_zip_that_cannot_be_read_says_so(box: Sandbox) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        zipped.writestr("a", "b")
    packed = bytearray(held.getvalue())
    packed[6] |= 1
    packed[packed.find(b"PK\1\2") + 8] |= 1  # encrypted
    fails(BadRequest, "not_an_archive", box.files.unpack, bytes(packed), "encrypted")


def test_copies_do_not_pass_the_limit_of_the_workspace(make: Make) -> None:
    with make(narrower={"limits": {"workspace_max": "1MiB"}}) as box:
        box.files.write("d/f", b"x" * 400_000)
        box.files.copy("d", "e")
        fails(TooLarge, "tree_too_large", box.files.copy, "d", "g")
        fails(TooLarge, "file_too_large", box.files.copy, "d/f", "h")
        assert not {"g", "h"} & {entry.name for entry in box.files.list()}


def test_an_archive_takes_a_process(make: Make) -> None:
    with make(narrower={"processes": False}) as box:
        box.files.write("a/b", "c")
        fails(Denied, "processes_denied", next, box.files.archive("a"))
        fails(Denied, "processes_denied", box.files.unpack, b"", "a")
        assert [m.line for m in box.files.grep("c", "a")] == [1]


@pytest.mark.full_tier
def test_a_bomb_is_refused_and_the_sandbox_survives(make: Make) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 64 << 20
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with make(narrower={"limits": {"workspace_max": "16MiB"}}) as box:
        assert box.run("kept = 1").error is None
        fails(SbxError, "archive_too_large", box.files.unpack, held.getvalue(), "bomb")
        assert box.run("kept").result == "1"
