"""The watchdog of a child process."""

import signal
import subprocess

from sbx.isolation import watchdog
from sbx.isolation.watchdog import Watchdog


def test_child_is_killed_though_its_watchdog_has_ended() -> None:
    """A stopped broker of a service that could have killed it stayed, where the watchdog was killed
    for lack of memory."""
    with subprocess.Popen(["sleep", "600"]) as child:
        dog = Watchdog(child)
        dog._process.kill()
        dog._process.wait()
        try:
            watchdog.kill(child, dog)
            assert child.wait(60.0) == -signal.SIGKILL
        finally:
            child.kill()
            dog.close()
