"""Kernels that wait for work, and the choice of the fastest way to start one.

factory     starts a kernel: from the pool, by a fork of a zygote, or cold
warm_pool   the idle kernels of one policy
zygotes     the zygote of a policy, and its replacement
scaling     how many idle kernels to keep
"""
