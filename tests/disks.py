"""File systems of other kinds, each in an image that root mounts for one module of tests."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAKE = {
    "btrfs": ("mkfs.btrfs", "-q"),
    "ext4": ("mkfs.ext4", "-q", "-O", "encrypt"),
    "casefold": ("mkfs.ext4", "-q", "-O", "casefold", "-E", "encoding_flags=strict"),
}
_KIND = {"casefold": "ext4"}
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_SIZE = 256 << 20
_PATIENCE_S = 30.0


def lacking(name: str) -> str | None:
    """Return why this host has no file system of this kind, or None if it has it."""
    if shutil.which(MAKE[name][0], path=_PATH) is None:
        return f"there is no {MAKE[name][0]}: scripts/test installs it"
    kind = _KIND.get(name, name)
    if (modprobe := shutil.which("modprobe", path=_PATH)) is not None:
        subprocess.run([modprobe, kind], capture_output=True, check=False)
    if kind not in Path("/proc/filesystems").read_text().split():
        return f"this Linux has no {kind}"
    if name == "casefold" and not Path("/sys/fs/ext4/features/casefold").exists():
        return "this Linux has no CONFIG_UNICODE"
    return None


@contextmanager
def mounted(name: str, top: Path) -> Iterator[Path]:
    """Mount a new file system of this kind below the directory `top`, for everyone to write."""
    own = Path(tempfile.mkdtemp(dir=top))
    own.chmod(0o755)
    image, place = own / "image", own / name
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(_SIZE)
    subprocess.run([*MAKE[name], image], check=True, capture_output=True, env={"PATH": _PATH})
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        place.chmod(0o1777)
        yield place
    finally:
        _unmount(place)


def _unmount(place: Path) -> None:
    """Unmount, once the broker of a runtime that was closed has ended: it may end later."""
    deadline = time.monotonic() + _PATIENCE_S
    while subprocess.run(["umount", place], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{place} is in use"
        time.sleep(0.05)
