"""A directory of a user, code inside that plants files, and programs of the host that the user
runs there afterwards.

As root the user is `OWNER`, whose uid the jails of that directory have; else the user of the tests.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

from sbx import Runtime
from sbx.guest.guarded_paths import ITEMS
from sbx.policy import Policy, load
from sbx.runtime.sandbox import AsyncSandbox

USER_PATH = "/usr/local/bin:/usr/bin:/bin"
OWNER = 4242 if os.geteuid() == 0 else os.geteuid()


@dataclass(frozen=True)
class Place:
    """`directory` is the project, `marker` what an executed command of the sandbox creates, and
    `packages` the virtual environment that `{packages}` in a variable stands for."""

    directory: Path
    marker: Path
    packages: Path = Path(sys.prefix)

    def user(
        self, *argv: str, cwd: str = ".", env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the host as the user would, in the directory."""
        home = self.directory.parent / "home"
        environment = {
            "HOME": str(home),
            "PATH": USER_PATH,
            "TERM": "dumb",
            "GIT_AUTHOR_NAME": "me",
            "GIT_AUTHOR_EMAIL": "me@example.org",
            "GIT_COMMITTER_NAME": "me",
            "GIT_COMMITTER_EMAIL": "me@example.org",
            **{
                name: value.replace("{packages}", str(self.packages))
                for name, value in (env or {}).items()
            },
        }
        is_root = os.geteuid() == 0
        return subprocess.run(
            argv,
            cwd=self.directory / cwd,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            user=OWNER if is_root else None,
            group=OWNER if is_root else None,
            extra_groups=[] if is_root else None,
        )

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file as the user."""
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        for made in (file, *file.relative_to(self.directory).parents):
            os.chown(self.directory / made, OWNER, OWNER, follow_symlinks=False)

    @property
    def executed(self) -> bool:
        return self.marker.exists()

    def links(self) -> dict[str, str]:
        """Every link to a quarantine, by its path."""
        found = {}
        for path in self.directory.rglob("*"):
            if path.is_symlink() and os.readlink(path).startswith(ITEMS):
                found[str(path.relative_to(self.directory))] = os.readlink(path)
        return found


def make_place(top: Path) -> Place:
    place = Place(top / "project", top / "PWNED")
    for path in (top, place.directory, top / "home"):
        path.mkdir(exist_ok=True)
        os.chown(path, OWNER, OWNER)
    return place


@asynccontextmanager
async def sandbox(
    runtime: Runtime, place: Place, host_executables: str = "protect"
) -> AsyncIterator[AsyncSandbox]:
    policy: Policy = load("default").model_copy(update={"host_executables": host_executables})
    async with await runtime.create(policy=policy, workspace=place.directory) as box:
        yield box


Method = Callable[[str, str], str]
"""(path, text) → a shell command that puts a file with this text at this path, by one way."""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _by(command: str) -> Method:
    def method(path: str, text: str) -> str:
        directory, _, name = path.rpartition("/")
        script = f"""
            mkdir -p {_quoted(directory or ".")} 2>/dev/null
            D={_quoted(directory or ".")}; N={_quoted(name)}; P={_quoted(path)}
            printf %s {_quoted(text)} > /tmp/content
            {command}
        """
        return dedent(script)

    return method


METHODS: Mapping[str, Method] = {
    "redirection": _by('cat /tmp/content > "$P"'),
    "cp": _by('cp /tmp/content "$P"'),
    "rename": _by('cat /tmp/content > "$D/x.tmp" && mv "$D/x.tmp" "$P"'),
    "hard link": _by('cat /tmp/content > "$D/x.tmp" && ln "$D/x.tmp" "$P"'),
    "rename of a directory": _by(
        'rm -rf made; mkdir -p made; cp /tmp/content "made/$N"; mkdir -p "$(dirname "$D")";'
        ' [ "$D" = . ] && mv "made/$N" "$N" || { rm -rf "$D"; mv -T made "$D"; }'
    ),
    "tar": _by(
        'mkdir -p "/tmp/t/$D"; cp /tmp/content "/tmp/t/$P"; tar -C /tmp/t -cf - . | tar -xf -'
    ),
    "dd": _by('dd if=/tmp/content of="$P" status=none'),
    "open file without a name": _by(
        "python3 -c 'import os, sys; d, n = sys.argv[1:];"
        " fd = os.open(d, os.O_TMPFILE | os.O_RDWR, 0o644);"
        ' os.write(fd, open("/tmp/content", "rb").read());'
        ' os.link(f"/proc/self/fd/{fd}", f"{d}/{n}", follow_symlinks=True)\' "$D" "$N"'
    ),
    "symlinked parent": _by('ln -s "$D" way; cat /tmp/content > "way/$N"'),
    "upper case": _by('cat /tmp/content > "$D/$(printf %s "$N" | tr a-z A-Z)"'),
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """`prepare` is what the user has done before, `plant` the files of the sandbox (a script, or
    path → text), `trigger` the commands of the user. {marker} stands for the marker. A slow trigger
    is run only while the sandbox lives."""

    name: str
    plant: str | Mapping[str, str]
    trigger: Sequence[Sequence[str]]
    prepare: Sequence[Sequence[str]] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    needs: str = "git"
    is_slow: bool = False

    def planted_by(self, method: Method, marker: Path) -> str:
        if isinstance(self.plant, str):
            return self.plant.replace("{marker}", str(marker))
        return "\n".join(
            method(path, text.replace("{marker}", str(marker))) for path, text in self.plant.items()
        )


async def attacked(runtime: Runtime, place: Place, attack: Attack, method: str, mode: str) -> str:
    """Prepare, plant inside, and trigger on the host; the output of the sandbox."""
    for path, text in attack.files.items():
        place.write(path, text.replace("{marker}", str(place.marker)))
    for command in attack.prepare:
        words = [word.replace("{marker}", str(place.marker)) for word in command]
        done = place.user(*words, env=attack.env)
        assert done.returncode == 0, (words, done.stderr)
    assert not place.executed
    script = attack.planted_by(METHODS[method], place.marker)
    async with sandbox(runtime, place, mode) as box:
        run = await box.shell(script)
        _use(place, attack)  # while the sandbox lives
    if not (place.executed or attack.is_slow):
        _use(place, attack)
    return run.text


def _use(place: Place, attack: Attack) -> None:
    for command in attack.trigger:
        if Path(place.directory / attack.cwd).is_dir():
            place.user(*command, cwd=attack.cwd, env=attack.env)
