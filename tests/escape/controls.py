"""The attacks of `sbx doctor --attack` where their walls are missing: each must then get through.

    in_a_jail_without(…)   in a sandbox that lacks some walls
    bare(…)                outside of every wall, as whoever runs the tests, or as root of
                           namespaces of its own
    naively(…)             what the host side would do by paths, and with what follows links

What an attack may do is little enough for that: see sbx/runtime/attacks.
"""

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacking import ONLY_COLD, Fresh, altered, by

from sbx.doctor.attacks import probe_program
from sbx.doctor.attacks.attack import Attack
from sbx.doctor.attacks.decoys import UPLOAD, Decoys
from sbx.doctor.attacks.processes import PID_1
from sbx.doctor.attacks.runner import FEW, attack, limits
from sbx.policy import Policy

_BARE_S = 60.0
_NAIVE_S = 0.3
_OWN_ROOT = [
    *("unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--cgroup"),
    *("--pid", "--fork", "--mount-proc", "--propagation", "shared"),
]
# A terminal of its own to lose, and limits that a root could raise again.
_BEFORE = """
import fcntl, resource, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    fcntl.ioctl(0, 0x540E, 0)
except OSError:
    pass  # below `unshare --fork` nobody leads a session
for name, value in dict(NOFILE=1024, FSIZE=1 << 40, MEMLOCK=8 << 20, CORE=1, SIGPENDING=900,
                        NPROC=4000).items():
    which = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(which)[1]
    value = value if hard < 0 else min(value, hard)
    resource.setrlimit(which, (value, value))
"""


async def in_a_jail_without(
    walls: Sequence[str],
    attacks: Sequence[Attack],
    baits: Decoys,
    *,
    fresh: Fresh,
    policy: Policy,
    path: str,
) -> dict[str, str]:
    """By `path`; forked on order in the place of the pool's, where one could be idle whose walls
    were decided before."""
    box = await fresh(policy, narrower=FEW)
    path = "cold" if ONLY_COLD & set(walls) or path == "cold" else "fork"
    with altered(*walls), by(path):
        await box.start()
        return await attack(box, [one for one in attacks if not one.act], baits)


def bare(
    attacks: Sequence[Attack], baits: Decoys, policy: Policy, place: Path, *, own_root: bool = False
) -> dict[str, str]:
    """Outside of every wall; none on PID 1, which would be the host's. `place` is an empty
    directory that stands for the workspace."""
    tried = [one for one in attacks if not one.act and one not in PID_1]
    return _outside(tried, baits, policy, place, _OWN_ROOT if own_root else ())


def planted(attacks: Sequence[Attack], baits: Decoys, policy: Policy, place: Path) -> None:
    """What attacks on the host side plant in a workspace, in `place`."""
    found = _outside(attacks, baits, policy, place, ())
    assert set(found.values()) == {"ok"}, found


def _outside(
    tried: Sequence[Attack], baits: Decoys, policy: Policy, place: Path, become: Sequence[str]
) -> dict[str, str]:
    uploads = place / "uploads/temparea"
    uploads.mkdir(parents=True)
    (uploads / UPLOAD).write_text("as it was uploaded\n")
    known = {**baits.parameters, "work": str(place), "upload": str(uploads / UPLOAD)}
    known["shown"] = str(baits.shown)
    # A write to the packages of this interpreter gives each runtime of the other test processes a
    # second zygote.
    known["packages"] = str(place / "packages")
    (place / "packages").mkdir()
    script = place / "script.py"
    script.write_text(_BEFORE + probe_program.program(tried, known, limits(policy)))
    keeper, terminal = os.openpty()
    left_open = os.open(baits.file.parent, os.O_PATH)
    try:
        done = subprocess.run(
            [*become, sys.executable, str(script)],
            stdin=terminal,
            capture_output=True,
            cwd=place,
            pass_fds=(left_open,),
            timeout=_BARE_S,
            check=False,
            start_new_session=True,
        )
    finally:
        for fd in (keeper, terminal, left_open):
            os.close(fd)
    assert done.returncode == 0, done.stderr[-2000:]
    return probe_program.outcomes(tried, done.stdout.decode())


# -- the host side by paths ------------------------------------------------------------------------


def naively(one: Attack, root: Path, baits: Decoys) -> str:
    """What becomes of an act of the host side that goes by paths and follows links; in a thread,
    because some never end: then whoever waits at a pipe of the workspace is let go."""
    verb, path = one.act
    found: list[str] = []
    acting = threading.Thread(target=lambda: found.append(_acted(verb, root, path, baits)))
    acting.start()
    acting.join(_NAIVE_S)
    if found:
        return found[0]
    for pipe in filter(Path.is_fifo, root.rglob("*")):
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    acting.join()
    return "timeout"


def _acted(verb: str, root: Path, path: str, baits: Decoys) -> str:
    before = _look(baits.file)
    answer = ""
    with suppress(OSError):
        answer = str(_NAIVE[verb](root, root / path))
    changed = before != _look(baits.file)
    baits.lay_again()
    return "ok" if changed or baits.token in answer or "bait" in answer else "held"


def _look(bait: Path) -> Any:
    if not bait.exists():
        return None
    return sorted(bait.parent.iterdir()), bait.read_bytes(), bait.stat().st_mode


def _names(place: Path) -> list[str]:
    return [name for _, below, names in os.walk(place, followlinks=True) for name in below + names]


def _contents(place: Path) -> list[str]:
    tops = [top for top, _, _ in os.walk(place, followlinks=True)]
    return [file.read_text() for top in tops for file in Path(top).iterdir() if not file.is_dir()]


def _copy(root: Path, place: Path) -> str:
    top = root / place.relative_to(root).parts[0]
    copy = root / f"{top.name}-copied"
    if top.is_dir():
        shutil.copytree(top, copy)
    else:
        shutil.copy(top, copy)
    return (copy / place.relative_to(top)).read_text()


def _archive(root: Path, place: Path) -> str:
    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        for path in place.rglob("*"):
            archive.write(path)
    return (root / "archive.zip").read_text(errors="replace")


def _delete(root: Path, place: Path) -> None:
    if not place.is_dir():
        place.unlink()
        return
    for name in os.listdir(place):
        _delete(root, place / name)


_NAIVE: dict[str, Callable[[Path, Path], object]] = {
    "read": lambda _, place: place.read_text(),
    "download": lambda _, place: place.read_text(),
    "write": lambda _, place: place.write_text("changed"),
    "list": lambda _, place: _names(place),
    "find": lambda _, place: _names(place),
    "grep": lambda _, place: _contents(place),
    "copy": _copy,
    "copy onto": lambda _, place: place.write_text("changed"),
    "move into": lambda _, place: (place / "moved").write_text("x"),
    "chmod": lambda _, place: place.chmod(0o600),
    "replace": lambda _, place: place.write_text(place.read_text().replace("secret", "changed")),
    "delete": _delete,
    "make": lambda _, place: place.mkdir(),
    "archive": _archive,
}
