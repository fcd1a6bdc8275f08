"""The walls: probe → plan → argv → launch.

    probe.py     what this host can do, layer by layer, with cause and remedy for what it cannot
    plan.py      plan(policy, capabilities, paths) -> LaunchPlan: pure; refuses what cannot be had
    argv.py      bwrap_argv(plan) -> list[str]: pure, the security boundary as one list of words
    broker.py    the one process that acts: namespaces, mounts, cgroups, bwrap, signals
    launch.py    the runtime's end of the broker's socket: Broker, Jail
    receipt.py   which walls are truly in force around one live kernel
    filters/     the seccomp programs, prebuilt from one table
    cgroups/     v1, v2 and none behind one contract

`broker`, `probe`, `cgroups` and all of `sbx.linux` run in a process started with `python -I -S`:
they import the standard library only. May import: sbx.policy, sbx.linux, sbx.errors, sbx.telemetry.
"""
