"""How a jail starts: a process of its own (cold) or a fork of a zygote, and what each gives up.

cold           the first code of a jail on the cold path
zygote         imports IPython once, and forks jails for the broker
fork_child     the order of restrictions of a forked jail
lockdown       the restrictions that a process puts on itself before it runs code of a user
warmup         runs cells that make the first cell of a user fast
memory_layout  keeps the memory that each fork writes to together
"""
