"""Live kernels, seen from the host: frames, channels, and the kernel behind them.

    frames.py   what may come over the wall, typed; everything else ends the kernel that sent it
    channel.py  one socket to the inside: frames both ways, bounded, with back-pressure
    kernel.py   one live kernel: cells, commands, interrupt, end
    watcher.py  what stands in for cgroup limits where a host gives none

    start.py    from an order to a live kernel: pool → fork → cold; keeps what makes it fast
    pool.py     the kernels of one policy that wait for somebody to need one
    zygotes.py  the zygotes of one policy, one after the other
    upkeep.py   how many to keep, what has served its time: pure

May import: sbx.isolation, sbx.policy, sbx.linux, sbx.protocol, sbx.telemetry, sbx.errors.
"""
