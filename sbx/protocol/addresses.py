"""The default address of a service, the same for the service and its clients."""

import os
from pathlib import Path


def default_socket() -> Path:
    """Return `/run/sbx/sbx.sock` for root, else `sbx/sbx.sock` in the user's runtime directory.

    Without a runtime directory (no login session, as in a container), use the home directory. Never
    use a path below /tmp, where another user could create the name first.
    """
    if os.geteuid() == 0:
        return Path("/run/sbx/sbx.sock")
    if (runtime_dir := os.environ.get("XDG_RUNTIME_DIR")) and Path(runtime_dir).is_absolute():
        return Path(runtime_dir) / "sbx" / "sbx.sock"
    session = Path(f"/run/user/{os.geteuid()}")
    top = session if session.is_dir() else Path.home() / ".local" / "state"
    return top / "sbx" / "sbx.sock"
