"""Packages that a person granted while the jail lives: sbx mounts a directory for each of them."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TOP = "/mnt"
PREFIX = ".package-"


def directories() -> list[str]:
    """Return the directories of the packages that are granted now."""
    try:
        names = os.listdir(TOP)
    except OSError:
        return []
    return sorted(f"{TOP}/{name}" for name in names if name.startswith(PREFIX))


def variables() -> dict[str, str]:
    """Return the variables by which a Python that starts now finds them."""
    granted = directories()
    return {"PYTHONPATH": ":".join(granted)} if granted else {}


class GrantedPackages:
    """A finder for sys.meta_path. It is called last, so that a package never hides a module."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = [] if path is not None else [top for top in directories() if top not in sys.path]
        if not new:
            return None
        sys.path.extend(new)  # also for importlib.metadata
        return PathFinder.find_spec(name, new, target)
