"""The broker: one process that starts jails, and keeps the rights that this needs.

    client                   the runtime's side: plans become orders, and orders become jails
    spawned, early_orders    its process, and the orders that it gets before the runtime is imported
    connection, process      its socket; a broker for a service that drops root
    jail                     a jail and a zygote as the runtime sees them
    server, loop             the broker's side: the orders, and its event loop
    sandboxes, jails         cgroups and uids of sandboxes; jails from their start to their end
    spawn                    starts bubblewrap
    zygotes                  starts zygotes and forks jails from them
    live_orders, live_mounts    mount a directory into a live jail, or connect to a port, by a child
    bind_staging             the private directory from which bubblewrap binds files
    allowlist                the only launches that a broker accepts after root's rights are dropped
    allowlist_from_policies  derives that list from the policies of a service
    pulse, watchdog          notice a broker that does not answer, and end it

The client imports no part of the server. Nothing here reads a policy but allowlist_from_policies.
"""
