"""host_executables: names that a program of the host obeys, planted in a directory of the host.

Each name of the table is planted by each means, in a directory for each of them, and then a free
name. Then the host looks: an attack escaped if its name exists there. If the free name does not
exist, no attack by this means was tried. No program of the host is run.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent

from sbx import errors
from sbx.doctor.attacks.attack import Attack, Class
from sbx.doctor.attacks.probe_program import control_name
from sbx.policy import Policy
from sbx.protocol.runs import Quarantined
from sbx.runtime.runtime import Runtime
from sbx.workspace import quarantine
from sbx.workspace.host_executables import TABLE, HostExecutable

_NOBODY = 65534
_MODULES_MAX = 12
# Each by one call of Linux, except a command, which redirects the output of a program.
_CALLS = {
    "open": "open(path, 'w').close()",
    "mkdir": "os.mkdir(path)",
    "rename": "open('made', 'w').close(); os.rename('made', path)",
    "link": "open('made', 'w').close(); os.link('made', path)",
    "symlink": ("open('made', 'w').close(); os.symlink('../' * path.count('/') + 'made', path)"),
    "mknod": "os.mknod(path, 0o100644)",
    "ioctl": """
top = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
name = os.path.basename(path).encode()
fcntl.ioctl(top, 0x5000940E, bytearray(struct.pack("q4088s", 0, name)))  # BTRFS_IOC_SUBVOL_CREATE
os.close(top)""",
}
_COMMAND = "a command"
MEANS = (*_CALLS, _COMMAND)
# By fewer means where the guard and the filter are those of another policy of the doctor.
FEW_MEANS = ("open", _COMMAND)
_WORD_MAX = 20
_FREE = "attack-free"  # the control: a name that no program obeys


def _place(name: str, entry: HostExecutable) -> str:
    """Return a path that a program of the host would obey, for a pattern of the table."""
    name = "/".join((*entry.parents[:1], name.replace("*", "x")))
    match entry.scope:
        case "root":
            return name
        case "packages":
            return f"site-packages/{name}"
    return f"sub/{name}"


# The list of modules is long, and the guard matches all of them alike.
_PLACES = tuple(
    dict.fromkeys(
        _place(name, entry)
        for entry in TABLE
        for name in entry.names[: _MODULES_MAX if entry.is_module else None]
    )
)


def _attack(place: str, means: str) -> Attack:
    name = f"plant {place} by {means} in a directory of the host"
    return Attack(name, Class.HOST_EXECUTABLES, "path guard", place, act=(means,))


HOST_EXECUTABLES = tuple(_attack(place, means) for means in MEANS for place in _PLACES)


async def plant(
    runtime: Runtime,
    policy: Policy,
    directory: Path | None = None,
    attacks: Sequence[Attack] = HOST_EXECUTABLES,
) -> dict[str, str]:
    """Return the outcomes by the names of the attacks and their controls.

    Work in private subdirectories of `directory`, or of the temporary directory. Raise the errors
    of creating a sandbox.
    """
    outcomes: dict[str, str] = {}
    for means in dict.fromkeys(attack.act[0] for attack in attacks):
        with subdirectory(directory) as top:
            outcomes[control_name(means)] = await _planted(runtime, policy, top, means)
            for attack in attacks:
                if attack.act == (means,):
                    outcomes[attack.name] = "ok" if (top / attack.code).exists() else "held"
    return outcomes


async def _planted(runtime: Runtime, policy: Policy, directory: Path, means: str) -> str:
    """Plant the names, then the free name. Return the outcome of the free name, which the ioctl has
    to plant outside: no jail may make that call, and only btrfs offers it."""
    if means == "ioctl" and not _makes_subvolumes(directory):
        return "absent"
    paths = (*_PLACES, _FREE)
    async with await runtime.create(policy, workspace=directory) as box:
        try:
            if means == _COMMAND:
                words = " ".join(map(shlex.quote, paths))
                run = await box.shell(f'for path in {words}; do echo x > "$path"; done 2>/dev/null')
            else:
                run = await box.run(_cell(means, paths))
        except errors.Denied:
            return "denied"
    _drop(runtime, run.quarantined)
    word = run.stdout[-_WORD_MAX:].strip() or "nothing"
    is_planted = (directory / _FREE).exists() or (means == "ioctl" and word != "nothing")
    return "ok" if is_planted else word


def _cell(means: str, paths: Sequence[str]) -> str:
    """Return a program that plants the names, and prints the error of the last one."""
    body = indent(_CALLS[means].strip(), " " * 8)
    program = (
        "import errno, fcntl, os, struct\nfor path in PATHS:\n    word = 'ok'\n    try:\n"
        f"{body}\n    except OSError as error:\n        word = errno.errorcode[error.errno]\n"
        "print(word)"
    )
    return f"exec({program!r}, {{'PATHS': {list(paths)!r}}})"  # past the import rules of strict


def _makes_subvolumes(directory: Path) -> bool:
    """Return whether the call makes a directory here outside of the jail (btrfs)."""
    program = f"import fcntl, os, struct; path = {_FREE!r}\n{_CALLS['ioctl']}"
    words = [sys.executable, "-I", "-c", f"{program}\nos.rmdir(path)"]
    return not subprocess.run(
        words, cwd=directory, stderr=subprocess.DEVNULL, check=False
    ).returncode


def _drop(runtime: Runtime, items: tuple[Quarantined, ...]) -> None:
    """Remove the quarantine of the directory, which only this attack used. To remove hundreds of
    items by their ids took most of the time of an attack."""
    if items:
        with suppress(errors.SbxError):
            _, content = quarantine.get(runtime.settings.protection.quarantines, items[0].id)
            quarantine.drop_all(content.parents[2])


@contextmanager
def subdirectory(directory: Path | None) -> Iterator[Path]:
    """Create a directory of an unprivileged user: a sandbox never runs as root."""
    try:
        owner = os.stat(directory).st_uid if directory else 0
        temporary = tempfile.TemporaryDirectory(prefix="sbx-planted-", dir=directory)
    except OSError as error:
        raise errors.BadRequest(
            f"no subdirectory can be created in {directory}: {os.strerror(error.errno or 0)}",
            hint="name a directory of your projects that you may write to",
        ) from error
    with temporary as name:
        top = Path(name)
        top.chmod(0o755)
        for place in _PLACES:
            (top / place).parent.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            for path in (top, *top.rglob("*")):
                os.chown(path, owner or _NOBODY, owner or _NOBODY)
        yield top
