"""Which directories a confined runtime may map: judged by the broker, without a jail."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import Denied
from sbx.forbidden_directories import HostDirectoryFacts
from sbx.isolation.mapped import MappedProjects


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in ("work/project", "work/sockets/below", "work/holds/mine"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "work"


@pytest.fixture
def projects(top: Path) -> Iterator[MappedProjects]:
    """Of a runtime that can write to two directories among the projects."""
    uid = os.geteuid()
    answer = {"within": [str(top)], "owners": [uid], "host": HostDirectoryFacts(uid).to_json()}
    projects = MappedProjects(answer, [str(top / "sockets"), str(top / "holds/mine")])
    yield projects
    for fd in projects._within.values():
        os.close(fd)


def test_a_project_is_mapped(projects: MappedProjects, top: Path) -> None:
    order = {"source": str(top / "project"), "sandbox": "s"}
    with projects.mapping(order) as allowed:
        assert allowed["shown"] == order["source"]
        assert os.path.samefile(allowed["source"], top / "project")
    projects.forget("s")


@pytest.mark.parametrize("name", ["sockets", "sockets/below", "holds", "holds/mine", "."])
def test_what_the_runtime_can_write_to_is_not_mapped(
    projects: MappedProjects, top: Path, name: str
) -> None:
    """Code inside would own the sockets of the service, or its data."""
    order = {"source": os.path.normpath(top / name), "sandbox": "s"}
    with pytest.raises(Denied, match="belongs to sbx") as raised, projects.mapping(order):
        pass
    assert raised.value.code == "not_granted"
