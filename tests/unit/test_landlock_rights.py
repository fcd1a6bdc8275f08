"""What is asked of an older linux, and who may ask."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sbx.guest.start import lockdown
from sbx.linux import landlock
from sbx.linux.landlock import Domain, FileRights, LandlockScope, Tcp

ROOT = Path(__file__).resolve().parents[2]
needs_landlock = pytest.mark.skipif(not landlock.supported(), reason="this linux has no Landlock")


@pytest.mark.parametrize(
    ("version", "newest", "missing"),
    [
        (1, FileRights.MAKE_SYM, FileRights.REFER | FileRights.TRUNCATE | FileRights.IOCTL_DEV),
        (2, FileRights.REFER, FileRights.TRUNCATE | FileRights.IOCTL_DEV),
        (3, FileRights.TRUNCATE, FileRights.IOCTL_DEV),
        (4, FileRights.TRUNCATE, FileRights.IOCTL_DEV),
        (5, FileRights.IOCTL_DEV, FileRights.RESOLVE_UNIX),
        (7, FileRights.IOCTL_DEV, FileRights.RESOLVE_UNIX),
        (8, FileRights.IOCTL_DEV, FileRights.RESOLVE_UNIX),
        (9, FileRights.RESOLVE_UNIX, FileRights(0)),
        (99, FileRights.RESOLVE_UNIX, FileRights(0)),
    ],
)
def test_linux_is_asked_for_the_rights_it_knows(
    version: int, newest: FileRights, missing: FileRights
) -> None:
    handled = landlock.handled_by(version)
    assert newest in handled
    assert handled & missing == 0
    assert FileRights.MAKE_CHAR in handled


def test_linux_without_landlock_handles_nothing() -> None:
    assert landlock.handled_by(0) == FileRights(0)


def test_editing_never_includes_devices() -> None:
    assert not FileRights.EDIT & (
        FileRights.MAKE_CHAR | FileRights.MAKE_BLOCK | FileRights.IOCTL_DEV
    )
    assert landlock.handled_by(7) & ~FileRights.EDIT == (
        FileRights.MAKE_CHAR | FileRights.MAKE_BLOCK | FileRights.IOCTL_DEV
    )


def test_no_group_of_rights_includes_sockets_of_the_host() -> None:
    assert int(FileRights.RESOLVE_UNIX) == 0x10000  # include/uapi/linux/landlock.h
    assert not (FileRights.EDIT | FileRights.READ | FileRights.DEVICE) & FileRights.RESOLVE_UNIX


class Rules(landlock.Ruleset):
    """The rules that a process would add on a Linux with this ABI."""

    def __init__(self, abi: int) -> None:
        self.domain = Domain(abi, landlock.handled_by(abi), Tcp(0), LandlockScope(0))
        self.allowed: list[tuple[str | int, FileRights]] = []

    def allow(self, where: str | int, rights: FileRights) -> None:
        self.allowed.append((where, rights))


@pytest.mark.parametrize(
    ("abi", "expected"), [(7, []), (8, []), (9, ["/tmp", "/dev/shm"]), (10, ["/tmp", "/dev/shm"])]
)
def test_connections_are_allowed_where_linux_asks_for_it(abi: int, expected: list[str]) -> None:
    rules = Rules(abi)
    lockdown.allow_connections(rules, ["/tmp", "/dev/shm", "/there-is-no-such-path"])
    assert rules.allowed == [(path, FileRights.RESOLVE_UNIX) for path in expected]


def run(code: str) -> str:
    start = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from sbx.linux import landlock, prctl\n"
        "from sbx.linux.landlock import *\n"
    )
    argv = [sys.executable, "-IS", "-c", start + code]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@needs_landlock
def test_answer_says_what_is_in_force() -> None:
    answer = run(
        "prctl.set_no_new_privs()\n"
        'domain = landlock.restrict([("/", FileRights.READ)], scope_signals=True, tcp=[])\n'
        "print(*map(int, domain))"
    )
    abi = landlock.abi()
    assert [int(word) for word in answer.split()] == list(
        Domain(
            abi=abi,
            handled=landlock.handled_by(abi),
            handled_tcp=Tcp(3 if abi >= 4 else 0),
            scoped=LandlockScope.SIGNAL if abi >= 6 else LandlockScope(0),
        )
    )


@needs_landlock
def test_rules_for_a_file_and_for_an_open_directory_are_taken() -> None:
    answer = run(
        "import os\n"
        "prctl.set_no_new_privs()\n"
        'usr = os.open("/usr", os.O_PATH)\n'
        'rules = [("/dev/null", FileRights.EDIT), (usr, FileRights.READ)]\n'
        'rules.append(("/tmp", FileRights(0)))\n'
        "landlock.restrict(rules)\n"
        'open("/dev/null", "w"); os.fstat(usr)\n'
        'print("ok", len(os.listdir("/usr")) > 0)'
    )
    assert answer.split() == ["ok", "True"]


@needs_landlock
def test_no_descriptor_is_left_open() -> None:
    answer = run(
        "import os\n"
        "prctl.set_no_new_privs()\n"
        'before = len(os.listdir("/proc/self/fd"))\n'
        'landlock.restrict([("/", FileRights.READ)])\n'
        'print(len(os.listdir("/proc/self/fd")) - before)'
    )
    assert answer.strip() == "0"


@needs_landlock
def test_rule_for_a_path_that_is_not_there_is_an_error() -> None:
    """In a process of its own, which has one thread for certain and may be lost."""
    code = (
        "from sbx.linux.landlock import FileRights, restrict\n"
        "try:\n    restrict([('/nowhere/at/all', FileRights.READ)])\n"
        "except FileNotFoundError:\n    print('refused')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n"


@needs_landlock
def test_second_thread_is_an_error() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads"):
            landlock.restrict([])
    finally:
        done.set()
        thread.join()


def test_older_linux_is_asked_for_less_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 3)
    ask = landlock._obtainable.__wrapped__  # not what an earlier test was told
    domain = ask(tcp=True, signals=True, abstract_sockets=False)
    assert domain == Domain(3, landlock.handled_by(3), Tcp(0), LandlockScope(0))
