"""Live kernels, seen from the host: frames, channels, and the kernel behind them.

    frames.py          the typed frames that may come from inside; any other ends the kernel that
                       sent it
    channel.py         one socket to the inside: frames both ways, bounded, with back-pressure
    budget.py          one budget of frames for all channels of one owner
    guest.py           the life of one guest: its jail, its commands, its end
    command.py         a command that runs in a jail next to the kernel
    kernel.py          one live kernel: its start, its cells and other requests
    memory_watcher.py  replaces cgroup limits on a host without them

    pool/factory.py    starts a kernel for an order: pool → fork → cold
    pool/pools.py      keeps kernels ready for one runtime
    pool/warm_pool.py  the kernels of one policy that are kept ready
    pool/zygotes.py    the zygotes of one policy, one after the other
    pool/scaling.py    pure: how many kernels to keep, and which zygotes to replace

May import: `sbx.isolation`, `sbx.policy`, `sbx.linux`, `sbx.protocol`, `sbx.telemetry`,
`sbx.errors`.
"""
