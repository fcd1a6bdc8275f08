"""The start of a jail: a new process (cold) or a fork of a zygote, and the rights that each drops.

cold           the first code of a jail on the cold path
zygote         imports IPython once, and forks jails for the broker
fork_child     the order of restrictions of a forked jail
lockdown       the restrictions that a process puts on itself before it runs code of a user
warmup         runs cells that make the first cell of a user fast
memory_layout  keeps the memory that each fork writes to together
"""
