"""The broker: one process that starts jails, and keeps the rights that this needs.

    client                   the runtime's side: orders, replies, the end of a jail
    server                   the broker's loop
    spawn                    starts bubblewrap
    zygotes                  starts zygotes and forks jails from them
    live_mounts              mounts a directory into a jail that runs
    bind_staging             the private directory from which bubblewrap binds files
    allowlist                the only launches that a broker accepts after root's rights are dropped
    allowlist_from_policies  derives that list from the policies of a service
    pulse, watchdog          notice a broker that does not answer, and end it

The client imports no part of the server. Nothing here reads a policy but allowlist_from_policies.
"""
