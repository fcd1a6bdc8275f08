"""All of ours that runs inside the walls; mounted read-only into every jail.

    cold: boot ─ supervisor (PID 1) ─┬─ fork, seal ─ kernel.serve() ─ the user's cells
                                     └─ fork, seal ─ shell commands

    fast: zygote ─┬─ fork, seal ─ supervisor (PID 1) ─ fork, seal ─ shell commands
                  └─ fork, seal ─ kernel.start() ─ the user's cells

The supervisor's side reads orders from the control socket and starts, signals and reaps. The
kernel's side is one IPython, spoken to over the kernel socket:

    boot          the first code in a jail of the cold path, and its order
    zygote        has imported IPython, and forks jails when the broker says so
    forked        the order of a jail that a zygote forked
    supervisor    PID 1 of a jail: reaps, interrupts, runs shell commands
    seal          what a process does to itself before any code of the user's
    path_guard    the process that performs every change of a host directory, by
                  guarded_calls (the calls), guarded_paths (resolving), path_rules (the decision),
                  quarantine_items (new names that a program of the host would obey) and hard_links
                  (further names of a file)
    shares        bounds on what Linux counts per user: inotify, terminals
    frames        the words on both sockets: length, then JSON
    kernel        what a kernel is told at its start; `serve` turns a sealed process into one
    dispatch      the loop: frames in, cells run, replies out; interrupts, questions to the user
    shell         IPython, told to publish frames and to keep inside limits
    warming       cells that a shell runs before anybody's, to be quick with the first
    locality      what every fork writes to, kept together in memory
    output        stdout, stderr and the file descriptors 1 and 2, in order, as frames
    commands      `!cmd`
    egress        copies what is for the proxy from the loopback to a Unix socket
    comms         the `comm` package over frames
    tmp_files     what a tool of an agent does below /tmp; sent inside as text
    import_rules  what a policy lets a cell import: a courtesy to the user, never a wall

Imports: the standard library and `sbx.linux` only; in the kernel's process also IPython and its
kin, from the policy's interpreter. On the cold path that comes after the seal; a zygote, in whose
view there is no file of a user, does it once for all its forks. `kernel`, `frames` and
`import_rules` import none of it, so that the supervisor may hold them. Whatever leaves here is
hostile input to the other side.
"""
