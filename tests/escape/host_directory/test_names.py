"""Every name of the table, planted in every way: on the host none of them is more than a link that
leads nowhere, and what was there before has not changed."""

import asyncio
import os
from pathlib import Path

import pytest
from planting import METHODS, OWNER, Place, make_place, sandbox

from sbx import Runtime
from sbx.guest.guarded_paths import ITEMS
from sbx.workspace.host_executables import TABLE, HostExecutable, path_rules
from tests.tiers import rows

TEXT = "planted"


def _sample(pattern: str) -> str:
    """A name that fits a pattern of the table."""
    return pattern.replace("y*ml", "yml").replace("*", "x")


def _path(entry: HostExecutable, pattern: str) -> str:
    """A path at which a program obeys such a name."""
    parents = ("site-packages",) if entry.scope == "packages" else entry.parents[:1]
    return "/".join((*parents, _sample(pattern)))


MODULES = (
    "pip/__init__.py", "readline/__init__.pyc", "keyword/__init__.so", "types.so", "enum.pyc",
    "re.cpython-311-x86_64-linux-gnu.so", "email/__init__.py",
)  # fmt: skip
# The list of modules is long, and one of them is as good as another.
NAMES = [
    _path(entry, name) for entry in TABLE for name in entry.names[: 12 if entry.is_module else None]
]
# Below a directory of the table, what a program of the host looks for in it.
BELOW = {
    ".git": "config", ".hg": "hgrc", ".vscode": "tasks.json", ".husky": "pre-commit", "nt": "x.py",
    "org/python": "core.py",
}  # fmt: skip
NEW = [*(f"{name}/{BELOW[name]}" if name in BELOW else name for name in NAMES), *MODULES]
ROOT_ONLY = {_path(entry, name) for entry in TABLE if entry.scope == "root" for name in entry.names}
ANY_DEPTH = [path for path in NEW if path not in ROOT_ONLY and path not in MODULES[2:]]
PATHS = [*NEW, *(f"new/deep/{path}" for path in ANY_DEPTH)]
# One path for each entry of the table, and every other one in a new directory, if it counts there.
ONE_OF_EACH = [
    f"new/deep/{path}" if path in ANY_DEPTH and number % 2 else path
    for number, path in enumerate(
        f"{path}/{BELOW[path]}" if path in BELOW else path
        for path in (_path(entry, entry.names[0]) for entry in TABLE)
    )
]
SAMPLES = {"open file without a name": [".envrc", ".git/config", "new/deep/.vscode/tasks.json"]}
PLANTINGS = {
    **{f"all names by {method}": (method, PATHS) for method in METHODS if method not in SAMPLES},
    **{
        f"few names by {method}": (method, SAMPLES.get(method, ONE_OF_EACH))
        for method in METHODS
        if method != "redirection"
    },
}
# The CI tier plants every name by one way, and one name of each entry by every way.
CI_PLANTINGS = ["all names by redirection", *[name for name in PLANTINGS if "few" in name][::2]]


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
    pytest.mark.parametrize(
        "started_by", rows(["fork", "cold"], ["fork"]), indirect=True, scope="module"
    ),
]


@pytest.mark.parametrize("planting", rows(PLANTINGS, CI_PLANTINGS))
async def test_new_name_of_the_table_leads_nowhere_on_the_host(
    runtime: Runtime, place: Place, planting: str
) -> None:
    method, paths = PLANTINGS[planting]
    script = "\n".join(METHODS[method](path, TEXT) for path in paths)
    async with sandbox(runtime, place) as box:
        run = await box.shell(script)
        assert real_executables(place) == {}, run.text
        assert not any((place.directory / path).exists() for path in place.links())
        reported = {f"{ITEMS}/{item.id}" for item in run.quarantined}
        assert set(place.links().values()) <= reported
    assert place.links() == {}
    assert real_executables(place) == {}


@pytest.mark.parametrize("planting", rows(PLANTINGS, CI_PLANTINGS))
async def test_existing_name_of_the_table_is_not_changed(
    runtime: Runtime, place: Place, planting: str
) -> None:
    for path in PATHS:
        place.write(path, "of the user")
    before = real_executables(place)
    assert len(before) >= len(PATHS)
    method, paths = PLANTINGS[planting]
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


SESSIONS = {
    "a worktree": "git init -q r; cd r; git commit -q --allow-empty -m x; git worktree add -q ../w;"
    " cd ../w; echo 1 > f; git add f; git commit -qm y; git log --oneline | wc -l",
    "a clone": "git init -q r; git -C r commit -q --allow-empty -m x; git clone -q r c; cd c;"
    " git commit -q --allow-empty -m y; git push -q origin HEAD:y; git log --oneline | wc -l",
    "a bare clone": "git init -q r; git -C r commit -q --allow-empty -m x; git clone -q --bare r;"
    " git clone -q --no-local r.git c; git -C c commit -q --allow-empty -m y; git -C c push -q;"
    " git -C r.git log --oneline | wc -l",
    "a directory that is moved": "git init -q a/b; git -C a/b commit -q --allow-empty -m x;"
    " echo 1 > a/b/f; mv a/b c; cd c; git add f; git commit -qm y; git log --oneline | wc -l",
}


@pytest.mark.parametrize("session", SESSIONS)
async def test_git_works_in_directories_that_code_creates(
    runtime: Runtime, place: Place, session: str
) -> None:
    who = "git config --global user.name x; git config --global user.email x@y"
    async with sandbox(runtime, place) as box:
        run = await box.shell(f"set -e; {who}; {SESSIONS[session]}")
        assert (run.exit_code, run.stdout) == (0, "2\n"), run.text
    heads = [path for path in place.directory.rglob("HEAD") if path.is_file()]
    assert heads == []


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


ORDINARY = (
    "templates/index.html", "templates/base.html", "templates/base.html.j2",
    "templates/index.html.j2", "roles/base/templates/app.conf.j2", "roles/base/tasks/main.yml",
    "python/client.py.j2", "docs/conf.py", "docs/_templates/layout.html", "config.json",
    "src/shop/__init__.py", "src/shop/types.py", "src/shop/enum.py", "src/shop/json/__init__.py",
    "tests/__init__.py", "test/__init__.py", "test/test_pip.py", "email/welcome.html",
    "html/index.html", "http/client.http", "org/notes.org", "org/example/Main.java",
    "keyword.txt", "re.sh", "pip/requirements.txt", "lab/results.csv", "lab/notes.md",
    "script/build.sh", "{{cookiecutter.name}}/setup.py", "models/types.pth", "index.html.j2",
    "vendor/requests/__init__.py", "vendor/urllib3/__init__.py", ".gitignore", "biome.json",
    "build/.hidden", "dist/-", ".cache/.x/.y", "node_modules/.bin2", ".github/workflows/ci.yml",
)  # fmt: skip


async def test_ordinary_project_has_nothing_in_the_quarantine(
    runtime: Runtime, place: Place
) -> None:
    """Its files are made, and arrive by renames of directories and in an archive."""
    made = " && ".join(
        f"mkdir -p '{os.path.dirname(path) or '.'}' && printf {TEXT} > '{path}'"
        for path in ORDINARY
    )
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            f"mkdir -p work; cd work; {made}; cd ..; tar cf /tmp/p.tar work; mv work first;"
            " tar xf /tmp/p.tar; mv work/email work/lab work/html .; mv email mail; mv mail email"
        )
        assert (run.exit_code, run.quarantined) == (0, ()), run.text
        moved = await box.run(
            "import os, shutil; shutil.move('work/python', 'python'); os.rename('first', 'second')"
        )
        assert moved.ok, moved.error
        assert moved.quarantined == ()
    assert real_executables(place) == {}
    assert (place.directory / "second/src/shop/types.py").read_text() == TEXT
    assert (place.directory / "lab/notes.md").read_text() == TEXT
    assert (place.directory / "python/client.py.j2").read_text() == TEXT


ARRIVALS = {
    "a renamed directory": "mv made {name}",
    "a renamed directory, by the call": 'python3 -c \'import os; os.rename("made", "{name}")\'',
    "a moved directory": "mkdir up; mv made up/{name}; mv up/{name} .",
    "a symlink": "ln -s made {name}",
    "a renamed symlink": "ln -s made way; mv way {name}",
    "a hard link to a symlink": "ln -s made way; ln -P way {name}",
    "a symlink in a moved directory": "mkdir up; ln -s ../made up/{name}; mv up/{name} .",
    "a copy": "cp -r made {name}",
    "a copied symlink": "ln -s made way; cp -P way {name}",
    "a directory that is filled later": "mkdir {name}; mv made/* {name}",
    "an archive": "tar cf /tmp/x.tar --transform s/made/{name}/ made; tar xf /tmp/x.tar",
}


@pytest.mark.parametrize("arrival", rows(ARRIVALS, [*ARRIVALS][::2]))
async def test_directory_does_not_get_a_name_that_its_content_needs(
    runtime: Runtime, place: Place, arrival: str
) -> None:
    """`made` is free: its files count only in a directory with a name of the table."""
    files = {"pip": "__init__.py", "keyword": "__init__.pyc", "lab": "index.html.j2"}
    for name, file in files.items():
        command = ARRIVALS[arrival].format(name=name)
        async with sandbox(runtime, place) as box:
            await box.shell(f"rm -rf made up way; mkdir made; echo {TEXT} > made/{file}; {command}")
            assert real_executables(place) == {}
            assert not (place.directory / name / file).exists()


async def test_hard_link_to_a_symlink_does_not_lead_out(runtime: Runtime, place: Place) -> None:
    """A relative symlink leads elsewhere under a second name at another depth."""
    async with sandbox(runtime, place) as box:
        run = await box.shell("mkdir -p a/b; ln -s ../../x a/b/way; ln -P a/b/way way")
        assert run.exit_code != 0
    assert not (place.directory / "way").is_symlink()


async def test_environment_of_code_has_its_links_to_programs(
    runtime: Runtime, place: Place
) -> None:
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            "mkdir -p tool/bin; cd tool/bin; ln -s /usr/bin/python3 python3; ln -s python3 python"
        )
        assert (run.exit_code, run.quarantined) == (0, ()), run.text


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


REVIEWED = {
    "a forged link to the quarantine": """
os.symlink("/.sbx-quarantine/items/../../workspace/.git/config", "l")
open("payload", "w").write("planted"); os.rename("payload", "l")
""",
    "a forged item": """
os.symlink("/workspace/.git", "/.sbx-quarantine/items/0123456789abcdef")
os.symlink("/.sbx-quarantine/items/0123456789abcdef/hooks/pre-commit", "l")
open("payload", "w").write("planted"); os.rename("payload", "l")
""",
    "a forged record": """
open("/.sbx-quarantine/records/0123456789abcdef.json", "w").write("{}")
""",
    "a directory that nobody may search": """
os.chdir("/workspace/sub"); os.chmod("/workspace", 0)
open(".envrc", "w").write("planted")
""",
    "a subdirectory that nobody may search": """
os.chdir("/workspace/sub"); os.chmod("/workspace/sub", 0)
open(".envrc", "w").write("planted")
""",
    "a socket that completes a repository": """
import socket
os.makedirs("lib/objects"); open("lib/HEAD", "w").write("ref: refs/heads/x")
socket.socket(socket.AF_UNIX).bind("lib/refs")
""",
    "an environment that is moved": """
os.rename("env", "old"); os.makedirs("env/bin"); open("env/bin/python", "w").write("planted")
""",
    "an environment whose parent is moved": """
os.rename("py", "old"); os.makedirs("py/env/bin"); open("py/env/bin/python", "w").write("planted")
""",
    "the index of a repository": """
open(".git/index.lock", "w").write("DIRC"); os.rename(".git/index.lock", ".git/index")
""",
    "an access list": """
os.setxattr(".git/config", "system.posix_acl_access",
            bytes.fromhex("02000000" "01000700ffffffff" "04000500ffffffff" "20000500ffffffff"))
""",
    "a link of the quarantine on a protected name": """
open(".npmrc", "w").write("x"); item = os.readlink(".npmrc"); os.unlink(".npmrc")
os.symlink(item, ".git/hooks/pre-commit")
""",
    "an item under another name of the table": """
open(".npmrc", "w").write("x"); os.symlink(os.readlink(".npmrc"), "new-.envrc".partition("-")[2])
""",
    "the mode of the second name": """
os.chmod("notes.txt", 0o777)
""",
    "a link that leads up behind another one": """
os.symlink(".", "x"); os.symlink("x/x/../../../etc", "out")
""",
}


HARMLESS = ("a forged link to the quarantine",)  # a link to a path of the workspace, and replaced


@pytest.mark.parametrize("attack", REVIEWED)
async def test_hole_that_a_review_found_is_closed(
    runtime: Runtime, place: Place, attack: str
) -> None:
    for path in (".git/config", ".git/hooks/x", ".git/HEAD", ".git/objects/x", ".git/refs/x"):
        place.write(path, "of the user")
    for path in ("sub/.envrc", "env/pyvenv.cfg", "env/bin/python", "py/env/pyvenv.cfg"):
        place.write(path, "of the user")
    os.link(place.directory / ".git/hooks/x", place.directory / "notes.txt")
    before = {
        path: (os.lstat(place.directory / path).st_mode, text)
        for path, text in real_executables(place).items()
    }
    async with sandbox(runtime, place) as box:
        run = await box.run("import os" + REVIEWED[attack])
        if attack not in HARMLESS:
            assert run.error is not None, run
        await box.shell("chmod -R u+rwX . 2>/dev/null")
    after = real_executables(place)
    assert {
        path: (os.lstat(place.directory / path).st_mode, text) for path, text in after.items()
    } == before
    assert not (place.directory / "env/bin/python").read_text().startswith("planted")


async def test_two_kernels_put_no_repository_together(runtime: Runtime, place: Place) -> None:
    """Each kernel has a guard; one sees the half that the other has created."""
    prepare = "mkdir -p lib; echo x > lib/config; mkdir -p lib/refs"
    half = "import os, time\nfor i in range(300):\n    try: {}\n    except OSError: pass\n"
    async with sandbox(runtime, place) as box:
        await box.shell(prepare)
        other = await box.contexts.create("other")
        head = half.format("os.close(os.open('lib/HEAD', os.O_CREAT | os.O_WRONLY))")
        undo = half.format("os.rmdir('lib/objects')")
        objects = half.format("os.mkdir('lib/objects'); time.sleep(0.001)")
        await asyncio.gather(box.run(head), other.run(objects))
        await asyncio.gather(box.run(undo), other.run(objects))
        parts = [(place.directory / "lib" / name) for name in ("HEAD", "objects", "refs")]
        assert not all(part.exists() for part in parts)
