"""After `drop_all` there is nothing left, and no way back."""

import subprocess
import sys
from pathlib import Path

import pytest

from sbx.linux import capabilities
from tests.unit.in_child import in_child

ROOT = Path(__file__).resolve().parents[2]

# Root drops its own; anybody else those of a user namespace.
START = f"""
import ctypes, os, sys
sys.path.insert(0, {str(ROOT)!r})
from sbx.linux import capabilities, libc, prctl
if not capabilities.effective() >> capabilities.CAP_SETPCAP & 1:
    maps = {{
        "uid_map": f"0 {{os.getuid()}} 1", "setgroups": "deny", "gid_map": f"0 {{os.getgid()}} 1"
    }}
    try:
        libc.call("unshare", 0x14000000)  # CLONE_NEWUSER | CLONE_NEWUTS
    except OSError:
        sys.exit(77)
    for name, content in maps.items():
        with open(f"/proc/self/{{name}}", "w") as file:
            file.write(content)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-IS", "-c", START + code], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("neither root nor user namespaces here")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_current_is_what_proc_says() -> None:
    answer = dict(
        line.split(":") for line in Path("/proc/thread-self/status").read_text().splitlines()
        if line.startswith("Cap")
    )  # fmt: skip
    seen = {name: int(bits, 16) for name, bits in answer.items()}
    assert capabilities.current() == capabilities.CapabilitySets(
        effective=seen["CapEff"],
        permitted=seen["CapPrm"],
        inheritable=seen["CapInh"],
        bounding=seen["CapBnd"],
        ambient=seen["CapAmb"],
    )


def test_drop_all_empties_all_five_sets() -> None:
    answer = run(
        "before = capabilities.current()\n"
        "assert before.bounding and before.effective, before\n"
        "capabilities.drop_all()\n"
        "print(*capabilities.current(), capabilities.effective())"
    )
    assert answer.split() == ["0"] * 6


def test_dropping_twice_is_fine() -> None:
    assert run("capabilities.drop_all(); capabilities.drop_all(); print('ok')") == "ok\n"


def test_execve_gives_nothing_back_even_to_uid_0() -> None:
    script = "grep Cap /proc/self/status | cut -f2 | sort -u"
    answer = run(f"capabilities.drop_all(); os.execv('/bin/sh', ['sh', '-c', {script!r}])")
    assert answer.split() == ["0" * 16]


@pytest.mark.parametrize(
    "attack",
    [
        'os.chroot("/")',
        'libc.call("sethostname", b"x", -1)',
        # A file that would give capabilities to whoever runs it: the set-id bit by another name.
        'os.setxattr("file", "security.capability", bytes.fromhex("0100000200000020") + bytes(12))',
    ],
)
def test_what_needed_a_capability_is_refused(attack: str, tmp_path: Path) -> None:
    start = f'os.chdir({str(tmp_path)!r}); open("file", "w").close()\n'
    outcome = f"try: {attack}\nexcept OSError as error: print(error.errno)\nelse: print(0)"
    assert run(start + "capabilities.drop_all()\n" + outcome).strip() == "1"
    assert run(start + outcome).strip() in {"0", "22"}, "needs no capability, so proves nothing"


def test_bounding_set_that_cannot_be_emptied_is_an_error_and_nothing_is_dropped() -> None:
    answer = run(
        "low, high = words = (capabilities._Word * 2)()\n"
        "low.permitted = low.effective = 1 << capabilities.CAP_SYS_ADMIN\n"
        "header = capabilities._Header(0x20080522, 0)\n"
        'libc.call("capset", ctypes.byref(header), words)\n'
        "try: capabilities.drop_all()\n"
        "except PermissionError: print(capabilities.effective() >> 21 & 1)"
    )
    assert answer.strip() == "1"


@pytest.mark.needs("root")
def test_what_is_made_effective_is_a_part_of_what_is_permitted() -> None:
    chown, admin = 1 << capabilities.CAP_CHOWN, 1 << capabilities.CAP_SYS_ADMIN

    def act(report: int) -> bool:
        before = capabilities.current()
        capabilities.make_effective(chown)
        after = capabilities.current()
        assert (after.effective, after.permitted) == (chown, before.permitted)
        capabilities.keep_only(chown)
        capabilities.make_effective(chown | admin)
        return capabilities.current()[:3] == (chown, chown, 0)

    assert in_child(act) == "True"
