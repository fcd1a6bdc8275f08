"""Egress: the one way out of a sandbox, a proxy of its own that knows where it may lead.

    proxy.py         Egress: a Unix socket, a task for each connection
    connection.py    one connection: its requests, or its tunnel
    forward.py       one request and its reply, written anew
    http_heads.py    heads of messages, of which only one reading is possible
    rules.py         Asked → judge → Verdict, pure; Decision, what is recorded
    addresses.py     which addresses are whose; hosts.py: one spelling of each host
    resolver.py      names to addresses, and from those very addresses to a connection
    client_hello.py  the server that TLS is for
    secrets.py       placeholders inside, values outside
    certificates.py  for hosts whose TLS ends here
    denials.py       how it says no
    limits.py        what the connections of a sandbox share; stream.py: sockets, counted

Everything from inside is hostile, and of what a host outside answers nothing is believed.
TLS is ended here only for hosts with a secret or a rule. Of all other TLS, the host is known and
what is said is not: whoever may reach a host that serves many names may ask it for any of them.

May import: policy, errors.
"""

from sbx.egress.limits import Timeouts
from sbx.egress.proxy import Egress
from sbx.egress.rules import EgressDecision
from sbx.egress.secrets import Secret

__all__ = ["Egress", "EgressDecision", "Secret", "Timeouts"]
