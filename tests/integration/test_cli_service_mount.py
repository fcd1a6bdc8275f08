"""`sbx mount`, `unmount` and `unfreeze` against a service as it is started by hand."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import Service, open_directory, service

pytestmark = pytest.mark.needs("namespaces")


class Place(NamedTuple):
    served: Service
    srv: Path


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with open_directory() as top:
        srv = top / "srv"
        for name in ("wheels", "corpus"):
            (srv / name).mkdir(parents=True)
            (srv / name / "a.txt").write_text(f"of {name}")
        policies = top / "policies"
        policies.mkdir()
        (policies / "wired.toml").write_text(
            'schema = 1\nextends = "default"\nshared = true\n[honeytoken]\nenabled = true\n'
        )
        with service("--mount-dirs", srv, "--policies", policies, top=top) as served:
            yield Place(served, srv)


@pytest.fixture
def box(place: Place) -> Iterator[str]:
    made = place.served.quick("create", "--policy", "wired")
    assert made.returncode == 0, made.stderr
    yield made.stdout.strip()
    place.served.quick("rm", made.stdout.strip())


def test_a_directory_is_mounted_listed_and_unmounted(
    place: Place, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, srv = place
    assert "nothing is mounted" in served.quick("mount", box).stderr
    monkeypatch.chdir(srv)
    made = served.quick("mount", box, "wheels")
    assert (made.returncode, made.stdout, made.stderr) == (0, "/mnt/wheels\n", "")
    seen = served.quick("exec", box, "-c", "print(open('/mnt/wheels/a.txt').read())")
    assert seen.stdout == "of wheels\n"
    second = json.loads(served.quick("mount", box, srv / "corpus", "/mnt/c", "--json").stdout)
    assert second == {"source": str(srv / "corpus"), "target": "/mnt/c", "read_only": True}
    listed = served.quick("mount", box).stdout.splitlines()
    assert listed[-2].split() == ["/mnt/c", str(srv / "corpus"), "read-only"]
    assert len(json.loads(served.quick("mount", box, "--json").stdout)["mounts"]) == 2
    assert "/mnt/wheels" in served.quick("inspect", box).stdout
    gone = served.quick("unmount", box, "/mnt/wheels")
    assert (gone.returncode, gone.stdout) == (0, "/mnt/wheels\n")
    again = served.quick("unmount", box, "/mnt/wheels")
    assert (again.returncode, again.stdout) == (2, "")
    assert "nothing is mounted" in again.stderr
    assert json.loads(served.quick("unmount", box, "/mnt/c", "--json").stdout) == {
        "unmounted": "/mnt/c"
    }


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["/usr"], 3, "mount_dirs"),
        (["none"], 2, "No such file"),
        (["wheels", "/opt/x"], 2, "/mnt/NAME"),
        (["wheels", "/mnt/x", "--write"], 2, "/workspace/shared/NAME"),
    ],
)
def test_what_cannot_be_is_said(
    place: Place, box: str, words: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.srv)
    ended = place.served.quick("mount", box, *words)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert said in ended.stderr
    assert ended.stderr.startswith("error: ")
    error = json.loads(place.served.quick("mount", box, *words, "--json").stdout)["error"]
    assert error["code"] in ("not_granted", "invalid_source", "invalid_target")


@pytest.mark.needs("root")
def test_a_service_that_was_root_mounts_nothing_to_be_written_to(place: Place, box: str) -> None:
    target = "/workspace/shared/c"
    os.chown(place.srv / "corpus", 65_432, 65_432)
    ended = place.served.quick("mount", box, place.srv / "corpus", target, "--write")
    assert ended.returncode == 3
    assert "read-only" in ended.stderr
    assert place.served.quick("exec", box, "-c", "print(1)").stdout == "1\n"


def test_a_frozen_sandbox_is_lifted(place: Place, box: str) -> None:
    served = place.served
    assert "was not frozen" in served.quick("unfreeze", box).stderr
    used = served.quick("exec", box, "-c", "import os; print(os.environ['GITHUB_TOKEN'])")
    assert used.returncode != 0
    frozen = served.quick("exec", box, "-c", "1")
    assert frozen.returncode != 0
    assert "sbx unfreeze" in frozen.stderr
    assert "GITHUB_TOKEN" in served.quick("inspect", box).stdout
    unfrozen = served.quick("unfreeze", box)
    assert (unfrozen.returncode, unfrozen.stdout) == (0, f"{box}\n")
    assert served.quick("exec", box, "-c", "print(1 + 1)").stdout == "2\n"
    assert json.loads(served.quick("unfreeze", box, "--json").stdout) == {"unfrozen": False}
    assert served.quick("unfreeze", "sandbox-000000000000").returncode == 2
