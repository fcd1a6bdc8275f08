"""The broker mounts the tmpfs of a jail itself."""

import pytest

from sbx.isolation.broker import bind_staging
from sbx.linux import mounts


def test_a_variable_with_the_name_of_an_option_is_no_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jail with the variable `A=--tmpfs` did not start, because the words around its value were
    taken for the options of a mount."""
    mounted = []
    monkeypatch.setattr(mounts, "tmpfs", lambda target, options: mounted.append((target, options)))
    monkeypatch.setattr("os.makedirs", lambda *_args, **_options: None)
    words = (
        "--perms 1777 --size 4096 --tmpfs /tmp --bind a b"
        " --perms 0700 --size 64 --tmpfs /dev/shm --setenv A --tmpfs --setenv --tmpfs x --chdir /"
    )
    limited = bind_staging.limit_tmpfs("j1", words.split(), (7, 8))
    tmp, shm = "/sys/kernel/j1/tmpfs0", "/sys/kernel/j1/tmpfs9"
    assert (
        limited
        == (
            f"--bind {tmp} /tmp --bind a b --bind {shm} /dev/shm"
            " --setenv A --tmpfs --setenv --tmpfs x --chdir /"
        ).split()
    )
    assert dict(mounted) == {
        tmp: "mode=1777,uid=7,gid=8,size=4096,nr_inodes=131072",
        shm: "mode=0700,uid=7,gid=8,size=64,nr_inodes=131072",
    }
