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


def _attach(directory: Path) -> None:
    with Sandbox() as box:
        box.attach(directory)


def _open(**directories: Path) -> None:
    with Sandbox(**directories) as box:  # type: ignore[arg-type]
        box.run("1")


ENTRIES: dict[str, Callable[[Path], None]] = {
    "workspace": lambda path: _open(workspace=path),
    "uploads": lambda path: _open(uploads=path),
    "attachment": _attach,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", [".", ".ssh", "/", "/tmp", "/proc/self/fd", "link"])
def test_the_embedded_api_refuses(home: Path, entry: str, name: str) -> None:
    (home.parent / "link").unlink(missing_ok=True)
    (home.parent / "link").symlink_to(home)
    path = home.parent / "link" if name == "link" else Path(os.path.normpath(home / name))
    if entry == "attachment":
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
        ("run", "-c", "1", "--uploads"),
        ("shell", "--workspace"),
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
    assert "hint: make a directory" in ended.stderr


@pytest.mark.needs("root")
@pytest.mark.parametrize("below", [False, True], ids=["itself", "below"])
def test_a_bind_mount_of_a_home_is_refused(home: Path, below: bool) -> None:
    place = home.parent / f"place-{below}" / "mounted"
    place.mkdir(parents=True)
    named = place.parent if below else place
    code = (
        "import sys; from pathlib import Path; from sbx.errors import Denied;"
        "from sbx.workspace.allowed_paths import OwnPaths, check\n"
        f"try: check({str(named)!r}, OwnPaths())\n"
        "except Denied as error: print(error.code)"
    )
    ended = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$2" && exec "$3" -c "$4"'),
            *("sh", home, place, sys.executable, code),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout.strip(), ended.stderr) == (CODE, "")
