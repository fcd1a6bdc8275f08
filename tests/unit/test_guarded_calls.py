"""The calls that the path guard performs, made by this process in a directory of its own.

The guard reads paths from the memory of the caller, and opens descriptors of the caller. Here the
caller is the test itself, so only the places of the rules and of the quarantine are replaced.
"""

import ctypes
import errno
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sbx.guest import guarded_calls, guarded_names, guarded_paths, hard_links, quarantine_items
from sbx.guest.guarded_calls import Answer, GuardedCalls, Opened, SlowOpen
from sbx.guest.guarded_paths import AT_EMPTY_PATH, AT_FDCWD, AT_REMOVEDIR, Outside
from sbx.linux import inode_flags
from sbx.linux.seccomp_notify import SyscallNotice, path_calls
from sbx.workspace.host_executables import path_rules

CREATE = os.O_CREAT | os.O_WRONLY
NOREPLACE, EXCHANGE = 1, 2
NUMBERS = path_calls()


class Caller:
    """A process of a jail. `root` is its workspace; a relative path starts there."""

    def __init__(self, root: Path, *, fifos: bool = True) -> None:
        self.root = root
        walls = {"root": str(root), "link_prefixes": ["/usr"], "fifos": fifos}
        self._guard = GuardedCalls(walls)

    def answer(self, name: str, *arguments: int | str) -> Answer:
        texts: list[ctypes.Array[ctypes.c_char]] = []
        numbers = []
        for argument in arguments:
            if isinstance(argument, str):
                texts.append(ctypes.create_string_buffer(argument.encode()))
                numbers.append(ctypes.addressof(texts[-1]))
            else:
                numbers.append(argument & ((1 << 64) - 1))
        numbers += [0] * (6 - len(numbers))
        return self._guard.perform(SyscallNotice(1, os.getpid(), NUMBERS[name], tuple(numbers)))

    def outcome(self, name: str, *arguments: int | str) -> str:
        """Return the errno of a call, or `outside` if it is left to Linux."""
        try:
            answer = self.answer(name, *arguments)
        except Outside:
            return "outside"
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        if answer is not None:
            os.close(answer.fd)
        return "done"


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    root, quarantine = tmp_path / "root", tmp_path / "quarantine"
    for directory in (root, quarantine / "items", quarantine / "records"):
        directory.mkdir(parents=True)
    (root / "linked").touch()
    status = (root / "linked").stat()
    rules = path_rules(aliases=("tools/check",)).to_json()
    content = {"rules": rules, "linked": [[status.st_dev, status.st_ino]]}
    (quarantine / "rules.json").write_text(json.dumps(content))
    for name, below in (
        ("QUARANTINE", ""),
        ("ITEMS", "/items"),
        ("RECORDS", "/records"),
        ("RULES", "/rules.json"),
    ):
        for module in (guarded_calls, guarded_names, guarded_paths, quarantine_items):
            monkeypatch.setattr(module, name, f"{quarantine}{below}", raising=False)
    item = re.compile(re.escape(f"{quarantine}/items/") + "([0-9a-f]{16})")
    monkeypatch.setattr(guarded_paths, "_ITEM", item)
    monkeypatch.chdir(root)
    return Caller(root)


@contextmanager
def opened(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


# -- open ------------------------------------------------------------------------------------------


def test_open_that_changes_nothing_is_left_to_linux(caller: Caller) -> None:
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    for path, flags in (
        ("file", os.O_PATH),
        ("file", os.O_RDONLY),
        (".", os.O_WRONLY),
        ("missing", os.O_WRONLY),
        ("link", os.O_WRONLY | os.O_NOFOLLOW),
        ("../elsewhere", CREATE),
    ):
        assert caller.outcome("openat", AT_FDCWD, path, flags) == "outside", path


def test_open_creates_with_the_mode_that_the_umask_leaves(caller: Caller) -> None:
    before = os.umask(0o027)
    try:
        assert caller.outcome("openat", AT_FDCWD, "file", CREATE, 0o6777) == "done"
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("file").stat().st_mode) == 0o750
    assert caller.outcome("openat", AT_FDCWD, "file", CREATE | os.O_EXCL) == "EEXIST"


def test_open_of_a_fifo_may_wait(caller: Caller) -> None:
    os.mkfifo("fifo")
    answer = caller.answer("openat", AT_FDCWD, "fifo", os.O_WRONLY)
    assert isinstance(answer, SlowOpen)
    assert stat.S_ISFIFO(os.fstat(answer.fd).st_mode)
    os.close(answer.fd)


def test_path_of_an_own_descriptor_opens_the_file_of_the_workspace(caller: Caller) -> None:
    Path("file").write_text("text")
    with opened("file") as fd, opened("linked") as linked, tempfile.TemporaryFile() as unnamed:
        answer = caller.answer("openat", AT_FDCWD, f"/dev/fd/{fd}", os.O_WRONLY | os.O_TRUNC)
        assert isinstance(answer, Opened)
        os.close(answer.fd)
        assert Path("file").read_text() == ""
        path = f"/proc/self/fd/{linked}"
        assert caller.outcome("openat", AT_FDCWD, path, os.O_WRONLY) == "EROFS"
        outside = f"/dev/fd/{unnamed.fileno()}"
        assert caller.outcome("openat", AT_FDCWD, outside, os.O_WRONLY) == "outside"
    with socket.socket() as sock:
        path = f"/dev/fd/{sock.fileno()}"
        assert caller.outcome("openat", AT_FDCWD, path, os.O_WRONLY) == "outside"


def test_own_descriptor_of_a_removed_file_can_be_opened_again(caller: Caller) -> None:
    Path("file").write_text("text")
    with opened("file") as fd:
        Path("file").unlink()
        assert caller.outcome("openat", AT_FDCWD, f"/dev/fd/{fd}", os.O_WRONLY) == "done"


def test_file_without_a_name_is_made_in_a_directory_and_gets_a_name(caller: Caller) -> None:
    flags = os.O_TMPFILE | os.O_RDWR
    answer = caller.answer("openat", AT_FDCWD, ".", flags, 0o600)
    assert isinstance(answer, Opened)
    link = ("linkat", answer.fd, "", AT_FDCWD)
    assert caller.outcome(*link, ".envrc", AT_EMPTY_PATH) == "EROFS"
    assert caller.outcome(*link, "named", AT_EMPTY_PATH) == "done"
    assert os.path.samestat(os.fstat(answer.fd), os.stat("named"))
    os.close(answer.fd)
    assert set(os.listdir()) == {"linked", "named"}


def test_descriptor_of_another_mount_gets_no_name(caller: Caller) -> None:
    with opened("/proc/self/status") as fd:
        call = ("linkat", fd, "", AT_FDCWD, "name", AT_EMPTY_PATH)
        assert caller.outcome(*call) == "EXDEV"


def test_endless_symlinks_are_refused(caller: Caller) -> None:
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    assert caller.outcome("openat", AT_FDCWD, "one", CREATE) == "ELOOP"
    with opened(".") as directory:
        assert caller.outcome("openat", directory, "one", CREATE) == "ELOOP"


@pytest.mark.parametrize(("size", "left"), [(0, ""), (2, "te"), (6, "text\0\0")])
def test_truncate_changes_the_size_of_a_regular_file(caller: Caller, size: int, left: str) -> None:
    Path("file").write_text("text")
    assert caller.outcome("truncate", "file", size) == "done"
    assert Path("file").read_text() == left
    assert caller.outcome("truncate", ".", size) == "outside"
    assert caller.outcome("truncate", "linked", size) == "EROFS"
    os.mkfifo("fifo")
    assert caller.outcome("truncate", "fifo", size) == "EINVAL"


# -- names -----------------------------------------------------------------------------------------


def test_existing_name_is_not_made_again(caller: Caller) -> None:
    Path("file").touch()
    for call in (
        ("mkdirat", AT_FDCWD, "file", 0o700),
        ("linkat", AT_FDCWD, "linked", AT_FDCWD, "file", 0),
        ("renameat2", AT_FDCWD, "linked", AT_FDCWD, "file", NOREPLACE),
        ("symlinkat", "linked", AT_FDCWD, "file"),
        ("mknodat", AT_FDCWD, "file", stat.S_IFREG | 0o600),
    ):
        assert caller.outcome(*call) == "EEXIST", call


def test_devices_are_refused_and_fifos_are_made(caller: Caller) -> None:
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        assert caller.outcome("mknodat", AT_FDCWD, "device", kind | 0o600) == "EROFS"
    assert caller.outcome("mknodat", AT_FDCWD, "fifo", stat.S_IFIFO | 0o600) == "done"
    assert stat.S_ISFIFO(Path("fifo").stat().st_mode)
    without = Caller(caller.root, fifos=False)
    assert without.outcome("mknodat", AT_FDCWD, "other", stat.S_IFIFO | 0o600) == "EACCES"
    assert without.outcome("mknodat", AT_FDCWD, "other", stat.S_IFREG | 0o600) == "done"


@pytest.mark.parametrize(
    ("link", "outcome"),
    [
        ("/usr/bin/env", "done"),
        ("/usr/../etc", "EPERM"),
        ("/etc/passwd", "EPERM"),
        ("below/file", "done"),
        ("../elsewhere", "EPERM"),
    ],
)
def test_symlink_leads_nowhere_but_below_or_to_shared_programs(
    caller: Caller, link: str, outcome: str
) -> None:
    assert caller.outcome("symlinkat", link, AT_FDCWD, "name") == outcome
    assert os.path.lexists("name") == (outcome == "done")


def test_symlink_in_place_of_a_missing_parent_of_a_protected_name_is_refused(
    caller: Caller,
) -> None:
    assert caller.outcome("symlinkat", "evil", AT_FDCWD, "tools") == "EROFS"


def test_directory_keeps_its_depth_and_its_repository(caller: Caller) -> None:
    for path in ("a/b", ".git/c", ".git/d"):
        Path(path).mkdir(parents=True)
    assert caller.outcome("renameat", AT_FDCWD, "a/b", AT_FDCWD, "b") == "EXDEV"
    assert caller.outcome("renameat", AT_FDCWD, ".git/c", AT_FDCWD, ".git/e") == "EROFS"
    Path("f").mkdir()
    assert caller.outcome("renameat", AT_FDCWD, "a/b", AT_FDCWD, "f/b") == "done"


def test_repository_stays_protected_without_its_rule_in_the_table(caller: Caller) -> None:
    """The name `.git` is that of a bare repository, too."""
    rules = caller.root.parent / "quarantine/rules.json"
    content = {"rules": path_rules(remove=(".git",)).to_json(), "linked": []}
    rules.write_text(json.dumps(content))
    for path in (".git/a", "b"):
        Path(path).mkdir(parents=True)
    for source, destination in ((".git/a", "b/a"), ("b", ".git/b")):
        call = ("renameat", AT_FDCWD, source, AT_FDCWD, destination)
        assert caller.outcome(*call) == "EROFS", source


def test_symlink_gets_no_second_name(caller: Caller) -> None:
    Path("link").symlink_to("linked")
    assert caller.outcome("linkat", AT_FDCWD, "link", AT_FDCWD, "name", 0) == "EPERM"


def test_rename_stays_within_the_workspace_and_exchanges_nothing(caller: Caller) -> None:
    for name in ("one", "two"):
        Path(name).touch()
    for source, destination, flags, outcome in (
        ("one", "../out", 0, "EXDEV"),
        ("../out", "one", 0, "EXDEV"),
        ("../out", "../other", 0, "outside"),
        ("one", "two", EXCHANGE, "EINVAL"),
        ("one", "tools/check", 0, "ENOENT"),
        ("one", "three", NOREPLACE, "done"),
    ):
        call = ("renameat2", AT_FDCWD, source, AT_FDCWD, destination, flags)
        assert caller.outcome(*call) == outcome, (source, destination)
    assert set(os.listdir()) == {"linked", "two", "three"}


def test_removal_takes_free_names_only(caller: Caller) -> None:
    Path("directory").mkdir()
    Path(".envrc").touch()
    for path, flags, outcome in (
        ("missing", 0, "ENOENT"),
        (".envrc", 0, "EROFS"),
        ("linked", 0, "done"),
        ("directory", AT_REMOVEDIR, "done"),
        ("../quarantine", AT_REMOVEDIR, "outside"),
    ):
        assert caller.outcome("unlinkat", AT_FDCWD, path, flags) == outcome, path
    assert os.listdir() == [".envrc"]


# -- the quarantine --------------------------------------------------------------------------------


def test_new_protected_file_and_directory_are_made_in_the_quarantine(caller: Caller) -> None:
    assert caller.outcome("openat", AT_FDCWD, ".envrc", CREATE, 0o600) == "done"
    assert caller.outcome("mkdirat", AT_FDCWD, ".vscode", 0o700) == "done"
    items = caller.root.parent / "quarantine/items"
    for name in (".envrc", ".vscode"):
        assert Path(name).is_symlink()
        assert Path(os.readlink(name)).parent == items
    assert caller.outcome("unlinkat", AT_FDCWD, ".vscode", AT_REMOVEDIR) == "done"
    assert [path.name for path in items.iterdir()] == [Path(os.readlink(".envrc")).name]


def test_free_file_that_replaces_a_link_of_an_item_becomes_its_content(caller: Caller) -> None:
    assert caller.outcome("openat", AT_FDCWD, ".envrc", CREATE, 0o600) == "done"
    item = os.readlink(".envrc")
    Path("file").write_text("text")
    assert caller.outcome("renameat", AT_FDCWD, "file", AT_FDCWD, ".envrc") == "done"
    assert (os.readlink(".envrc"), Path(item).read_text()) == (item, "text")
    assert not Path("file").exists()


def test_new_head_of_a_repository_is_found_without_its_case(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("one", "two"):
        for part in ("objects", "refs"):
            Path(path, part).mkdir(parents=True)
    assert caller.outcome("openat", AT_FDCWD, "one/head", CREATE, 0o600) == "done"
    assert Path("one/head").is_file()
    assert not Path("one/head").is_symlink()
    monkeypatch.setattr(inode_flags, "may_fold_case", lambda directory: True)
    assert caller.outcome("openat", AT_FDCWD, "two/head", CREATE, 0o600) == "done"
    assert Path("two/head").is_symlink()


def test_item_whose_name_is_taken_meanwhile_is_not_given(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object, **__: object) -> None:
        raise FileExistsError(errno.EEXIST, "taken")

    monkeypatch.setattr(os, "symlink", taken)
    before = os.listdir("/proc/self/fd")
    assert caller.outcome("openat", AT_FDCWD, ".envrc", CREATE, 0o600) == "EEXIST"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_full_quarantine_takes_no_item(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_items, "ITEMS_MAX", 0)
    assert caller.outcome("openat", AT_FDCWD, ".envrc", CREATE, 0o600) == "ENOSPC"


def test_link_of_an_item_is_made_again_under_its_own_name_only(caller: Caller) -> None:
    assert caller.outcome("openat", AT_FDCWD, ".envrc", CREATE, 0o600) == "done"
    item = os.readlink(".envrc")
    assert caller.outcome("unlinkat", AT_FDCWD, ".envrc", 0) == "done"
    assert caller.outcome("symlinkat", item, AT_FDCWD, ".vimrc") == "EROFS"
    assert caller.outcome("symlinkat", item, AT_FDCWD, ".envrc") == "done"
    move = ("renameat", AT_FDCWD, ".envrc", AT_FDCWD)
    assert caller.outcome(*move, ".vimrc") == "EROFS"
    assert caller.outcome(*move, "free") == "done"
    assert os.readlink("free") == item


def hidden(caller: Caller, name: str, text: str) -> str:
    """Create a new hidden file, and return its item."""
    opened = caller.answer("openat", AT_FDCWD, name, CREATE, 0o640)
    assert isinstance(opened, Opened)
    with open(opened.fd, "w") as file:
        file.write(text)
    return os.readlink(name)


def items() -> set[str]:
    return {*os.listdir("../quarantine/items")}


def test_hidden_file_takes_the_meaning_of_its_new_name(caller: Caller) -> None:
    """A program that writes `.a.new` and renames it to `a` lost `a`: only a link would arrive."""
    move = ("renameat", AT_FDCWD, ".new", AT_FDCWD)
    for name in ("a", ".conf", ".npmrc"):
        for text in ("first", "second"):
            hidden(caller, ".new", text)
            assert caller.outcome(*move, name) == "done"
            assert Path(name).read_text() == text
            assert not os.path.lexists(".new")
    assert Path("a").is_symlink() is False
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o640
    assert {os.path.basename(os.readlink(name)) for name in (".conf", ".npmrc")} == items()
    item = hidden(caller, ".b", "text")
    assert caller.outcome("linkat", AT_FDCWD, ".b", AT_FDCWD, "b", 0) == "done"
    assert caller.outcome("linkat", AT_FDCWD, ".b", AT_FDCWD, ".c", 0) == "done"
    assert (Path("b").read_text(), Path("b").is_symlink()) == ("text", False)
    assert os.readlink(".c") != item
    assert caller.outcome("renameat", AT_FDCWD, ".b", AT_FDCWD, ".b") == "done"
    assert Path(".b").read_text() == "text"


def test_hidden_file_ends_with_its_last_link(caller: Caller) -> None:
    """1,000 temporary files made the quarantine full: each left an item."""
    item = hidden(caller, ".a", "1")
    assert caller.outcome("unlinkat", AT_FDCWD, ".a", 0) == "done"
    assert items() == set()
    item = hidden(caller, ".a", "2")
    assert caller.outcome("symlinkat", item, AT_FDCWD, "copy") == "done"
    assert caller.outcome("unlinkat", AT_FDCWD, ".a", 0) == "done"
    assert Path("copy").read_text() == "2"
    assert caller.outcome("mkdirat", AT_FDCWD, ".d", 0o755) == "done"
    assert caller.outcome("unlinkat", AT_FDCWD, ".d", AT_REMOVEDIR) == "done"
    assert len(items()) == 1


def test_hidden_file_that_is_large_is_copied_by_the_program(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden(caller, ".a", "1234")
    monkeypatch.setattr(hard_links, "COPY_MAX", 3)
    assert caller.outcome("renameat", AT_FDCWD, ".a", AT_FDCWD, "a") == "EXDEV"
    assert Path(".a").read_text() == "1234"


def test_name_that_is_an_option_has_no_link(caller: Caller) -> None:
    """The link of an item has its name: `tar cf x.tar *` takes it for an option as well."""
    option = "--checkpoint-action=exec=sh x"
    assert caller.outcome("openat", AT_FDCWD, option, CREATE, 0o600) == "done"
    assert caller.outcome("openat", AT_FDCWD, "+!id", CREATE, 0o600) == "done"  # vim *
    assert caller.outcome("openat", AT_FDCWD, "+page.svelte", CREATE, 0o600) == "done"
    assert caller.outcome("openat", AT_FDCWD, "+page.svelte", CREATE, 0o600) == "done"
    assert caller.outcome("mkdirat", AT_FDCWD, "-d", 0o700) == "EROFS"
    assert caller.outcome("symlinkat", "a", AT_FDCWD, "-l") == "EROFS"
    assert caller.outcome("openat", AT_FDCWD, "a", CREATE, 0o600) == "done"
    assert caller.outcome("renameat", AT_FDCWD, "a", AT_FDCWD, "-a") == "done"
    assert caller.outcome("openat", AT_FDCWD, ".b", CREATE, 0o600) == "done"
    assert caller.outcome("renameat", AT_FDCWD, ".b", AT_FDCWD, "-b") == "done"
    assert [name for name in os.listdir() if name.startswith(("-", "+"))] == ["+page.svelte"]
    assert len(items()) == 4


def test_directory_leaves_a_build_directory_by_a_copy(caller: Caller) -> None:
    """Below it, new hidden names are free, and they would come along."""
    Path("build/sub").mkdir(parents=True)
    Path("src").mkdir()
    assert caller.outcome("renameat", AT_FDCWD, "build/sub", AT_FDCWD, "src/sub") == "EXDEV"
    assert caller.outcome("renameat", AT_FDCWD, "build", AT_FDCWD, "other") == "EXDEV"
    assert caller.outcome("renameat", AT_FDCWD, "build", AT_FDCWD, "dist.old") == "done"


@pytest.mark.parametrize(
    ("file", "destination"), [("build/x", "src/x"), ("node_modules/x", "src/x"), ("src/x", "a/lab")]
)
def test_only_the_checked_file_moves_where_a_directory_may_not(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, file: str, destination: str
) -> None:
    """A second sandbox put a directory in place of the file, between the check and rename(2): so
    `.vscode/tasks.json` left `node_modules`."""
    for name in ("build", "node_modules", "src", "a", f"{file}.directory/.vscode"):
        Path(name).mkdir(exist_ok=True, parents=True)
    Path(file).write_text("checked")
    check = guarded_names.GuardedNames.check_move

    def exchanged(*arguments: object) -> bool:
        result = check(*arguments)  # type: ignore[arg-type]
        Path(file).rename(f"{file}.away")
        Path(f"{file}.directory").rename(file)
        return result

    monkeypatch.setattr(guarded_names.GuardedNames, "check_move", exchanged)
    caller.outcome("renameat", AT_FDCWD, file, AT_FDCWD, destination)
    assert not Path(destination).is_dir()


def test_no_directory_gets_a_name_that_is_free_for_directories_only(caller: Caller) -> None:
    """A second sandbox put a file in place of a directory that was about to become HEAD."""
    Path("d").mkdir()
    assert caller.outcome("renameat", AT_FDCWD, "d", AT_FDCWD, "HEAD") == "EXDEV"
    assert caller.outcome("mkdirat", AT_FDCWD, "HEAD", 0o700) == "done"


def test_temporary_name_of_another_guard_is_not_taken(caller: Caller) -> None:
    fresh = ".sbx-0123456789abcdef"
    Path(fresh).touch()
    Path("a").touch()
    assert caller.outcome("renameat", AT_FDCWD, "a", AT_FDCWD, fresh) == "EROFS"
    assert caller.outcome("unlinkat", AT_FDCWD, fresh, 0) == "done"


# -- modes -----------------------------------------------------------------------------------------


def test_mode_of_what_the_guard_needs_stays(caller: Caller) -> None:
    for path in (".", "../quarantine", "../quarantine/rules.json"):
        assert caller.outcome("fchmodat", AT_FDCWD, path, 0) == "EPERM", path


def test_mode_is_set_by_path_and_by_descriptor_without_set_id_bits(caller: Caller) -> None:
    Path("file").touch()
    Path("link").symlink_to("file")
    Path("directory").mkdir()
    assert caller.outcome("fchmodat", AT_FDCWD, "file", 0o6711) == "done"
    assert stat.S_IMODE(Path("file").stat().st_mode) == 0o711
    with opened("file") as fd:
        assert caller.outcome("fchmod", fd, 0o600) == "done"
        assert stat.S_IMODE(Path("file").stat().st_mode) == 0o600
        assert caller.outcome("fchmodat2", fd, "", 0o640, AT_EMPTY_PATH) == "done"
        assert stat.S_IMODE(Path("file").stat().st_mode) == 0o640
    assert caller.outcome("fchmodat", AT_FDCWD, "directory", 0) == "done"
    assert stat.S_IMODE(Path("directory").stat().st_mode) == 0o700
    no_follow = guarded_paths.AT_SYMLINK_NOFOLLOW
    assert caller.outcome("fchmodat2", AT_FDCWD, "link", 0o600, no_follow) == "ENOTSUP"
    assert caller.outcome("fchmodat", AT_FDCWD, "linked", 0o600) == "EROFS"


def test_mode_of_a_file_with_further_names_is_set_on_a_copy(caller: Caller) -> None:
    """The other names may be those of a store of packages, outside of the workspace."""
    Path("file").touch(0o600)
    Path("../store").hardlink_to("file")
    with opened("file") as fd:
        assert caller.outcome("fchmod", fd, 0o600) == "done"
        assert os.path.samefile("file", "../store")
        assert caller.outcome("fchmod", fd, 0o700) == "EROFS"
    assert caller.outcome("fchmodat", AT_FDCWD, "file", 0o700) == "done"
    assert [stat.S_IMODE(os.stat(name).st_mode) for name in ("file", "../store")] == [0o700, 0o600]
