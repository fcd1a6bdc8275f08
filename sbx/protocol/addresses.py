"""Where a service listens when nobody says where: the same for the service and its clients."""

import os
from pathlib import Path


def default_socket() -> Path:
    """`/run/sbx/sbx.sock` for root, else `sbx/sbx.sock` in the user's runtime directory.

    Without one (no login session, as in a container), in the home: never below /tmp, where
    somebody else could be first to take the name.
    """
    if os.geteuid() == 0:
        return Path("/run/sbx/sbx.sock")
    if (given := os.environ.get("XDG_RUNTIME_DIR")) and Path(given).is_absolute():
        return Path(given) / "sbx" / "sbx.sock"
    session = Path(f"/run/user/{os.geteuid()}")
    top = session if session.is_dir() else Path.home() / ".local" / "state"
    return top / "sbx" / "sbx.sock"
