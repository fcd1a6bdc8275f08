"""The synchronous API: the methods of the asynchronous classes, run by one background event loop.

    sandbox     Sandbox: a sandbox of this program, or of a service (`connect`)
    blocking    the parts of a sandbox, without asyncio
    methods     the binding of synchronous classes to asynchronous ones
    client      BlockingClient: all of `sbx.client.Client`

May import everything below it. Only `cli` and `adapters` import it.
"""
