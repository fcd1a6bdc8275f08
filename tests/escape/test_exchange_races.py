"""Every host-side file operation, thousands of times, while a process exchanges names beneath it.

None may read, change or make anything outside, and none may hang. Both ways to open run all races.
The control of each is what anybody would write first, a check of the path and then the call: it
loses the same race, within moments. (`test_file_races` has the same from inside a jail, with the
service in between; archives are made and read inside, and so are raced there.)
"""

import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from racing import KINDS, hangs, racing

from sbx.errors import Broken, SbxError, Unavailable
from sbx.linux import inotify, openat2
from sbx.workspace import resumable_uploads
from sbx.workspace.files import Files
from sbx.workspace.layout import ConversationFiles
from sbx.workspace.streams import Owner, ReceivedFile, drive
from sbx.workspace.uploads import UploadLimits
from sbx.workspace.watch import Watching
from tests.tiers import rows

ROUNDS = 240
SLOW_ROUNDS = 48  # of what walks, or waits for the disk
FULL_TIER = 8  # times as many
ENOUGH = 100  # swaps
MOST = 1000  # times as many rounds, and nothing was raced
HUNG_S = 60.0
CONTROL_S = 60.0
SECRET = "what-only-the-host-may-read"
SIZE = 4 << 20  # of a file of the host's, which no measure of a workspace comes near
JAIL: Owner | None = (64_123, 64_123) if os.geteuid() == 0 else None


@dataclass(frozen=True)
class Place:
    """A conversation whose files are raced, and what of the host it would like to reach."""

    own: ConversationFiles
    files: Files
    root: Path
    outside: Path

    def seen(self) -> dict[str, tuple[int, int, bytes]]:
        """All that is in the host's directory, with modes and owners."""
        return {
            str(path.relative_to(self.outside)): (
                (found := path.lstat()).st_mode,
                found.st_uid,
                path.read_bytes() if path.is_file() and found.st_size < SIZE else b"",
            )
            for path in (self.outside, *sorted(self.outside.rglob("*")))
        }


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """It has everything that has a name in the workspace, too."""
    top = tmp_path / "outside"
    (top / "sub").mkdir(parents=True)
    for name in ("secret", "f", "sub/f", "temparea", "generated", "touched"):
        (top / name).write_text(SECRET)
        (top / name).chmod(0o640)
    with (top / "big").open("wb") as big:
        os.posix_fallocate(big.fileno(), 0, SIZE)
    return top


@pytest.fixture(params=["openat2", "walk"])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    if request.param == "walk":
        monkeypatch.setattr(openat2, "supported", lambda: False)
    elif not openat2.supported():
        pytest.skip("this linux has no openat2")
    (tmp_path / "conversation").mkdir()
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        own = ConversationFiles(parent, tmp_path / "conversation", JAIL)
    finally:
        os.close(parent)
    with own:
        own.files.durable = False  # else every round waits for the disk
        files = Files(own.files, own.uploads.tree, max_bytes=SIZE)
        yield Place(own, files, own.files_path, outside)


# -- the operations --------------------------------------------------------------------------------

Act = Callable[[Place, int], object]


def _read(place: Place, number: int) -> object:
    return place.files.read(("d/f", "d/sub/f", "d/secret")[number % 3])


def _download(place: Place, number: int) -> object:
    with place.files.open(("d/f", "d/sub/f", "d/secret")[number % 3]) as file:
        return b"".join(file.chunks())


def _write(place: Place, number: int) -> object:
    path = ("d/f", f"d/new{number % 7}", "d/sub/f", f"d/made{number % 7}/deep")[number % 4]
    return place.files.write(path, b"mine")


def _upload(place: Place, number: int) -> object:
    path = ("d/f", "d/sub/f", f"d/made{number % 7}/deep")[number % 3]
    return drive(place.files.writing(path), (b"mi", b"ne"))


def _partial_upload(place: Place, number: int) -> object:
    staging, name, digest = place.own.staging, resumable_uploads.new_name(), _sha256(b"mine")
    resumable_uploads.make(staging, name)
    try:
        before = hashlib.sha256()
        drive(resumable_uploads.appending(staging, name, 0, 4, digest, before), (b"mine",))
        received = ReceivedFile(staging, name, digest)
        return place.files.place(("d/f", "d/sub/new")[number % 2], received)
    finally:
        resumable_uploads.remove(staging, name)


def _list(place: Place, number: int) -> object:
    return place.files.list(("d", "d/sub", "d/f")[number % 3], max_depth=3)


def _stat(place: Place, number: int) -> object:
    return place.files.stat(("d/f", "d/sub/f", "d/secret", "d/big")[number % 4])


def _make_directory(place: Place, number: int) -> object:
    place.files.make_directory((f"d/made{number % 7}/deep", f"d/sub/m{number % 7}")[number % 2])
    return None


def _delete(place: Place, number: int) -> object:
    return place.files.delete(("d/f", "d/secret", "d/sub", "d", "d/sub/f")[number % 5])


def _move(place: Place, number: int) -> object:
    files = place.files
    with suppress(SbxError):
        files.write("mine", b"mine")
        files.move("mine", ("d/mine", "d/f", "d/sub/f")[number % 3], overwrite=bool(number % 2))
    with suppress(SbxError):
        files.move(("d/f", "d/secret", "d/sub")[number % 3], f"got{number % 5}")
    answer = [_content(files, f"got{number % 5}{below}") for below in ("", "/f", "/secret")]
    with suppress(SbxError):
        files.delete(f"got{number % 5}")
    return answer


def _copy(place: Place, number: int) -> object:
    files = place.files
    with suppress(SbxError):
        files.copy(("d", "d/f", "d/sub")[number % 3], "copied")
    with suppress(SbxError):
        files.write("mine", b"mine")
        files.copy("mine", ("d/mine", "d/f", "d/sub/f")[number % 3], overwrite=True)
    answer = [_content(files, f"copied{below}") for below in ("", "/f", "/secret", "/sub/f")]
    with suppress(SbxError):
        files.delete("copied")
    return answer


def _replace(place: Place, number: int) -> object:
    path = ("d/f", "d/sub/f", "d/secret")[number % 3]
    return place.files.replace(path, ("inside", "what")[number % 2], "other", count=None)


def _find(place: Place, number: int) -> object:
    return [entry.path for entry in place.files.find("*", ("d", ".")[number % 2])]


def _grep(place: Place, number: int) -> object:
    return place.files.grep("only", ("d", "d/f", ".", "d/sub")[number % 4])


def _permissions(place: Place, number: int) -> object:
    place.files.chmod(("d/f", "d", "d/sub", "d/secret")[number % 4], 0o777)
    return None


def _watch(place: Place, number: int) -> object:
    _, places = place.files.places(("d", ".", "d/sub")[number % 3])
    watching = Watching(places, recursive=bool(number % 2))
    try:
        _touch(place)
        return [change.path for change in watching.read() if "touched" in change.path]
    finally:
        watching.close()


def _measure(place: Place, _: int) -> object:
    used = place.own.files.measure()
    return "big" if used.bytes >= SIZE else used


def _mount_points(place: Place, number: int) -> object:
    place.own.prepare()
    return place.own.uploads.put(f"u{number % 7}", b"mine", UploadLimits())


ACTS: dict[str, tuple[Act, int]] = {
    "read": (_read, ROUNDS),
    "download": (_download, ROUNDS),
    "write": (_write, ROUNDS),
    "upload": (_upload, ROUNDS),
    "partial upload": (_partial_upload, SLOW_ROUNDS),
    "list": (_list, ROUNDS),
    "stat": (_stat, ROUNDS),
    "make directory": (_make_directory, ROUNDS),
    "delete": (_delete, ROUNDS),
    "move": (_move, SLOW_ROUNDS),
    "copy": (_copy, SLOW_ROUNDS),
    "replace": (_replace, ROUNDS),
    "find": (_find, SLOW_ROUNDS),
    "grep": (_grep, SLOW_ROUNDS),
    "permissions": (_permissions, ROUNDS),
    "watch": (_watch, SLOW_ROUNDS // 4),
    "measure": (_measure, SLOW_ROUNDS),
    "mount points": (_mount_points, SLOW_ROUNDS),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_operation_never_leads_out_and_never_hangs(
    place: Place, name: str, pytestconfig: pytest.Config
) -> None:
    """A race ends after its rounds, and not before names were swapped beneath a call that was not
    refused: on a busy machine the racer has its turns more seldom."""
    act, rounds = ACTS[name]
    if pytestconfig.getoption("--full"):
        rounds *= FULL_TIER
    before = place.seen()
    longest = 0.0
    number = done = 0
    kinds = (*KINDS, "mounts") if name == "mount points" else KINDS
    with racing(place.root, place.outside, *kinds) as racer:
        begun = racer.swaps
        while number < rounds or not done or racer.swaps - begun <= ENOUGH:
            assert number < MOST * rounds, f"{racer.swaps - begun} swaps, {done} calls were served"
            number += 1
            start = time.monotonic()
            try:
                assert not _gave_away(act(place, number))
                done += 1
            except (Broken, Unavailable):
                raise
            except SbxError:
                continue
            finally:
                longest = max(longest, time.monotonic() - start)
    assert place.seen() == before
    assert longest < HUNG_S


# -- the controls: look first, then act by the path ------------------------------------------------


def _checked(place: Place, path: str) -> str:
    """What every sandbox has that was broken this way: it was all right a moment ago."""
    full = os.path.join(place.root, path)
    if os.path.islink(full) or not os.path.realpath(full).startswith(f"{place.root}/"):
        raise PermissionError(path)
    return full


def _naive_read(place: Place, number: int) -> object:
    with open(_checked(place, ("d/f", "d/secret")[number % 2]), "rb") as file:
        return file.read()


def _naive_write(place: Place, number: int) -> object:
    with open(_checked(place, ("d/f", "d/new")[number % 2]), "wb") as file:
        return file.write(b"mine")


def _naive_replace(place: Place, _: int) -> object:
    path = _checked(place, "d/f")
    with open(path, "r+b") as file:
        content = file.read().replace(b"what", b"lost")
        file.seek(0)
        return file.write(content)


def _naive_delete(place: Place, number: int) -> object:
    os.unlink(_checked(place, ("d/secret", "d/f", "d/sub/f")[number % 3]))
    return None


def _naive_move(place: Place, number: int) -> object:
    mine = place.root / "mine"
    if number % 2:
        mine.write_bytes(b"mine")
        os.rename(mine, _checked(place, "d/mine"))
        return None
    os.rename(_checked(place, "d/secret"), place.root / "got")
    return (place.root / "got").read_bytes()


def _naive_copy(place: Place, _: int) -> object:
    shutil.copyfile(_checked(place, "d/f"), place.root / "copied")
    return (place.root / "copied").read_bytes()


def _naive_walk(place: Place, _: int) -> object:
    """As a check with lstat before each descent does it, `os.walk` included."""
    found = []
    for directory in ("d", "d/sub"):
        path = _checked(place, directory)
        found += [os.path.join(path, name) for name in os.listdir(path)]
    return found


def _naive_grep(place: Place, number: int) -> object:
    return [
        Path(path).read_bytes() for path in _as_list(_naive_walk(place, number)) if _is_file(path)
    ]


def _naive_stat(place: Place, _: int) -> object:
    return "big" if os.stat(_checked(place, "d/big")).st_size >= SIZE else None


def _naive_measure(place: Place, number: int) -> object:
    fd = os.open(_checked(place, ("d", "d/sub")[number % 2]), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(fd) as entries:
            used = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    finally:
        os.close(fd)
    return "big" if used >= SIZE else None


def _naive_permissions(place: Place, number: int) -> object:
    os.chmod(_checked(place, ("d/f", "d")[number % 2]), 0o777)
    return None


def _naive_make_directory(place: Place, number: int) -> object:
    os.mkdir(_checked(place, f"d/made{number}"))
    return None


def _naive_watch(place: Place, _: int) -> object:
    queue = inotify.Inotify()
    try:
        fd = os.open(_checked(place, "d"), os.O_RDONLY | os.O_DIRECTORY)
        try:
            queue.add(fd, inotify.MODIFY)
        finally:
            os.close(fd)
        _touch(place)
        return [event.name.decode() for event in queue.read() if event.name == b"touched"]
    finally:
        queue.close()


def _naive_mount_points(place: Place, number: int) -> object:
    temparea = place.root / "uploads" / "temparea"
    if temparea.is_dir() and not temparea.is_symlink():
        os.chmod(temparea, 0o700)
        (temparea / f"u{number}").write_bytes(b"mine")
    return None


NAIVE: dict[str, Act] = {
    "read": _naive_read,
    "download": _naive_read,
    "write": _naive_write,
    "upload": _naive_write,
    "partial upload": _naive_write,
    "list": _naive_walk,
    "stat": _naive_stat,
    "make directory": _naive_make_directory,
    "delete": _naive_delete,
    "move": _naive_move,
    "copy": _naive_copy,
    "replace": _naive_replace,
    "find": _naive_walk,
    "grep": _naive_grep,
    "permissions": _naive_permissions,
    "watch": _naive_watch,
    "measure": _naive_measure,
    "mount points": _naive_mount_points,
}


CONTROLS = sorted(set(NAIVE) - {"download", "upload", "partial upload"})
# One control for each kind of a call: what reads, looks, writes, makes, removes, changes, watches.
CI_CONTROLS = [
    "read", "list", "stat", "write", "make directory", "delete", "permissions", "watch",
    "mount points",
]  # fmt: skip


@pytest.mark.full_tier
@pytest.mark.parametrize("place", ["openat2"], indirect=True)
@pytest.mark.parametrize("name", rows(CONTROLS, CI_CONTROLS))
def test_a_check_before_the_call_loses_the_race(place: Place, name: str) -> None:
    """The control: these are won, by the same racer, so the tests above can fail."""
    before = place.seen()
    kinds = ("mounts",) if name == "mount points" else (*KINDS, "plain")
    end = time.monotonic() + CONTROL_S
    number, won = 0, False
    with racing(place.root, place.outside, *kinds):
        while not won and time.monotonic() < end:
            number += 1
            with suppress(OSError):
                won = _gave_away(NAIVE[name](place, number))
            won = won or place.seen() != before
    assert won, f"{number} rounds, and none was lost"


@pytest.mark.parametrize("place", ["openat2"], indirect=True)
def test_a_check_before_the_call_hangs_at_a_fifo(place: Place) -> None:
    """The control of "never hangs": the check found a file, and what is opened is a FIFO."""
    counter = mmap.mmap(-1, 8)
    with racing(place.root, place.outside, "file"):
        if (child := os.fork()) == 0:
            number = 0
            while True:
                with suppress(OSError):
                    if os.path.isfile(path := _checked(place, "d/f")):
                        with open(path, "rb") as file:
                            file.read()
                number += 1
                counter[:8] = number.to_bytes(8, "little")
        assert hangs(child, counter, 1.0)


def _gave_away(answer: object) -> bool:
    """Whether what a call told is of the host."""
    text = repr(answer)
    return any(word in text for word in (SECRET, "secret", "'big'", "touched"))


def _content(files: Files, path: str) -> Any:
    try:
        return files.read(path)
    except SbxError:
        return None


def _touch(place: Place) -> None:
    """Write what is outside anew, as it was, so that who watches it is told."""
    (place.outside / "touched").write_text(SECRET)


def _as_list(answer: object) -> list[str]:
    assert isinstance(answer, list)
    return answer


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
