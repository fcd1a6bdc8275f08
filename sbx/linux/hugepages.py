"""Transparent huge pages: madvise(2), Documentation/admin-guide/mm/transhuge."""

from sbx.linux import libc

SIZE = 2 << 20  # on both supported architectures, with pages of 4 KiB
_COLLAPSE = 25


def collapse(address: int) -> bool:
    """Copy the `SIZE` bytes at `address` into one huge page; return whether this succeeded.

    `address` must be a multiple of `SIZE`. The copy is made immediately, whatever the huge page
    settings of this host are. It fails before Linux 6.1, if the range contains no pages, and if no
    contiguous free memory of this size exists.
    """
    try:
        libc.call("madvise", address, SIZE, _COLLAPSE)
    except OSError:
        return False
    return True
