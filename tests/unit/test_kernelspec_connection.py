"""The connection file that a client hands to `python -m sbx.jupyter`: read with care, filled in."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.connect import write_connection_file

from sbx.errors import BadRequest, NotFound
from sbx.jupyter.connection import CHANNELS, ConnectionInfo
from sbx.jupyter.connection_file import read, telling

BOUND = ConnectionInfo(b"k", "tcp", "127.0.0.1", 1, 2, 3, 4, 5)


def test_what_a_client_wrote_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kernel.json"
    keys: Any = {"curve_publickey": b"p" * 40, "curve_secretkey": b"s" * 40}
    ports: Any = {f"{name}_port": 1024 + n for n, name in enumerate(CHANNELS)}
    also: Any = {"kernel_name": "sbx", "jupyter_session": "a.ipynb"}
    write_connection_file(str(path), key=b"secret", **ports, **keys, **also)
    assert read(path) == ConnectionInfo(key=b"secret", **ports, **keys)


def test_without_a_file_a_key_is_made_and_ports_are_to_be_chosen(tmp_path: Path) -> None:
    one, other = read(tmp_path / "new.json"), read(tmp_path / "new.json")
    assert len(one.key) >= 32
    assert one.key != other.key
    assert one.shell_port == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{" * 100_000,
        '{"shell_port": "80"}',
        '{"shell_port": -1}',
        '{"shell_port": 65536}',
        '{"transport": "inproc"}',
        '{"key": 7}',
        '{"ip": null}',
        '{"curve_publickey": "short"}',
        json.dumps({"curve_secretkey": "ä" * 40}),
        '{"x": "' + "y" * 70_000 + '"}',
    ],
    ids=lambda content: content[:30],
)
def test_what_is_none_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "k.json").write_text(content)
    with pytest.raises(BadRequest) as raised:
        read(tmp_path / "k.json")
    assert raised.value.code == "invalid_connection_file"


def test_a_file_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as raised:
        read(tmp_path)
    assert raised.value.code == "connection_file_unreadable"


def test_a_file_of_ours_is_for_its_owner_and_goes_with_the_kernel(tmp_path: Path) -> None:
    path, bound = tmp_path / "k.json", BOUND
    with telling(path, bound):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read(path) == bound
    assert not path.exists()


def test_a_client_s_file_is_filled_in_and_stays(tmp_path: Path) -> None:
    path, bound = tmp_path / "k.json", BOUND
    path.write_text(json.dumps({"key": "k", "shell_port": 0}))
    assert read(path) == ConnectionInfo(key=b"k")
    with telling(path, bound):
        before = path.stat()
    assert read(path) == bound
    with telling(path, bound):
        assert path.stat() == before  # which says so already


def test_a_client_that_reads_meanwhile_gets_a_whole_file(tmp_path: Path) -> None:
    """The file was written in place, and a client that polled it met an empty one."""
    path = tmp_path / "k.json"
    path.write_text(json.dumps({"key": "k"}))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with path.open() as reading, telling(link, BOUND):
        assert json.load(reading) == {"key": "k"}
        assert read(path) == BOUND
        assert link.is_symlink()
        assert {one.name for one in tmp_path.iterdir()} == {"k.json", "link.json"}


def test_a_place_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound), telling(tmp_path / "no" / "k.json", BOUND):
        pass
