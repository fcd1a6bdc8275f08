"""The synchronous API: the methods of the asynchronous classes, run by one background event loop.

    sandbox     Sandbox: a sandbox of this program, or of a service (`connect`)
    blocking    how a synchronous class names asynchronous methods; the parts of a sandbox
    client      BlockingClient: all of `sbx.client.Client`

Imports anything below it. Nothing but `cli` and `adapters` imports it.
"""
