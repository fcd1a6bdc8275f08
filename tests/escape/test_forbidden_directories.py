"""Directories that no sandbox may see: every entry point refuses them alike.

`sbx run --workspace ~` was accepted. Code inside read the operator's key and wrote
`~/.ssh/authorized_keys`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sbx
from sbx import Sandbox
from sbx.errors import Denied
from sbx.forbidden_directories import DATA_MARKER
from tests.tiers import rows

OWNER = 4242
CODE = "directory_forbidden"


@pytest.fixture
def home(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The home of this user, which an ordinary user owns."""
    top = own_temporary_directory / f"home-{abs(hash(request.node.name))}"
    (top / ".ssh").mkdir(parents=True)
    (top / "project").mkdir()
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER)
    before = os.environ["HOME"]
    os.environ["HOME"] = str(top)
    yield top
    os.environ["HOME"] = before
    sbx.close()


def _mount(directory: Path) -> None:
    with Sandbox() as box:
        box.mount(directory)


def _open(**directories: Path) -> None:
    with Sandbox(**directories) as box:  # type: ignore[arg-type]
        box.run("1")


ENTRIES: dict[str, Callable[[Path], None]] = {
    "workspace": lambda path: _open(workspace=path),
    "uploads": lambda path: _open(uploads=path),
    "mount": _mount,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", [".", ".ssh", "/", "/tmp", "/proc/self/fd", "link"])
def test_the_embedded_api_refuses(home: Path, entry: str, name: str) -> None:
    (home.parent / "link").unlink(missing_ok=True)
    (home.parent / "link").symlink_to(home)
    path = home.parent / "link" if name == "link" else Path(os.path.normpath(home / name))
    if entry == "mount":
        path = path.resolve()  # a link is refused before, as a link
    with pytest.raises(Denied) as raised:
        ENTRIES[entry](path)
    assert raised.value.code == CODE
    assert "cannot be shown to a sandbox" in raised.value.message
    assert raised.value.hint


def test_a_project_below_a_home_is_accepted(home: Path) -> None:
    for entry in ENTRIES.values():
        entry(home / "project")


def _command(*words: str | Path, home: Path, terminal: int) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SBX_")}
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "sbx", *map(str, words)],
        env={**kept, "HOME": str(home), "PYTHONPATH": str(root), "SBX_ALLOW_HOST_MODE": "1"},
        cwd=home / "project",
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-c", "1", "--workspace"),
        pytest.param(("run", "-c", "1", "--uploads"), marks=pytest.mark.full_tier),
        pytest.param(("shell", "--workspace"), marks=pytest.mark.full_tier),
        ("chat", "--replay", "answers.json", "--project"),
        pytest.param(
            ("chat", "--replay", "answers.json", "--no-sandbox", "--project"),
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root gets no host mode"),
        ),
    ],
    ids=" ".join,
)
def test_each_command_refuses_a_home_with_one_sentence(home: Path, words: tuple[str, ...]) -> None:
    (home / "project/answers.json").write_text('{"model": "replay", "answers": []}')
    ours, terminal = os.openpty()  # `sbx shell` and `sbx chat` demand one
    try:
        ended = _command(*words, home, home=home, terminal=terminal)
    finally:
        os.close(ours)
        os.close(terminal)
    assert ended.returncode != 0
    assert f"error: '{home}' cannot be shown to a sandbox: it is the home of" in ended.stderr
    assert "hint: create a directory" in ended.stderr


# Where a bind mount leads, below the temporary directory where it is not absolute; the reason.
MOUNTS = {
    "home": "the home of this user",
    "home/.ssh": "a hidden directory of a home",
    "home/tools": "a directory of PATH",
    "data/sandboxes": "a data directory of sbx",
    "/etc/profile.d": "in /etc, a directory of the system",
    "/etc": "in /etc, a directory of the system",
    "/usr/share": "in /usr, a directory of the system",
    "/proc": "in /proc, a directory of the system",
    "/": "is the whole host",
    "home/project": None,
    "plain": None,
}
# The rule as the runtime asks for it, and as the broker of a confined service does.
_JUDGE = """
import os, sys
from contextlib import ExitStack
from sbx.errors import Denied
from sbx.isolation.mapped import MappedProjects
from sbx.linux import mountinfo
from sbx.workspace.allowed_paths import OwnPaths, check, host_facts
named, within = sys.argv[1:]
mounts = mountinfo.read()
host = host_facts(OwnPaths(), [], mounts).to_json()
owner = os.stat(named).st_uid
projects = MappedProjects({"within": [within], "owners": [owner], "host": host}, [])
def broker():
    with projects.mapping({"source": named, "sandbox": "s"}): pass
for ask in (lambda: check(named, OwnPaths()), broker):
    try: ask()
    except Denied as error: print(error.code, error.message)
    else: print("allowed")
"""


@pytest.mark.needs("root")
@pytest.mark.parametrize("below", rows([False, True], [False]), ids=["itself", "below"])
@pytest.mark.parametrize("source", MOUNTS)
def test_a_bind_mount_is_judged_by_its_source(home: Path, source: str, below: bool) -> None:
    """`mount --bind /etc/cron.d rp/e; sbx run --workspace rp` gave write access to root's cron."""
    top = home.parent / f"top-{home.name}"
    for name in ("place", "data/sandboxes", "plain"):
        (top / name).mkdir(parents=True)
    (top / "data" / DATA_MARKER).touch()
    (home / "tools").mkdir()
    mounted = top / "place" / "mounted"
    mounted.mkdir()
    first, _, rest = source.partition("/")
    leads_to = home / rest if first == "home" else top / source
    ended = subprocess.run(
        [
            *(
                "unshare",
                "--mount",
                "sh",
                "-c",
                'mount --bind "$1" "$2" && exec "$3" -c "$4" "$5" "$6"',
            ),
            *("sh", leads_to, mounted, sys.executable, _JUDGE),
            *(mounted.parent if below else mounted, top / "place"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PATH": f"{home}/tools:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == ""
    by_runtime, by_broker = ended.stdout.splitlines()
    reason = MOUNTS[source]
    if reason is None:
        assert (by_runtime, by_broker) == ("allowed", "allowed")
    else:
        assert by_runtime.startswith(CODE)
        assert by_broker.startswith("not_granted")
        assert reason in by_runtime
        assert reason in by_broker
