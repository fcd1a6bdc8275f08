"""The walls: probe → plan → argv → launch.

    probe.py     what this host can do, layer by layer, with cause and remedy for what it cannot
    plan.py      plan(policy, capabilities, paths) -> LaunchPlan: pure; refuses what cannot be had;
                 zygote_plan(…) -> ZygotePlan: what all jails of a policy have in common
    argv.py      bwrap_argv(plan), zygote_argv(plan): pure, the security boundary as lists of words
    broker.py    the one process that acts: namespaces, mounts, cgroups, bwrap, signals
    confinement.py  … what a service that dropped its rights may order of it, and nothing else
    mapped.py    … which directories of users it maps, by the rule of sbx.forbidden_directories
    grants.py    … made of the plans of its policies, before it drops them
    spawn.py     … how it starts a bwrap; slots.py numbers the descriptors
    staging.py   … where it puts what a jail's uid could not walk to
    zygotes.py   … how it starts zygotes, and lets what they fork into a sandbox
    attaching.py … how it mounts one more directory into a jail that lives
    launch.py    the runtime's end of the broker's socket: Broker, Zygote, Jail
    facts.py     what linux says of a jail's processes
    receipt.py   which walls are truly in force around one live kernel
    filters/     the seccomp programs, prebuilt from one table
    cgroups/     v1, v2 and none behind one contract

`broker`, `confinement`, `probe`, `cgroups` and all of `sbx.linux` run in a process started with
`python -I -S`: they import the standard library only. May import: sbx.policy, sbx.linux,
sbx.forbidden_directories (standard library only, too), sbx.errors, sbx.telemetry.
"""
