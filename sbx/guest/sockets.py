"""Which file descriptors of a starting jail are its two sockets to the runtime."""

CONTROL_FD = 3  # for PID 1: orders and their outcome; lives as long as the jail
KERNEL_FD = 4  # for the kernel: cells and their output; lives as long as the jail
