"""Every name of the table, planted in every way: on the host none of them is more than a link that
leads nowhere, and what was there before has not changed."""

import os
from pathlib import Path

import pytest
from planting import METHODS, OWNER, Place, make_place, sandbox

from sbx import Runtime
from sbx.guest.guarded_paths import ITEMS
from sbx.workspace.host_executables import TABLE, path_rules

TEXT = "planted"


def _sample(pattern: str) -> str:
    """A name that fits a pattern of the table."""
    return pattern.replace("y*ml", "yml").replace("*", "x")


NAMES = [
    f"site-packages/{_sample(name)}" if entry.scope == "packages" else _sample(name)
    for entry in TABLE
    for name in entry.names
]
# Below a directory of the table, what a program of the host looks for in it.
BELOW = {".git": "config", ".hg": "hgrc", ".vscode": "tasks.json", ".husky": "pre-commit"}
NEW = [f"{name}/{BELOW[name]}" if name in BELOW else name for name in NAMES]
ANY_DEPTH = [
    path for path in NEW if not any(path in entry.names for entry in TABLE if entry.scope == "root")
]
PATHS = [*NEW, *(f"new/deep/{path}" for path in ANY_DEPTH)]
SLOW = {"open file without a name": [".envrc", ".git/config", "new/deep/.vscode/tasks.json"]}


@pytest.fixture
def place(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Place:
    return make_place(own_temporary_directory / f"names-{abs(hash(request.node.name))}")


def real_executables(place: Place) -> dict[str, str]:
    """Every existing host executable that is no link to the quarantine, with its text."""
    rules = path_rules()
    found = {}

    def exists(parts: tuple[str, ...]) -> bool:
        path = place.directory.joinpath(*parts)
        return os.path.lexists(path) and not (
            path.is_symlink() and os.readlink(path).startswith(ITEMS)
        )

    for top, directories, files in os.walk(place.directory):
        for name in (*directories, *files):
            path = Path(top, name)
            parts = path.relative_to(place.directory).parts
            linked = path.is_symlink() and os.readlink(path).startswith(ITEMS)
            if not linked and rules.match(parts, exists) is not None:
                is_file = path.is_file() and not path.is_symlink()
                found["/".join(parts)] = path.read_text() if is_file else "-"
    return found


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("started_by", ["fork", "cold"], indirect=True, scope="module"),
]


@pytest.mark.parametrize("method", METHODS)
async def test_new_name_of_the_table_leads_nowhere_on_the_host(
    runtime: Runtime, place: Place, method: str
) -> None:
    paths = SLOW.get(method, PATHS)
    script = "\n".join(METHODS[method](path, TEXT) for path in paths)
    async with sandbox(runtime, place) as box:
        run = await box.shell(script)
        assert real_executables(place) == {}, run.text
        assert not any((place.directory / path).exists() for path in place.links())
        reported = {item.path.casefold() for item in run.quarantined}
        assert {path.casefold() for path in place.links()} <= reported
    assert place.links() == {}
    assert real_executables(place) == {}


@pytest.mark.parametrize("method", METHODS)
async def test_existing_name_of_the_table_is_not_changed(
    runtime: Runtime, place: Place, method: str
) -> None:
    for path in PATHS:
        place.write(path, "of the user")
    before = real_executables(place)
    assert len(before) >= len(PATHS)
    paths = SLOW.get(method, PATHS)
    script = "\n".join(METHODS[method](path, TEXT) for path in paths)
    async with sandbox(runtime, place) as box:
        await box.shell(script)
    assert real_executables(place) == before


REMOVALS = {
    "unlink": "os.unlink(p)",
    "rename away": "os.rename(p, p + '.old')",
    "truncate": "os.truncate(p, 0)",
    "chmod": "os.chmod(p, 0o777)",
    "append": "open(p, 'a').write('x')",
    "read and write": "open(p, 'r+').write('x')",
    "exchange": "os.link(p, 'way'); open('way', 'w').write('x')",
    "descriptor of a read": "os.fchmod(os.open(p, os.O_RDONLY), 0o777)",
    "through /proc": "open('/proc/self/cwd/' + p, 'w').write('x')",
    "through the root": "open('/proc/self/root/workspace/' + p, 'w').write('x')",
    "through /sandbox": "open('/sandbox/workspace/' + p, 'w').write('x')",
    "through a link": "os.symlink(p, 'way'); open('way', 'w').write('x')",
    "through ..": "os.makedirs('a/b', exist_ok=True); open('a/b/../../' + p, 'w').write('x')",
    "by descriptor": "d = os.open('.', os.O_RDONLY); "
    "open(os.open(p, os.O_WRONLY, dir_fd=d), 'w').write('x')",
}


@pytest.mark.parametrize("removal", REMOVALS)
async def test_existing_host_executable_keeps_content_mode_and_name(
    runtime: Runtime, place: Place, removal: str
) -> None:
    paths = [".envrc", "sub/.envrc", ".git/hooks/pre-commit", ".git/config", "s/.vscode/tasks.json"]
    for path in paths:
        place.write(path, "of the user")
    before = {path: os.stat(place.directory / path) for path in paths}
    async with sandbox(runtime, place) as box:
        for path in paths:
            run = await box.run(f"import os; p = {path!r}; {REMOVALS[removal]}")
            assert run.error is not None, path
            await box.run("import os; os.path.lexists('way') and os.unlink('way')")
    for path, was in before.items():
        now = os.stat(place.directory / path)
        assert (now.st_mode, now.st_ino, now.st_size) == (was.st_mode, was.st_ino, was.st_size)
        assert now.st_uid == OWNER


async def test_repository_of_the_user_can_be_read_and_cloned(
    runtime: Runtime, place: Place
) -> None:
    """It cannot be written: git(1) executes nothing of an index, but writes to any path that one
    names, `.git/hooks/pre-commit` or `/etc` alike; and commits carry what a checkout executes."""
    place.user("git", "init", "-q", ".")
    place.write("a.txt", "1\n")
    place.user("git", "add", "a.txt")
    place.user("git", "commit", "-qm", "one")
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            "set -e; echo 2 > a.txt; git status --short; git log --oneline | wc -l; git diff --stat"
            " | tail -1; git clone -q . /tmp/c; cd /tmp/c; git -c user.name=x -c user.email=x@y"
            " commit -q --allow-empty -m two; git log --oneline | wc -l"
        )
        lines = run.stdout.splitlines()
        assert (run.exit_code, lines[:2], lines[-1]) == (0, [" M a.txt", "1"], "2"), run.text
        refused = await box.shell("git commit -qam two")
        assert "Read-only file system" in refused.stderr
    assert place.user("git", "log", "--format=%s").stdout.split() == ["one"]


async def test_repository_that_code_creates_works_for_the_whole_session(
    runtime: Runtime, place: Place
) -> None:
    async with sandbox(runtime, place) as box:
        first = await box.shell(
            "git init -q . && git config user.name x && git config user.email x@y"
            " && echo 1 > a && git add a && git commit -qm one"
        )
        assert first.exit_code == 0, first.text
        assert [item.path for item in first.quarantined] == [".git"]
        second = await box.shell("git commit -q --allow-empty -m two; git log --oneline | wc -l")
        assert (second.stdout, second.quarantined) == ("2\n", ())
        bare = await box.shell(
            "git init -q --bare b.git && git push -q b.git HEAD:x"
            " && git clone -q --no-local b.git c"  # --local copies no linked objects
        )
        assert bare.exit_code == 0, bare.text
        assert place.user("git", "status").returncode != 0  # on the host there is none


async def test_packages_stay_installable(runtime: Runtime, place: Place) -> None:
    """A package may bring settings of editors: in a tree of packages no editor reads them."""
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            "mkdir -p node_modules/x/.vscode node_modules/.x-1 lib/site-packages/y/.idea;"
            " echo 1 > node_modules/x/.vscode/settings.json; echo 1 > node_modules/x/.npmrc;"
            " echo 1 > lib/site-packages/y/.idea/a; mv node_modules/.x-1 node_modules/z;"
            " mv node_modules/z node_modules/w"
        )
        assert (run.exit_code, run.quarantined) == (0, ()), run.text
        moved = await box.shell("mv node_modules/x outside; mv lib/site-packages/y outside2")
        assert {item.path for item in moved.quarantined} == {
            "outside/.vscode", "outside/.npmrc", "outside2/.idea",
        }, moved.text  # fmt: skip
    assert real_executables(place) == {}


LINKS_OUT = ["/", "..", "../../home", "a/../..", "/home/me", "/proc/self/cwd", "/tmp/x", "/var/lib"]


@pytest.mark.parametrize("link", LINKS_OUT)
async def test_symlink_out_of_the_directory_is_refused(
    runtime: Runtime, place: Place, link: str
) -> None:
    """A user who enters it would be in a directory that another sandbox fills."""
    async with sandbox(runtime, place) as box:
        run = await box.run(f"import os; os.symlink({link!r}, 'way')")
        assert run.error is not None
        assert run.error.name == "PermissionError"
        deep = f"import os; os.makedirs('a/b/c'); os.symlink('../../../{link}', 'a/b/c/way')"
        await box.run(deep)
        await box.shell("mv a/b/c top; mv a/b up")
    outside = [
        path
        for path in place.directory.rglob("*")
        if path.is_symlink() and not path.resolve().is_relative_to(place.directory)
    ]
    assert outside == []


async def test_symlink_to_the_system_or_within_is_made(runtime: Runtime, place: Place) -> None:
    async with sandbox(runtime, place) as box:
        run = await box.run(
            "import os\nfor i, t in enumerate(['/usr/bin/python3', 'x', './x', '/dev/null']):"
            "\n    os.symlink(t, f'l{i}')"
        )
        assert run.ok, run.error
