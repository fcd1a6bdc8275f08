"""The layout on disk: who may pass, what is made, and that removed means out of reach at once."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import Broken, Denied, InvalidPath, NotFound
from sbx.workspace.files import Files
from sbx.workspace.layout import ConversationFiles, DataDirectory

JAIL = (65534, 65534)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="a jail of another uid needs root")


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory(tmp_path / "data") as data:
        yield data


@pytest.fixture
def conversation(data: DataDirectory) -> Iterator[ConversationFiles]:
    files = data.conversation(data.new_name(), data.new_name())
    yield files
    files.close()


@pytest.fixture
def files(conversation: ConversationFiles) -> Files:
    return Files(conversation.files, conversation.uploads.tree)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_conversation_has_its_directories_and_mount_points(
    conversation: ConversationFiles,
) -> None:
    assert sorted(os.listdir(conversation.path)) == ["files", "staging", "uploads"]
    assert sorted(os.listdir(conversation.files_path / "uploads")) == ["generated", "temparea"]


def test_without_a_free_descriptor_a_directory_without_files_is_not_taken_for_one_with_files(
    data: DataDirectory,
) -> None:
    """It would be kept for an operator."""
    sandbox = data.new_name()
    data.conversation(sandbox, data.new_name()).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            data.has_no_files(sandbox)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert data.has_no_files(sandbox)


@root_only
def test_a_jail_of_another_uid_reaches_its_files_and_lists_nothing_above(
    data: DataDirectory,
) -> None:
    files = data.conversation(data.new_name(), data.new_name(), owner=JAIL)
    assert mode(files.path) == mode(files.path.parent) == mode(data.path) == 0o711
    assert (files.files_path.stat().st_uid, mode(files.files_path)) == (65534, 0o700)
    assert (files.uploads_path.stat().st_uid, mode(files.uploads_path)) == (0, 0o750)
    assert files.uploads_path.stat().st_gid == 65534
    assert mode(files.path / "staging") == 0o700
    files.close()


def test_without_an_owner_the_files_are_private(conversation: ConversationFiles) -> None:
    for path in (conversation.files_path, conversation.uploads_path, conversation.path):
        assert mode(path) == 0o700


@pytest.mark.parametrize("name", ["u1", "..", "a" * 31, "A" * 32, "a" * 32 + "\n", "0" * 31 + "/"])
def test_no_id_of_a_caller_is_ever_a_path_component(data: DataDirectory, name: str) -> None:
    with pytest.raises(Broken):
        data.conversation(name, data.new_name())
    with pytest.raises(Broken):
        data.remove(name)


def test_whatever_took_the_place_of_a_mount_point_gives_way(
    conversation: ConversationFiles, tmp_path: Path
) -> None:
    place = conversation.files_path / "uploads"
    for name in ("temparea", "generated"):
        os.rmdir(place / name)
    (place / "temparea").symlink_to(tmp_path)
    os.mkfifo(place / "generated")
    conversation.prepare()
    for name in ("temparea", "generated"):
        assert stat.S_ISDIR((place / name).lstat().st_mode)
    assert tmp_path.exists()


def test_mount_points_that_lost_their_permissions_get_them_back(
    conversation: ConversationFiles,
) -> None:
    (conversation.files_path / "uploads/generated").chmod(0)
    (conversation.files_path / "uploads").chmod(0)
    conversation.prepare(shared=True)
    assert mode(conversation.files_path / "uploads/generated") == 0o700
    assert (conversation.files_path / "shared").is_dir()


def test_removed_is_out_of_reach_at_once_and_swept_later(data: DataDirectory) -> None:
    sandbox, name = data.new_name(), data.new_name()
    with data.conversation(sandbox, name) as files:
        files.files.write(("d", "e", "f"), b"", max_bytes=9)
    assert not data.remove(sandbox, name, deadline_s=0)
    assert not files.path.exists()
    assert data.sweep()
    assert os.listdir(data.path / "removed") == []


def test_removing_a_sandbox_takes_all_its_conversations(data: DataDirectory) -> None:
    sandbox = data.new_name()
    for _ in range(2):
        data.conversation(sandbox, data.new_name()).close()
    data.shared(sandbox).close()
    assert data.sandboxes() == (sandbox,)
    assert data.remove(sandbox)
    assert data.remove(sandbox)
    assert data.sandboxes() == ()


def test_tidy_removes_what_a_crash_left_half_written(
    data: DataDirectory, conversation: ConversationFiles
) -> None:
    (conversation.path / "staging/.sbx-half").write_text("x")
    assert data.tidy(conversation.path.parent.name, conversation.path.name)
    assert os.listdir(conversation.path / "staging") == []


def test_a_data_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Denied) as raised:
        DataDirectory(tmp_path / "open")
    assert raised.value.code == "data_directory_not_private"


def test_a_data_directory_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(InvalidPath):
        DataDirectory(tmp_path / "link")


def test_no_fd_is_left_after_close(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with DataDirectory(tmp_path / "data") as data:
        data.conversation(data.new_name(), data.new_name()).close()
        data.shared(data.new_name()).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_reads_an_upload_where_the_code_inside_sees_it(
    files: Files, conversation: ConversationFiles
) -> None:
    conversation.uploads.put("x.csv", b"1,2")
    for path in ("uploads/temparea/x.csv", "/workspace/uploads/temparea/x.csv"):
        assert files.read(path) == b"1,2"
    assert files.stat("uploads/temparea/x.csv").size == 3
    paths = [entry.path for entry in files.list(max_depth=3)]
    assert "/workspace/uploads/temparea/x.csv" in paths
    assert [entry.name for entry in files.list("uploads/temparea")] == ["x.csv"]


def test_files_shares_between_conversations_only_where_there_is_a_shared_tree(
    data: DataDirectory,
) -> None:
    sandbox = data.new_name()
    with (
        data.conversation(sandbox, data.new_name()) as one,
        data.conversation(sandbox, data.new_name()) as two,
    ):
        shared = data.shared(sandbox)
        Files(one.files, one.uploads.tree, shared).write("shared/a", b"ours")
        assert Files(two.files, two.uploads.tree, shared).read("shared/a") == b"ours"
        with pytest.raises(NotFound):
            Files(two.files, two.uploads.tree).read("shared/a")
        shared.close()
