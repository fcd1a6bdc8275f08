"""The process of a session without walls: sbx.isolation.host."""

import os
import sys
from pathlib import Path

import pytest

from sbx import errors
from sbx.isolation.host import HostPlan, HostProcess
from sbx.linux import procfs

IGNORES_ITS_SOCKETS = "import signal; signal.pause()"


async def test_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    plan = HostPlan((sys.executable, "-c", "pass"), (), str(tmp_path / "gone"))
    with pytest.raises(errors.Unavailable, match="gone") as raised:
        await HostProcess.start(plan)
    assert raised.value.code == "not_started"


async def test_guest_that_does_not_end_with_its_sockets_is_killed(tmp_path: Path) -> None:
    plan = HostPlan((sys.executable, "-c", IGNORES_ITS_SOCKETS), (), str(tmp_path))
    started = await HostProcess.start(plan)
    assert started.pid is not None
    assert started.pid in procfs.children(os.getpid())
    ended = await started.kill()
    assert ended.stderr == "it ended with code -9"
