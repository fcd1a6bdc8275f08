"""Programs of Debian packages that scripts/test unpacks next to its caches, without installing."""

import os
import shutil
from pathlib import Path

_DIRECTORIES = {
    "prometheus": "prometheus/usr/bin",
    "promtool": "prometheus/usr/bin",
    "go": "go/usr/lib/go-*/bin",
}


def cache() -> Path:
    """Return the directory in which scripts/test unpacks what the tests use."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbx-checks"


def debian_tool(name: str) -> str | None:
    """Return the path of a program, or None if this host does not have it."""
    unpacked = sorted(map(str, cache().glob(_DIRECTORIES[name])))
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(unpacked))
