"""Transparent huge pages: madvise(2), Documentation/admin-guide/mm/transhuge."""

from sbx.linux import libc

SIZE = 2 << 20  # of both our architectures, with pages of 4 KiB
_COLLAPSE = 25


def collapse(address: int) -> bool:
    """Make one huge page of the `SIZE` bytes at `address`, a multiple of it; whether it was made.

    It copies what is there, now, whatever the settings of this host say of huge pages. Not before
    linux 6.1, not where nothing lies, and not without free memory in one piece.
    """
    try:
        libc.call("madvise", address, SIZE, _COLLAPSE)
    except OSError:
        return False
    return True
