"""Which file descriptor of a starting jail is which; the only ones it has beside 0, 1 and 2."""

from sbx.guest.inherited_fds import CONTROL_FD, KERNEL_FD, ORDERS_FD

__all__ = [
    "ARGS_FD",
    "CONTROL_FD",
    "DATA_FD",
    "FILTER_FD",
    "INFO_FD",
    "KERNEL_FD",
    "ORDERS_FD",
    "USERNS_FD",
]

ARGS_FD = 5  # bwrap reads its arguments here, and closes it
INFO_FD = 6  # bwrap writes here which process is PID 1, and closes it
FILTER_FD = 7  # bwrap reads the seccomp program here, and closes it
USERNS_FD = 7  # of a zygote, which has no filter: the user namespace that bwrap enters
DATA_FD = 8  # and the following: the files of the synthetic /etc, read and closed by bwrap
