"""The walls: probe → plan → argv → broker.

    probe       the capabilities of this host, with cause and remedy of each missing layer
    launch_plan    the values of a launch: paths, mounts, walls, LaunchPlan, ZygotePlan
    plan        plan(policy, capabilities, paths) -> LaunchPlan: pure; refuses an impossible plan;
                zygote_plan(…) -> ZygotePlan: what all jails of a policy have in common
    argv        bwrap_argv(plan), zygote_argv(plan): pure; the security boundary as a list of words
    broker/     the one process that acts: namespaces, mounts, cgroups, bwrap, signals; and its
                client in the runtime
    process_state  the facts that Linux reports about the processes of a jail
    host        the plan without walls, and its start: for the policy host alone
    receipt     which walls are in force around one live kernel
    seccomp/    the seccomp programs, prebuilt from one table
    cgroups/    v1, v2 and no cgroups, with one interface

`broker`, `probe`, `cgroups` and all of `sbx.linux` run in a process that is started with
`python -I -S`: they import the standard library only. May import: sbx.policy, sbx.linux,
sbx.forbidden_directories (standard library only, too), sbx.errors, sbx.telemetry.
"""
