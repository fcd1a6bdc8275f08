"""The sandboxes of one program: they end with it.

    settings      the settings of an operator
    runtime       Runtime: one broker, one data directory, the sandboxes of one process
    resources     what all sandboxes of a runtime share; data_dir locks their directory
    shared        the runtime that all synchronous Sandbox objects of a process share
    sandbox       AsyncSandbox: one policy, its conversations and its disk limit
    conversation  one workspace and the kernels over it
    prewarm       sandboxes that are started before a caller needs one
    live_mounts   directories of the host that are mounted into a live sandbox
    honeytokens   fake credentials: the use of one freezes the sandbox
    run/          kernels by name (contexts), and one run: checks, events, limits, result
    files/        the files of a conversation, in worker threads; disk limits
    snapshots/    dry runs, checkpoints, working copies
    processes/    background commands, terminals, scripts

May import: kernels, egress, environments, store, isolation, workspace and lower packages.
"""
