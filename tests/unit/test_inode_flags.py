"""Which directories may compare names without their case."""

import os
from pathlib import Path

from sbx.linux.inode_flags import may_fold_case


def test_a_directory_of_ext4_or_tmpfs_distinguishes_case(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert may_fold_case(fd) == (tmp_path.parent / tmp_path.name.upper()).exists()
    finally:
        os.close(fd)


def test_a_file_system_without_an_answer_may_fold_case() -> None:
    fd = os.open("/proc", os.O_PATH)
    try:
        assert may_fold_case(fd)
    finally:
        os.close(fd)


def test_a_directory_that_cannot_be_opened_may_fold_case() -> None:
    assert may_fold_case(-1)
