"""Wheels without a network: tiny ones of our own, and those of the kernel as they are installed.

A wheel is a zip archive, so what is installed can be made into one again. What the kernel inside
never imports (sockets of ZMQ, a debugger) is left empty, which makes an environment three times as
quick to make.
"""

import base64
import hashlib
import importlib.metadata
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_LEFT_EMPTY = {
    *("debugpy", "jupyter-client", "jupyter-core", "psutil", "pyzmq", "tornado"),
    "jedi",  # 15 MB, and IPython does without
}


def wheel(
    directory: Path, name: str, version: str, files: Mapping[str, str], *, needs: str = ""
) -> Path:
    """A pure wheel with these files."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {needs}\n" if needs else ""
    data = {path: text.encode() for path, text in files.items()}
    return _pack(directory, name, version, "py3-none-any", metadata, data)


def wheels_of_the_kernel(directory: Path) -> None:
    """ipykernel and all it needs, each of the version that is installed here."""
    waiting, seen = ["ipykernel"], set[str]()
    while waiting:
        name = _canonical(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        if name in _LEFT_EMPTY:
            wheel(directory, name, found.version, {f"{name.replace('-', '_')}_not.py": ""})
            continue
        _repack(directory, found)
        waiting += _needs(found)


def use_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find the wheels of this directory, and no others."""
    sources = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}
    for name, value in {"PIP_CONFIG_FILE": os.devnull, **sources}.items():
        monkeypatch.setenv(name, value)


def _needs(found: importlib.metadata.Distribution) -> Iterator[str]:
    for line in found.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _repack(directory: Path, found: importlib.metadata.Distribution) -> None:
    tags = re.findall(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.MULTILINE)
    parts = zip(*(one.split("-") for one in tags), strict=True)
    tag = "-".join(".".join(sorted(set(part))) for part in parts)  # as PEP 425 compresses them
    data = {}
    for path in found.files or ():
        text = str(path)
        if ".dist-info" in text or text.startswith("..") or text.endswith(".pyc"):
            continue
        if "/tests/" not in text:
            data[text] = Path(str(found.locate_file(path))).read_bytes()
    name = str(found.metadata["Name"])
    _pack(directory, name, found.version, tag, found.read_text("METADATA") or "", data)


def _pack(
    directory: Path, name: str, version: str, tag: str, metadata: str, data: Mapping[str, bytes]
) -> Path:
    name = re.sub(r"[-_.]+", "_", name)
    info = f"{name}-{version}.dist-info"
    text = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
    all_of_it = {**data, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": text.encode()}
    lines = [
        f"{path},sha256={_digest(content)},{len(content)}" for path, content in all_of_it.items()
    ]
    record = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    made = directory / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path, content in all_of_it.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", record)
    return made


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
