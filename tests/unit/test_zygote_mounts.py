"""A directory that was replaced after the runtime opened it gets into no jail of a zygote."""

import os
from pathlib import Path

import pytest

from sbx.errors import Broken
from sbx.isolation.broker.zygotes import _tree

pytestmark = pytest.mark.needs("root")


def test_replaced_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "files"
    source.mkdir()
    opened = source.stat()
    mount = {
        "source": str(source),
        "expected": [opened.st_dev, opened.st_ino],
        "writable": True,
    }
    os.close(_tree(mount, None))
    source.rename(tmp_path / "aside")
    source.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Broken) as raised:
        _tree(mount, None)
    assert raised.value.code == "path_replaced"
    assert len(os.listdir("/proc/self/fd")) == before
