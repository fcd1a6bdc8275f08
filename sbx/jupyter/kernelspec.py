"""What `sbx kernelspec install` writes: a `kernel.json` by which Jupyter finds a kernel of ours.

It says both ways to start one: the provisioner, for a Jupyter of this very environment, and the
command, for whoever starts processes. jupyter_client does the writing and the finding.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from traitlets import TraitError

from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.jupyter import DEFAULT_POLICY
from sbx.policy import load, reference

PROVISIONER = "sbx"
# Jupyter takes "..", too, and removes what lies there before it writes.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernelspecs lie: in the user's directory of Jupyter, or below `prefix`."""

    prefix: Path | None = None

    @property
    def directory(self) -> Path:
        if self.prefix is None:
            return Path(KernelSpecManager().user_kernel_dir)
        return self.prefix.absolute() / "share" / "jupyter" / "kernels"


@dataclass(frozen=True, slots=True)
class Installed:
    """A kernelspec of ours that is there. `standalone`: each kernel is a process of its own."""

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
    """The file's content, for the Python that runs this."""
    metadata: dict[str, Any] = {"debugger": False, "supported_encryption": ["curve"]}
    if not standalone:
        metadata["kernel_provisioner"] = {
            "provisioner_name": PROVISIONER,
            "config": {"policy": policy},
        }
    return {
        "argv": [
            *(sys.executable, "-P", "-m", "sbx.jupyter"),
            *("--policy", policy, "-f", "{connection_file}"),
        ],
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
    place: Place | None = None,
    standalone: bool = False,
) -> Installed:
    """Write it; one of ours of that name is replaced. A `policy` that is a file is kept by its
    absolute path. Without a name it is `sbx`, or `sbx-` and the policy's.

    Raises NotFound `policy_not_found`, PolicyError, BadRequest `invalid_kernel_name`, Conflict
    `kernelspec_exists`, Unavailable `directory_not_writable`.
    """
    place = place or Place()
    named, policy = _known(policy)
    usual = policy == DEFAULT_POLICY
    name = _checked(name or ("sbx" if usual else f"sbx-{named}"))
    shown = display_name or ("Python (sbx)" if usual else f"Python (sbx {named})")
    path = place.directory / name
    if path.exists() and _ours(path) is None:
        raise Conflict(
            f"there is a kernel {name!r} already, and it is not one of sbx",
            code="kernelspec_exists",
            hint=f"choose another --name, or remove it: jupyter kernelspec remove {name}",
        )
    _write(name, place, kernel_json(policy, shown, standalone=standalone))
    return Installed(name, shown, policy, standalone, path)


def installed(place: Place | None = None) -> list[Installed]:
    """Every kernelspec of ours that Jupyter finds here, or that lies in that place."""
    return sorted(_found(place), key=lambda one: (one.name, one.path))


def remove(name: str, place: Place | None = None) -> Installed:
    """Remove the one that Jupyter would use, or the one in that place.

    Raises NotFound `kernelspec_not_found`, Conflict `kernelspec_not_ours`, Unavailable
    `directory_not_writable`.
    """
    specs = _specs(place)
    path = specs.get(name.lower())
    if path is None:
        raise NotFound(
            f"there is no kernel {name!r}" + (f" in {place.directory}" if place else ""),
            code="kernelspec_not_found",
            hint="sbx kernelspec list shows which there are",
        )
    found = _ours(path)
    if found is None:
        raise Conflict(
            f"the kernel {name!r} is not one of sbx",
            code="kernelspec_not_ours",
            hint=f"jupyter kernelspec remove {name} removes any",
        )
    try:
        _manager(place).remove_kernel_spec(name.lower())
    except OSError as error:
        raise _unwritable(path, error) from None
    return found


def _known(policy: str) -> tuple[str, str]:
    """The policy's own name, and how a kernel that starts anywhere finds it."""
    from sbx.runtime.settings import Settings

    meant = reference(policy)
    if isinstance(meant, Path):
        meant = meant.absolute()
    loaded = load(meant, search=Settings().policy_dirs)
    return loaded.name, str(meant)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name.lower()):
        raise BadRequest(
            f"{name[:100]!r} is not a kernel's name",
            code="invalid_kernel_name",
            hint="letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return name.lower()


def _write(name: str, place: Place, content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="sbx-kernelspec-") as source:
        Path(source, "kernel.json").write_text(json.dumps(content, indent=1) + "\n")
        Path(source).chmod(0o755)  # it is copied with its mode, and others may have to read it
        prefix = str(place.prefix) if place.prefix is not None else None
        try:
            _manager(place).install_kernel_spec(source, name, user=prefix is None, prefix=prefix)
        except OSError as error:
            raise _unwritable(place.directory, error) from None


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path} cannot be changed: {error.strerror or error}",
        code="directory_not_writable",
        hint="name a directory of your own with --prefix DIR, or take --user",
    )


def _manager(place: Place | None) -> KernelSpecManager:
    """That of one place knows no other."""
    options: dict[str, Any] = {"ensure_native_kernel": False}
    if place is not None:
        options["kernel_dirs"] = [str(place.directory)]
    return KernelSpecManager(**options)


def _specs(place: Place | None) -> dict[str, Path]:
    return {name: Path(path) for name, path in _manager(place).find_kernel_specs().items()}


def _found(place: Place | None) -> Iterator[Installed]:
    for path in _specs(place).values():
        if (found := _ours(path)) is not None:
            yield found


def _ours(path: Path) -> Installed | None:
    """What lies there, if it is one of ours; files of others may hold anything."""
    with suppress(OSError, ValueError, TypeError, RecursionError, TraitError):
        spec = KernelSpec.from_resource_dir(str(path))
        match spec.argv:
            case [_, "-P", "-m", "sbx.jupyter", "--policy", policy, *_]:
                standalone = "kernel_provisioner" not in spec.metadata
                return Installed(path.name, spec.display_name, policy, standalone, path)
    return None
