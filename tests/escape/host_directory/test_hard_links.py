"""Hard links and symlinks: a file with names outside of the directory keeps its content and mode,
and no symlink comes to a place from which it leads out."""

import os
from pathlib import Path

import pytest
from planting import OWNER, Place, make_place, sandbox

from sbx import Runtime
from tests.tiers import rows

pytestmark = [
    pytest.mark.parametrize(
        "started_by", rows(["fork", "cold"], ["fork"]), indirect=True, scope="module"
    ),
]
LARGE = (64 << 20) + 1


@pytest.fixture
def place(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Place:
    return make_place(own_temporary_directory / f"links-{abs(hash(request.node.name))}")


def store(place: Place, text: str = "of the store\n", mode: int = 0o644) -> Path:
    """A file outside, that a tool has linked into the directory as `linked`."""
    outside = place.directory.parent / "store"
    outside.write_text(text)
    outside.chmod(mode)
    os.chown(outside, OWNER, OWNER)
    os.link(outside, place.directory / "linked")
    return outside


WRITES = {
    "append": ("open('linked', 'a').write('new')", "of the store\nnew"),
    "truncate on open": ("open('linked', 'w').write('new')", "new"),
    "read and write": ("open('linked', 'r+').write('new')", "newthe store\n"),
    "truncate": ("os.truncate('linked', 2)", "of"),
    "truncate to nothing": ("os.truncate('linked', 0)", ""),
    "mode": ("os.chmod('linked', 0o755)", "of the store\n"),
    "through a symlink": ("os.symlink('linked', 'way'); open('way', 'a').write('x')",
                          "of the store\nx"),
    "through a descriptor": ("fd = os.open('linked', os.O_RDONLY);"
                             "open(f'/proc/self/fd/{fd}', 'a').write('x')", "of the store\nx"),
    "through another link": ("os.link('linked', 'way'); open('way', 'a').write('x')",
                             "of the store\n"),
    "removal": ("os.unlink('linked'); open('linked', 'w').write('new')", "new"),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
async def test_a_file_with_a_name_outside_is_changed_in_a_copy(
    runtime: Runtime, place: Place, write: str
) -> None:
    outside = store(place)
    code, expected = WRITES[write]
    async with sandbox(runtime, place) as box:
        run = await box.run(f"import os; {code}")
        assert run.ok, run.error
    assert (outside.read_text(), outside.stat().st_mode & 0o777) == ("of the store\n", 0o644)
    linked = place.directory / "linked"
    assert linked.read_text() == expected
    assert linked.stat().st_uid == OWNER
    assert linked.stat().st_mode & 0o777 == (0o755 if write == "mode" else 0o644)
    assert [path.name for path in place.directory.iterdir() if path.name.startswith(".sbx")] == []


async def test_a_file_that_cannot_be_copied_is_not_changed(runtime: Runtime, place: Place) -> None:
    outside = store(place)
    os.truncate(outside, LARGE)
    async with sandbox(runtime, place) as box:
        run = await box.run("open('linked', 'a').write('new')")
        assert run.error is not None
        assert "Read-only file system" in run.error.value
        mode = await box.run("import os; os.fchmod(os.open('linked', os.O_RDONLY), 0o777)")
        assert mode.error is not None
        assert (await box.run("open('linked', 'w').write('new')")).ok
    assert (outside.stat().st_size, outside.stat().st_mode & 0o777) == (LARGE, 0o644)


async def test_a_file_without_the_right_to_write_keeps_its_content(
    runtime: Runtime, place: Place
) -> None:
    outside = store(place, mode=0o444)
    async with sandbox(runtime, place) as box:
        run = await box.run("open('linked', 'w').write('new')")
        assert run.error is not None
        assert run.error.name == "PermissionError"
    assert outside.stat().st_nlink == 2


async def test_links_that_the_code_makes_work(runtime: Runtime, place: Place) -> None:
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            "set -e; mkdir a; echo 1 > a/x; cp -al a b; echo 2 >> b/x; cat a/x b/x; chmod 600 a/x;"
            " ln a/x a/y; mv a/y z; mv z a/b; cat a/b; rm -r a b"
        )
        assert (run.exit_code, run.stdout) == (0, "1\n1\n2\n1\n"), run.text


OUT = {
    "a hard link to a symlink": """
os.makedirs("q/r"); os.symlink("../../home/secret", "q/r/way")
os.link("q/r/way", "h4", follow_symlinks=False)
""",
    "a hard link to a symlink, by descriptor": """
os.makedirs("q/r"); os.symlink("../../secret", "q/r/way")
fd = os.open("q/r/way", os.O_PATH | os.O_NOFOLLOW)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.linkat(fd, b"", -100, b"h4", 0x1000): raise OSError(ctypes.get_errno(), "linkat")
""",
    "a symlink that is moved up": """
os.makedirs("q"); os.symlink("../x", "q/way"); os.rename("q/way", "h4")
""",
    "a directory with a symlink that is moved up": """
os.makedirs("q/r"); os.symlink("../../home", "q/r/way"); os.rename("q/r", "h4")
""",
    "two dots behind a system directory": """
os.symlink("/usr/lib/ssl/certs/../../../home/x", "h4")
""",
    "the workspace of the host": """
os.symlink("/workspace/x", "h4")
""",
}


@pytest.mark.parametrize("attack", OUT)
async def test_no_symlink_comes_to_lead_out(runtime: Runtime, place: Place, attack: str) -> None:
    async with sandbox(runtime, place) as box:
        run = await box.run("import os" + OUT[attack])
        assert run.error is not None
        assert run.error.name in ("PermissionError", "OSError")
    assert "h4" not in os.listdir(place.directory)


async def test_files_links_and_directories_move_as_ever(runtime: Runtime, place: Place) -> None:
    async with sandbox(runtime, place) as box:
        run = await box.shell(
            "set -e; mkdir -p a/b; echo 1 > a/b/f; ln -s f a/b/l; ln -s b/f a/k; mv a/b/f a/b/g;"
            " mv a/b/g .; mv g a/b/f; mv a/b/l a; mv a/l a/b/l; mkfifo p; mv p a/b;"
            " mv a/b c; mv c a/b; cat a/b/l a/k; echo 2 > g; mv a/b/f g; cat g"
        )
        assert (run.exit_code, run.stdout) == (0, "1\n1\n1\n"), run.text
        exists = await box.shell("echo 1 > x; mv -n x g; mv x a; mv -T x a 2>&1; ls -A")
        assert exists.ok or "x" in exists.stdout
    assert not list(place.directory.rglob(".sbx-*"))
