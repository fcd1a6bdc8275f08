"""Which directories may be projects: as named, and again as they are when they are used."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import short_directory

from sbx.errors import BadRequest, Denied, SbxError
from sbx.workspace.allowed_paths import AllowedProjects, OwnPaths

OWNER = 4242


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        for name in ("work/mine/sub", "work/data/inside", "elsewhere/theirs"):
            (directory / name).mkdir(parents=True)
        (directory / "work/file").write_text("")
        if os.geteuid() == 0:
            for path in directory.rglob("*"):
                os.chown(path, OWNER, OWNER)
        yield Path(os.path.realpath(directory))


@pytest.fixture
def directories(top: Path) -> AllowedProjects:
    return AllowedProjects((top / "work",), OwnPaths((top / "work/data",)))


def refusal(directories: AllowedProjects, asked: str | Path) -> tuple[type[SbxError], str]:
    with pytest.raises(SbxError) as raised:
        directories.resolve(str(asked))
    assert raised.value.hint
    return type(raised.value), raised.value.code


def test_what_lies_within_is_resolved(directories: AllowedProjects, top: Path) -> None:
    assert directories.resolve(f"{top}/work/mine/") == top / "work/mine"
    (top / "work/link").symlink_to("mine/sub")
    assert directories.resolve(str(top / "work/link")) == top / "work/mine/sub"


@pytest.mark.parametrize(
    "asked", ["", ".", "work/mine", "work/../work/mine", "{top}/work/../work/mine", "{top}/work/\0"]
)
def test_only_a_plain_absolute_path_is_taken(
    directories: AllowedProjects, top: Path, asked: str
) -> None:
    expected = (BadRequest, "invalid_directory")
    assert refusal(directories, asked.replace("{top}", str(top))) == expected


@pytest.mark.parametrize("name", ["missing", "file", "file/below"])
def test_it_has_to_be_a_directory(directories: AllowedProjects, top: Path, name: str) -> None:
    assert refusal(directories, top / "work" / name) == (BadRequest, "invalid_directory")


@pytest.mark.parametrize(
    "asked", ["/", "/etc", "{top}", "{top}/elsewhere/theirs", "{top}/work-evil", "{top}/wor"]
)
def test_what_lies_elsewhere_is_not_granted(
    directories: AllowedProjects, top: Path, asked: str
) -> None:
    """CVE-2025-53110: the prefix /work of a path allowed /work-evil, too."""
    for sibling in ("work-evil", "wor"):
        (top / sibling).mkdir()
    assert refusal(directories, asked.replace("{top}", str(top))) == (Denied, "not_granted")


def test_a_symlink_that_leads_out_is_not_granted(directories: AllowedProjects, top: Path) -> None:
    (top / "work/out").symlink_to("../elsewhere/theirs")
    assert refusal(directories, top / "work/out") == (Denied, "not_granted")


def test_without_the_setting_nothing_is_granted(top: Path) -> None:
    assert refusal(AllowedProjects((), OwnPaths()), top / "work/mine") == (Denied, "not_granted")


@pytest.mark.parametrize("name", ["work", "work/data", "work/data/inside"])
def test_what_is_the_service_s_own_is_forbidden(
    directories: AllowedProjects, top: Path, name: str
) -> None:
    assert refusal(directories, top / name) == (Denied, "directory_forbidden")


@pytest.mark.parametrize("asked", ["/", "/etc"])
def test_the_host_s_own_directories_are_no_projects(asked: str) -> None:
    anywhere = AllowedProjects((Path("/"),), OwnPaths())
    assert refusal(anywhere, asked) == (Denied, "directory_forbidden")


def test_a_home_is_no_project(
    directories: AllowedProjects, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(top / "work/mine"))
    assert refusal(directories, top / "work/mine") == (Denied, "directory_forbidden")
    assert directories.resolve(str(top / "work/mine/sub"))


@pytest.mark.needs("root")
def test_a_directory_of_root_is_no_project(directories: AllowedProjects, top: Path) -> None:
    os.chown(top / "work/mine", 0, 0)
    assert refusal(directories, top / "work/mine") == (Denied, "workspace_owned_by_root")


@pytest.mark.parametrize("replaced", ["work/mine", "work/mine/sub"])
def test_a_symlink_that_takes_its_place_later_is_seen(
    directories: AllowedProjects, top: Path, replaced: str
) -> None:
    named = directories.resolve(str(top / "work/mine/sub"))
    (top / replaced).rename(top / "work/moved")
    (top / replaced).symlink_to(top / "elsewhere/theirs")
    with pytest.raises(BadRequest, match=r"symlink") as raised:
        directories.check(named)
    assert raised.value.code == "invalid_directory"
