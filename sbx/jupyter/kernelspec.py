"""Write a kernelspec, the `kernel.json` by which Jupyter finds a jailed kernel.

It names both ways to start one: the provisioner, for a Jupyter in the same environment, and the
command, for programs that start processes. jupyter_client writes and finds the files.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from msgspec import Struct
from traitlets import TraitError

from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.jupyter import DEFAULT_POLICY
from sbx.own_python import own_module
from sbx.policy import load, reference

PROVISIONER = "sbx"
# Jupyter also accepts "..", and removes the files of that directory before it writes.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


class KernelspecDir(Struct, frozen=True):
    """The directory of kernelspecs: the user's Jupyter directory, or one below `prefix`."""

    prefix: Path | None = None

    @property
    def directory(self) -> Path:
        if self.prefix is None:
            return Path(KernelSpecManager().user_kernel_dir)
        return self.prefix.absolute() / "share" / "jupyter" / "kernels"


class Installed(Struct, frozen=True):
    """An installed kernelspec of sbx. `standalone`: each kernel is a separate process."""

    name: str
    display_name: str
    policy: str
    standalone: bool
    path: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "display_name": self.display_name,
            "policy": self.policy,
            "standalone": self.standalone,
            "path": str(self.path),
        }


def kernel_json(policy: str, display_name: str, *, standalone: bool = False) -> dict[str, Any]:
    """Return the file's content, for the current Python."""
    metadata: dict[str, Any] = {"debugger": False, "supported_encryption": ["curve"]}
    if not standalone:
        metadata["kernel_provisioner"] = {
            "provisioner_name": PROVISIONER,
            "config": {"policy": policy},
        }
    return {
        "argv": own_module("sbx.jupyter", "--policy", policy, "-f", "{connection_file}"),
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "message",
        "metadata": metadata,
    }


def install(
    name: str | None = None,
    policy: str = DEFAULT_POLICY,
    *,
    display_name: str | None = None,
    place: KernelspecDir | None = None,
    standalone: bool = False,
) -> Installed:
    """Write a kernelspec. Replace one of sbx with the same name.

    A `policy` that is a file is stored as an absolute path. The default name is `sbx`, or `sbx-`
    and the policy's name.

    Raise NotFound `policy_not_found`, PolicyError, BadRequest `invalid_kernel_name`, Conflict
    `kernelspec_exists`, Unavailable `directory_not_writable`.
    """
    place = place or KernelspecDir()
    policy_name, policy = _resolve_policy(policy)
    usual = policy == DEFAULT_POLICY
    name = _checked(name or ("sbx" if usual else f"sbx-{policy_name}"))
    shown = display_name or ("Python (sbx)" if usual else f"Python (sbx {policy_name})")
    path = place.directory / name
    if path.exists() and _ours(path) is None:
        raise Conflict(
            f"there is already a kernel {name!r}, and it does not belong to sbx",
            code="kernelspec_exists",
            hint=f"choose another --name, or remove it: jupyter kernelspec remove {name}",
        )
    _write(name, place, kernel_json(policy, shown, standalone=standalone))
    return Installed(name, shown, policy, standalone, path)


def installed(place: KernelspecDir | None = None) -> list[Installed]:
    """Return every kernelspec of sbx that Jupyter finds, or that lies in that place."""
    return sorted(_find(place), key=lambda spec: (spec.name, spec.path))


def remove(name: str, place: KernelspecDir | None = None) -> Installed:
    """Remove the kernelspec that Jupyter would use, or the one in that place.

    Raise NotFound `kernelspec_not_found`, Conflict `kernelspec_not_ours`, Unavailable
    `directory_not_writable`.
    """
    specs = _specs(place)
    path = specs.get(name.lower())
    if path is None:
        raise NotFound(
            f"the kernel {name!r} does not exist" + (f" in {place.directory}" if place else ""),
            code="kernelspec_not_found",
            hint="sbx kernelspec list shows the kernels of sbx",
        )
    spec = _ours(path)
    if spec is None:
        raise Conflict(
            f"the kernel {name!r} does not belong to sbx",
            code="kernelspec_not_ours",
            hint=f"jupyter kernelspec remove {name} removes any kernel",
        )
    try:
        _manager(place).remove_kernel_spec(name.lower())
    except OSError as error:
        raise _unwritable(path, error) from None
    return spec


def _resolve_policy(policy: str) -> tuple[str, str]:
    """Return the policy's name, and a reference that works in any working directory."""
    from sbx.runtime.settings import Settings

    name_or_path = reference(policy)
    if isinstance(name_or_path, Path):
        name_or_path = name_or_path.absolute()
    loaded = load(name_or_path, search=Settings().policy_dirs)
    return loaded.name, str(name_or_path)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name.lower()):
        raise BadRequest(
            f"{name[:100]!r} is not a valid kernel name",
            code="invalid_kernel_name",
            hint="use letters, digits, '.', '_' and '-', and begin with a letter or digit",
        )
    return name.lower()


def _write(name: str, place: KernelspecDir, content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="sbx-kernelspec-") as source:
        Path(source, "kernel.json").write_text(json.dumps(content, indent=1) + "\n")
        Path(source).chmod(0o755)  # it is copied with its mode, and other users may have to read it
        prefix = str(place.prefix) if place.prefix is not None else None
        try:
            _manager(place).install_kernel_spec(source, name, user=prefix is None, prefix=prefix)
        except OSError as error:
            raise _unwritable(place.directory, error) from None


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path} cannot be changed: {error.strerror or error}",
        code="directory_not_writable",
        hint="name a directory that belongs to you with --prefix DIR, or use --user",
    )


def _manager(place: KernelspecDir | None) -> KernelSpecManager:
    """Return a manager; for one place, it finds no other kernelspecs."""
    options: dict[str, Any] = {"ensure_native_kernel": False}
    if place is not None:
        options["kernel_dirs"] = [str(place.directory)]
    return KernelSpecManager(**options)


def _specs(place: KernelspecDir | None) -> dict[str, Path]:
    return {name: Path(path) for name, path in _manager(place).find_kernel_specs().items()}


def _find(place: KernelspecDir | None) -> Iterator[Installed]:
    for path in _specs(place).values():
        if (spec := _ours(path)) is not None:
            yield spec


def _ours(path: Path) -> Installed | None:
    """Return the kernelspec at this path if sbx wrote it. Other files may hold anything."""
    with suppress(OSError, ValueError, TypeError, RecursionError, TraitError):
        spec = KernelSpec.from_resource_dir(str(path))
        match spec.argv:
            case [_, "-I", "-c", _, _, "sbx.jupyter", "--policy", policy, *_]:
                standalone = "kernel_provisioner" not in spec.metadata
                return Installed(path.name, spec.display_name, policy, standalone, path)
    return None
