"""The synchronous API: the methods of the asynchronous classes, run by one background event loop.

    sandbox     Sandbox: a sandbox of this program, or of a service (`connect`)
    blocking    the methods that both kinds share; contexts, commands, dry_runs, terminals are parts
    client      BlockingClient: all of `sbx.client.Client`; client_agents is a part

Imports anything below it. Nothing but `cli` and `adapters` imports it.
"""
