"""Egress: a proxy for each sandbox, which is its only way out and allows only permitted hosts.

    proxy.py         Egress: its Unix sockets, a task for each connection
    connection.py    one connection: its requests, or its tunnel and the server that TLS names
    upstream.py      a connection to a host outside
    forward.py       one request and its reply, both written again
    http_heads.py    heads of messages, of which only one reading is possible
    rules.py         the decision about a request, pure; the record of it
    addresses.py     which addresses are whose; hosts.py: one spelling of each host
    resolver.py      names to addresses, and from those very addresses to a connection
    secrets.py       placeholders inside, values outside
    certificates.py  for hosts whose TLS ends here
    denials.py       the replies to denied requests
    limits.py        what the connections of a sandbox share; stream.py: sockets, counted

Treat both the sandbox and the remote server as hostile. TLS ends here only for hosts with a secret
or a rule. Of all other TLS connections the proxy sees the host and not the content: a sandbox that
may reach a host that serves many names may request any of them.

May import: policy, protocol, errors.
"""

from sbx.egress.limits import Timeouts
from sbx.egress.proxy import Egress
from sbx.egress.rules import EgressDecision
from sbx.egress.secrets import Secret

__all__ = ["Egress", "EgressDecision", "Secret", "Timeouts"]
