"""`sbx project`: create, list, show, edit and rm, over the socket of a service."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_calls import PERSON
from command import in_process
from places import short_directory
from service_process import Service, service


@dataclass(frozen=True)
class Host:
    served: Service
    top: Path

    def sbx(self, *words: str | Path, code: int = 0) -> str:
        """Run `sbx project`; its output, or the error of one that fails."""
        ended = in_process("project", *words, "--connect", self.served.socket)
        assert ended.returncode == code, ended.stderr
        return ended.stderr if code else ended.stdout

    def directory(self, name: str) -> Path:
        path = self.top / name
        path.mkdir()
        if os.geteuid() == 0:
            os.chown(path, PERSON, PERSON)
        return path


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with short_directory() as directory:
        projects = directory / "projects"
        projects.mkdir()
        env = {"SBX_PROJECT_DIRS": str(projects)}
        if os.geteuid() == 0:
            env["SBX_PROJECT_OWNERS"] = str(PERSON)
        with service(directory, env=env) as served:
            yield Host(served, projects)


@pytest.mark.needs("namespaces")
def test_a_project_is_created_listed_shown_edited_and_removed(host: Host) -> None:
    report, other = host.directory("report"), host.directory("other")
    project = host.sbx("create", report).strip()
    assert f"{project}" in host.sbx("list")
    (listed,) = json.loads(host.sbx("list", "--json"))["projects"]
    assert (listed["id"], listed["name"], listed["sandbox_enabled"]) == (project, "report", True)
    assert listed["working_directory"] == str(report)
    shown = host.sbx("show", project)
    assert f"directory  {report}\n" in shown
    assert "sandbox    yes\n" in shown
    edited = json.loads(host.sbx("edit", project, "--name", "new", "--directory", other, "--json"))
    assert (edited["name"], edited["working_directory"]) == ("new", str(other))
    assert json.loads(host.sbx("show", project, "--json")) == edited
    assert "asks       about changes of files\n" in host.sbx("edit", project, "--no-ask-commands")
    assert "asks       before each command\n" in host.sbx("edit", project, "--ask-commands")
    (listed,) = json.loads(host.sbx("list", "--json"))["projects"]
    assert (listed["ask_commands"], listed["sandbox_enabled"]) == (True, True)
    assert host.sbx("rm", project).strip() == project
    assert "no projects" not in host.sbx("list", "--json")
    assert json.loads(host.sbx("list", "--json")) == {"projects": []}
    assert (report.is_dir(), other.is_dir()) == (True, True)


@pytest.mark.needs("namespaces")
def test_what_is_not_permitted_gets_a_sentence(host: Host, tmp_path: Path) -> None:
    assert "project_dirs" in host.sbx("create", tmp_path, code=3)
    assert "nosuch" in host.sbx("show", "nosuch", code=2)
    assert "nosuch" in host.sbx("rm", "nosuch", code=2)
    project = host.sbx("create", host.directory("kept")).strip()
    assert "nothing would change" in host.sbx("edit", project, code=2)
    assert "allow_host_mode" in host.sbx("edit", project, "--no-sandbox", code=3)
    assert json.loads(host.sbx("show", project, "--json"))["sandbox_enabled"] is True
    host.sbx("rm", project)
