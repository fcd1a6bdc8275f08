"""Which file descriptor of a starting jail is which; the only ones it has beside 0, 1 and 2."""

CONTROL_FD = 3  # to the runtime, for PID 1: orders and their outcome; lives as long as the jail
KERNEL_FD = 4  # to the runtime, for the kernel: cells and their output; lives as long as the jail
ARGS_FD = 5  # bwrap reads its arguments here, and closes it
INFO_FD = 6  # bwrap writes here which process is PID 1, and closes it
FILTER_FD = 7  # bwrap reads the seccomp program here, and closes it
DATA_FD = 8  # and the following: the files of the synthetic /etc, read and closed by bwrap
