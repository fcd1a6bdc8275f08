"""The code of sbx that runs inside the walls; mounted read-only into every jail.

    cold: boot ─ supervisor (PID 1) ─┬─ fork, seal ─ kernel.serve() ─ the user's cells
                                     └─ fork, seal ─ shell commands

    fast: zygote ─┬─ fork, seal ─ supervisor (PID 1) ─ fork, seal ─ shell commands
                  └─ fork, seal ─ kernel.start() ─ the user's cells

The supervisor's side reads orders from the control socket and starts, signals and reaps processes.
The kernel's side is one IPython, which the host reaches over the kernel socket:

    boot          the first code in a jail of the cold path, and its order
    zygote        has imported IPython, and forks jails on the broker's orders
    forked        the order of a jail that a zygote forked
    supervisor    PID 1 of a jail: reaps, interrupts, runs shell commands
    terminal      the pty of a command
    script_files  the files of a script, below /tmp
    seal          the restrictions that a process puts on itself before any user code
    path_guard    the process that performs every change of a host directory, by
                  guarded_calls (the calls), guarded_paths (resolving), path_rules (the decision),
                  quarantine_items (new names that a program of the host would obey) and hard_links
                  (further names of a file)
    shares        limits on counters that Linux keeps per user: inotify, terminals
    frames        the frames on both sockets: length, then JSON
    kernel        the start configuration of a kernel; `serve` turns a sealed process into one
    dispatch      the loop: frames in, cells run, replies out; interrupts, questions to the user
    shell         IPython that publishes frames and stays inside limits
    refusals      explains errors by which Linux enforces the policy
    warming       cells that a shell runs before the user's, to make the first one fast
    locality      keeps the memory that every fork writes to together
    output        stdout, stderr and the file descriptors 1 and 2, in order, as frames
    commands      `!cmd`
    egress        copies proxy connections from the loopback to a Unix socket
    comms         the `comm` package over frames
    tmp_files     file operations of an agent's tool below /tmp; sent inside as text
    archive       packs and unpacks archives
    import_rules  the imports that a policy allows in a cell: help for the user, not a wall

Imports: the standard library and `sbx.linux` only. The kernel's process also imports IPython and
its dependencies, from the policy's interpreter. On the cold path it does so after the seal. A
zygote, whose view has no user files, does it once for all its forks. `kernel`, `frames` and
`import_rules` import none of that, so the supervisor may import them. All data that leaves here is
hostile input to the other side.
"""
