"""The addresses of a service, the same for the service and its clients."""

import os
import re
from ipaddress import ip_address
from pathlib import Path

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^/:]+):[0-9]{1,5}")


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


def is_host_port(text: str) -> bool:
    """Return whether this is HOST:PORT and not the path of a socket."""
    return _HOST_PORT.fullmatch(text) is not None and not Path(text).exists()


def is_local(text: str) -> bool:
    """Return whether this HOST:PORT is an address of this machine, whose plain HTTP no other
    machine can read."""
    host = text.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
