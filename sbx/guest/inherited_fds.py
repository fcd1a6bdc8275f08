"""The file descriptors by which a process inside reaches the outside."""

CONTROL_FD = 3  # for PID 1: orders and their results; lives as long as the jail
KERNEL_FD = 4  # for the kernel: cells and their output; lives as long as the jail
ORDERS_FD = 3  # for a zygote: what to import, and orders to fork
