"""What a kernelspec of ours says, and which files of others are taken for one."""

import json
from pathlib import Path
from typing import Any

import pytest

from sbx.errors import BadRequest, Conflict, NotFound, SbxError
from sbx.jupyter.kernelspec import Installed, KernelspecDir, install, installed, kernel_json, remove
from sbx.own_python import own_module


@pytest.fixture
def place(tmp_path: Path) -> KernelspecDir:
    return KernelspecDir(tmp_path)


def written(place: KernelspecDir, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.directory / name / "kernel.json").read_text())
    return found


def test_it_names_the_command_and_the_provisioner() -> None:
    assert kernel_json("strict", "Strict") == {
        "argv": [
            *own_module("sbx.jupyter"),
            *("--policy", "strict", "-f", "{connection_file}"),
        ],
        "display_name": "Strict",
        "language": "python",
        "interrupt_mode": "message",
        "metadata": {
            "debugger": False,
            "supported_encryption": ["curve"],
            "kernel_provisioner": {"provisioner_name": "sbx", "config": {"policy": "strict"}},
        },
    }


def test_a_standalone_one_names_no_provisioner() -> None:
    """A Jupyter that lacks the provisioner would hide it."""
    whole, alone = kernel_json("strict", "x"), kernel_json("strict", "x", standalone=True)
    del whole["metadata"]["kernel_provisioner"]
    assert alone == whole


def test_installed_ones_are_found_replaced_and_removed(place: KernelspecDir) -> None:
    install(place=place)
    again = install(place=place, standalone=True)
    strict = install(policy="strict", display_name="Locked", place=place)
    assert again == Installed("sbx", "Python (sbx)", "notebook", True, place.directory / "sbx")
    assert (strict.name, strict.display_name) == ("sbx-strict", "Locked")
    assert installed(place) == [again, strict]
    assert remove("sbx", place) == again
    assert installed(place) == [strict]


def test_a_policy_file_is_kept_by_its_absolute_path(
    place: KernelspecDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.toml").write_text('schema = 1\nextends = "strict"\n')
    monkeypatch.chdir(tmp_path)
    assert install(policy="./lab.toml", place=place).name == "sbx-lab"
    config = written(place, "sbx-lab")["metadata"]["kernel_provisioner"]["config"]
    assert config == {"policy": str(tmp_path / "lab.toml")}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "-f", "", "ä", "a b", "x" * 101, "a\n"])
def test_a_name_that_jupyter_or_a_path_would_take_otherwise_is_refused(
    place: KernelspecDir, name: str
) -> None:
    """Jupyter takes `..` for a name, and removes what is there before it writes."""
    with pytest.raises(BadRequest) as raised:
        install(name, place=place) if name else install("\0", place=place)
    assert raised.value.code == "invalid_kernel_name"
    assert not place.directory.exists()


def test_a_policy_that_is_not_there_leaves_nothing(place: KernelspecDir) -> None:
    with pytest.raises(NotFound, match="did you mean notebook"):
        install(policy="notbook", place=place)
    assert installed(place) == []


FOREIGN: list[Any] = [
    {"argv": ["python", "-m", "ipykernel", "-f", "{connection_file}"], "display_name": "x"},
    {"argv": "python", "display_name": "x"},
    {"argv": [], "display_name": 3},
    {"argv": own_module("sbx.jupyter"), "display_name": "x"},
    {"argv": own_module("sbx.jupyter", "--policy"), "display_name": "x"},
    [],
    None,
]


@pytest.mark.parametrize("content", FOREIGN, ids=repr)
def test_a_kernel_of_others_is_neither_listed_nor_touched(
    place: KernelspecDir, content: Any
) -> None:
    path = place.directory / "sbx" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content) if content is not None else "{" * 100_000)
    before = path.read_bytes()
    assert installed(place) == []
    with pytest.raises(Conflict):
        install(place=place)
    with pytest.raises(Conflict):
        remove("sbx", place)
    assert path.read_bytes() == before


def test_one_that_is_not_there_cannot_be_removed(place: KernelspecDir) -> None:
    with pytest.raises(SbxError) as raised:
        remove("sbx", place)
    assert raised.value.code == "kernelspec_not_found"
