"""Uploads: stored byte for byte in one step, within limits that name themselves."""

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import BadRequest, Conflict, InvalidPath, NotFound, TooLarge
from sbx.workspace.layout import ConversationFiles, DataDirectory
from sbx.workspace.uploads import UploadLimits, Uploads


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[ConversationFiles]:
    data = DataDirectory(tmp_path / "data")
    files = data.conversation(data.new_name(), data.new_name())
    yield files
    files.close()
    data.close()


@pytest.fixture
def uploads(conversation: ConversationFiles) -> Uploads:
    return conversation.uploads


def test_put_gives_back_the_same_bytes_their_size_and_hash(uploads: Uploads) -> None:
    body = os.urandom(700_000)
    upload = uploads.put("data.bin", iter([body[:300_000], body[300_000:]]))
    assert upload.size == 700_000
    assert upload.sha256 == hashlib.sha256(body).hexdigest()
    assert upload.path == "/workspace/uploads/temparea/data.bin"
    assert uploads.read("data.bin", max_bytes=1 << 20) == body
    assert uploads.get("data.bin") == upload
    assert uploads.list() == (upload,)


def test_put_takes_a_file_of_the_host(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "penguins.csv").write_text("species\nAdelie\n")
    (tmp_path / "link.csv").symlink_to("penguins.csv")
    assert uploads.put("penguins.csv", tmp_path / "link.csv").size == 15


def test_put_of_a_host_file_that_is_missing_or_no_file(uploads: Uploads, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotFound, match=r"nothing\.csv"):
        uploads.put("a", tmp_path / "nothing.csv")
    for wrong in (tmp_path / "fifo", tmp_path):
        with pytest.raises(InvalidPath):
            uploads.put("a", wrong)
    assert uploads.list() == ()


def test_put_replaces_in_one_step(uploads: Uploads) -> None:
    uploads.put("a", b"old")

    def body() -> Iterator[bytes]:
        yield b"new"
        assert uploads.read("a", max_bytes=9) == b"old"

    with uploads.open("a") as reader:
        uploads.put("a", body())
        assert b"".join(reader.chunks()) == b"old"
    assert uploads.read("a", max_bytes=9) == b"new"


def test_uploads_are_read_only_files(uploads: Uploads, conversation: ConversationFiles) -> None:
    uploads.put("a", b"x")
    assert stat.S_IMODE((conversation.uploads_path / "a").stat().st_mode) == 0o444


def test_too_large_names_the_limit_and_leaves_all_as_it_was(uploads: Uploads) -> None:
    uploads.put("a", b"old")
    with pytest.raises(TooLarge, match="limit of 5 bytes") as raised:
        uploads.put("a", iter([b"123", b"456"]), UploadLimits(max_file_size=5))
    assert raised.value.code == "file_too_large"
    assert raised.value.details["limit"] == 5
    assert uploads.read("a", max_bytes=9) == b"old"


def test_a_body_without_end_is_cut_at_the_limit(uploads: Uploads) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    with pytest.raises(TooLarge):
        uploads.put("a", endless(), UploadLimits(max_file_size=10_000))
    assert taken == 11


def test_too_many_files_but_replacing_one_is_no_more(uploads: Uploads) -> None:
    limits = UploadLimits(max_file_count=2)
    uploads.put("a", b"1", limits)
    uploads.put("b", b"2", limits)
    uploads.put("a", b"3", limits)
    with pytest.raises(Conflict, match="limit is 2") as raised:
        uploads.put("c", b"4", limits)
    assert (raised.value.code, raised.value.details["limit"]) == ("too_many_files", 2)


def test_the_total_counts_other_files_and_not_the_one_replaced(uploads: Uploads) -> None:
    limits = UploadLimits(max_total_bytes=10)
    uploads.put("a", b"123456", limits)
    uploads.put("a", b"1234567890", limits)
    with pytest.raises(TooLarge) as raised:
        uploads.put("b", b"1", limits)
    assert (raised.value.code, raised.value.details["limit"]) == ("uploads_too_large", 10)


@pytest.mark.parametrize("name", ["a.exe", "a", ".csv", "a.csv.exe", "csv"])
def test_a_type_that_is_not_allowed_names_those_that_are(uploads: Uploads, name: str) -> None:
    limits = UploadLimits(allowed_types=frozenset({"csv", "txt"}))
    with pytest.raises(BadRequest, match="csv, txt") as raised:
        uploads.put(name, b"", limits)
    assert raised.value.code == "file_type_not_allowed"
    assert uploads.put("A.CSV", b"", limits).name == "A.CSV"


def test_concurrent_puts_stay_within_the_count(uploads: Uploads) -> None:
    limits = UploadLimits(max_file_count=3)
    everybody = threading.Barrier(8)
    refused: list[str] = []

    def put(number: int) -> None:
        def body() -> Iterator[bytes]:
            everybody.wait(60)  # all have passed the early check
            yield b"x"

        try:
            uploads.put(str(number), body(), limits)
        except Conflict as error:
            refused.append(error.code)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(uploads.list()) == 3
    assert refused == ["too_many_files"] * 5


def test_delete_removes_one_and_a_missing_one_is_not_found(uploads: Uploads) -> None:
    uploads.put("a", b"")
    uploads.delete("a")
    for call in (uploads.delete, uploads.get, uploads.open):
        with pytest.raises(NotFound) as raised:
            call("a")
        assert raised.value.code == "file_not_found"


def test_the_hash_survives_a_restart_and_a_lost_attribute(
    conversation: ConversationFiles, tmp_path: Path
) -> None:
    upload = conversation.uploads.put("a", b"abc")
    path = conversation.uploads_path / "a"
    if "user.sbx.sha256" in os.listxattr(path):
        path.chmod(0o600)
        os.removexattr(path, "user.sbx.sha256")
    with DataDirectory(tmp_path / "data") as data:
        sandbox, name = conversation.path.parts[-2:]
        again = data.conversation(sandbox, name)
        assert again.uploads.list() == (upload,)
        again.close()
