"""Many users on one runtime: sandboxes that survive a restart, sessions, keys and limits.

    service       the parts of one service, opened and closed in order
    sandboxes     the sandboxes; leases finds and lends them, events is their history
    sandbox       one sandbox: record is its stored side, hooks act before and after kernels
    sessions      a user's session with an agent, and its sandbox
    runs          runs of all sandboxes: queue, events, results
    workspaces    directories that outlive their sandbox
    auth          tokens and keys; caller: the rights of a caller
    idempotency   a request that is sent twice is done once
    lifecycle     the next state of a sandbox: pure decisions; reaper acts on them
    garbage, reserve, maintenance/   the data directory: remains, space, backups
    projects/     sandboxes over a directory of the host

Imports `runtime`, `agent` and lower packages.
"""
