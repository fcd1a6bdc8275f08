"""The words on the wire: how a run is told, live as events and at its end as one result.

Shared by the embedded API, the HTTP server and its client, so that all three say the same. Imports
the standard library only.
"""
