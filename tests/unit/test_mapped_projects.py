"""The directories of the host that the broker of a confined runtime maps, and holds afterwards."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sbx.errors import Denied
from sbx.forbidden_directories import HostDirectoryFacts
from sbx.isolation.mapped import MappedProjects

Grant = Callable[..., MappedProjects]


@pytest.fixture
def projects() -> Iterator[Path]:
    """The directory that may hold projects, with the project `p` in it."""
    with tempfile.TemporaryDirectory() as place:
        top = Path(place).resolve()
        (top / "p/below").mkdir(parents=True)
        (top / "p/below/file").touch()
        yield top


@pytest.fixture
def granted(projects: Path) -> Iterator[Grant]:
    """Make one that lets go of its directories in the end: a broker holds them until it ends."""
    made: list[MappedProjects] = []

    def grant(owner: int = os.geteuid(), writable: str = "/nowhere") -> MappedProjects:
        host = HostDirectoryFacts(os.geteuid()).to_json()
        answer = {"within": [str(projects), "/nowhere"], "owners": [owner], "host": host}
        made.append(MappedProjects(answer, [writable]))
        return made[-1]

    yield grant
    for mapped in made:
        mapped.forget("s")
        for fd in mapped._within.values():
            os.close(fd)


def order(source: Any, sandbox: str = "s") -> dict[str, Any]:
    return {"source": source, "sandbox": sandbox}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_mapped_directory_is_held_until_its_sandbox_is_dropped(
    projects: Path, granted: Grant
) -> None:
    mapped, before = granted(), descriptors()
    source = str(projects / "p")
    with mapped.mapping(order(source)) as opened:
        assert opened["shown"] == source
        assert os.path.samefile(opened["source"], source)
    with ExitStack() as held:
        assert os.path.samefile(mapped.opened("s", source, "/workspace", held), source)
        file = mapped.opened("s", f"{source}/below/file", "/workspace/below/file", held)
        assert os.path.samefile(file, f"{source}/below/file")
        assert os.path.samefile(
            mapped.opened("s", f"{source}/below", "/workspace/below", held), f"{source}/below"
        )
    assert descriptors() == before + 1
    for _ in range(2):
        mapped.forget("s")
        assert descriptors() == before
    with ExitStack() as held, pytest.raises(Denied, match="no directory of this sandbox"):
        mapped.opened("s", source, "/workspace", held)


def test_sandbox_has_one_mapped_directory(projects: Path, granted: Grant) -> None:
    mapped = granted()
    with mapped.mapping(order(str(projects / "p"))):
        pass
    before = descriptors()
    with (
        pytest.raises(Denied, match="was mapped already"),
        mapped.mapping(order(str(projects / "p/below"))),
    ):
        pass
    assert descriptors() == before


def test_mapping_that_fails_holds_nothing(projects: Path, granted: Grant) -> None:
    mapped, before = granted(), descriptors()
    with pytest.raises(OSError, match="refused"), mapped.mapping(order(str(projects / "p"))):
        raise OSError("refused")
    assert descriptors() == before


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (None, "not a plain path"),
        ("{top}/../p", "not a plain path"),
        ("/etc", "none of the directories"),
        ("{top}x", "none of the directories"),
        ("{top}/missing", "cannot be shown: .*No such file"),
        ("{top}/link", "cannot be shown: "),
    ],
)
def test_other_directories_are_not_mapped(
    projects: Path, granted: Grant, source: Any, why: str
) -> None:
    (projects / "link").symlink_to("p")
    mapped, before = granted(), descriptors()
    named = source.format(top=projects) if source else source
    with pytest.raises(Denied, match=why), mapped.mapping(order(named)):
        pass
    assert descriptors() == before


def test_directory_of_another_owner_or_of_sbx_is_not_mapped(projects: Path, granted: Grant) -> None:
    source = str(projects / "p")
    for mapped, why in (
        (granted(owner=os.geteuid() + 1), "project_owners does not name"),
        (granted(writable=source), "cannot be shown to a sandbox"),
    ):
        with pytest.raises(Denied, match=why), mapped.mapping(order(source)):
            pass


@pytest.mark.parametrize(
    ("below", "target"),
    [
        ("", "/workspace/x"),
        ("/below", "/workspace/other"),
        ("/below", "/tmp/below"),
        ("x", "/workspacex"),
        ("/below/..", "/workspace/below/.."),
        ("/missing/file", "/workspace/missing/file"),
    ],
)
def test_mapped_directory_is_shown_in_its_place_only(
    projects: Path, granted: Grant, below: str, target: str
) -> None:
    mapped, source = granted(), str(projects / "p")
    with mapped.mapping(order(source)):
        pass
    with ExitStack() as held, pytest.raises(Denied):
        mapped.opened("s", source + below, target, held)
    with ExitStack() as held, pytest.raises(Denied, match="no directory of this sandbox"):
        mapped.opened("s", None, "/workspace", held)


def test_runtime_without_projects_maps_nothing(projects: Path) -> None:
    mapped = MappedProjects(None, [])
    with pytest.raises(Denied), mapped.mapping(order(str(projects / "p"))):
        pass
