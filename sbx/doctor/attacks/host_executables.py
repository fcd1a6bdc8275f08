"""host_executables: names that a program of the host obeys, planted in a directory of the host.

A cell plants each name of the table, and a shell command plants it in a second directory. Then the
host looks: an attack escaped if the name exists there. No program of the host is run.
"""

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sbx import errors
from sbx.doctor.attacks.attack import Attack, Class
from sbx.policy import Policy
from sbx.protocol.runs import Quarantined, Run
from sbx.runtime.runtime import Runtime
from sbx.workspace import quarantine
from sbx.workspace.host_executables import TABLE, HostExecutable

_MEANS = ("a cell", "a command")
_NOBODY = 65534
_MODULES_MAX = 12
_TRIED = "all names were tried"
_CELL = """
for path in {paths!r}:
    try:
        with open(path, "w") as file:
            file.write("planted")
    except OSError:
        pass
print({tried!r})
"""
_COMMAND = 'for path in {paths}; do echo planted > "$path"; done 2>/dev/null; echo {tried}'


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


HOST_EXECUTABLES = tuple(_attack(place, means) for means in _MEANS for place in _PLACES)


async def plant(runtime: Runtime, policy: Policy) -> dict[str, str]:
    """Return the outcomes by the names of the attacks that were tried.

    Raise the errors of creating a sandbox.
    """
    outcomes: dict[str, str] = {}
    for means in _MEANS:
        with _directory() as directory:
            run = await _planted(runtime, policy, directory, means)
            if run is not None and _TRIED not in run.stdout:
                continue
            for attack in HOST_EXECUTABLES:
                if attack.act == (means,):
                    exists = (directory / attack.code).exists()
                    outcomes[attack.name] = "ok" if exists else "held"
    return outcomes


async def _planted(runtime: Runtime, policy: Policy, directory: Path, means: str) -> Run | None:
    """Plant the names. Return the run, or None if the policy forbids such runs."""
    async with await runtime.create(policy, workspace=directory) as box:
        try:
            if means == "a cell":
                run = await box.run(_CELL.format(paths=_PLACES, tried=_TRIED))
            else:
                paths = " ".join(map(shlex.quote, _PLACES))
                run = await box.shell(_COMMAND.format(paths=paths, tried=_TRIED))
        except errors.Denied:
            return None
    _drop(runtime, run.quarantined)
    return run


def _drop(runtime: Runtime, items: tuple[Quarantined, ...]) -> None:
    """Remove the quarantine of the directory, which only this attack used. To remove hundreds of
    items by their ids took most of the time of an attack."""
    if items:
        with suppress(errors.SbxError):
            _, content = quarantine.get(runtime.settings.protection.quarantines, items[0].id)
            quarantine.drop_all(content.parents[2])


@contextmanager
def _directory() -> Iterator[Path]:
    """Create a directory of an unprivileged user: a sandbox never runs as root."""
    with tempfile.TemporaryDirectory(prefix="sbx-planted-") as name:
        top = Path(name)
        top.chmod(0o755)
        for place in _PLACES:
            (top / place).parent.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            for path in (top, *top.rglob("*")):
                os.chown(path, _NOBODY, _NOBODY)
        yield top
