"""What is loaded is what was built, or nothing."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from sbx.errors import Broken, CannotEnforce
from sbx.isolation import seccomp as filters
from sbx.isolation.seccomp import load_filter
from sbx.linux import seccomp


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the default filter, in an installation that a test may damage."""
    original = filters.file_of("default", "x86_64")
    shutil.copy(original, tmp_path)
    monkeypatch.setattr(filters, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path / original.name


@pytest.mark.parametrize("machine", filters.MACHINES)
@pytest.mark.parametrize("name", filters.NAMES)
def test_filter_comes_with_its_hash(name: str, machine: str) -> None:
    loaded = load_filter(name, machine)
    assert loaded.name == name
    assert loaded.sha256 == hashlib.sha256(loaded.program).hexdigest()
    assert 0 < len(loaded.program) // seccomp.INSTRUCTION_BYTES < seccomp.MAX_INSTRUCTIONS


def test_machine_without_a_filter_is_refused_by_name() -> None:
    with pytest.raises(CannotEnforce, match="riscv64"):
        load_filter("default", "riscv64")


def test_half_a_file_is_refused(copied: Path) -> None:
    text = copied.read_text()
    copied.write_text(text[: text.rindex("\n", 0, len(text) * 2 // 3) + 1])
    with pytest.raises(Broken, match="damaged"):
        load_filter("default", "x86_64")


def test_changed_instruction_is_refused(copied: Path) -> None:
    copied.write_text(copied.read_text().replace("0600 0000 0100 0500", "0600 0000 0000 ff7f", 1))
    with pytest.raises(Broken, match="damaged"):
        load_filter("default", "x86_64")


def test_missing_file_is_refused(copied: Path) -> None:
    copied.unlink()
    with pytest.raises(Broken, match="missing"):
        load_filter("default", "x86_64")


def test_comments_may_change(copied: Path) -> None:
    copied.write_text("# reviewed\n" + copied.read_text())
    assert load_filter("default", "x86_64").program


@pytest.mark.parametrize("program", [b"", b"1234567", bytes(8 * 4097)])
def test_bytes_that_cannot_be_a_program_are_not_tried(program: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be a seccomp program"):
        seccomp.install(program)


def test_seccomp_is_supported_where_linux_says_so() -> None:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    assert seccomp.supported() == (actions.exists() and "kill_process" in actions.read_text())
    assert os.uname().machine in filters.MACHINES
