"""The replies of the proxy to requests that it refuses.

The reason is in three places, because programs show different ones: in the reason phrase, the only
part that most clients print for a failed CONNECT; in the body; and with the rule, as JSON, in the
header `Sbx-Egress`.
"""

import json

from sbx.egress.rules import ProxyRequest, RuleResult
from sbx.protocol.grants import Access

HEADER = "Sbx-Egress"
_STATUS = {
    "http": 400,
    "http.host": 400,
    "http.head_time": 408,
    "http.head_size": 431,
    "network.connections_max": 503,
    "network.time_max": 504,
    "outside": 502,
}
_FORBIDDEN = 403


class EgressDenied(Exception):
    """The rule `rule` of the policy refuses, or the host failed (`outside`). The client gets the
    `reason`. A grant of `access` would allow the request."""

    def __init__(self, rule: str, reason: str, access: Access | None = None) -> None:
        super().__init__(reason)
        self.verdict = RuleResult(False, rule, reason)
        self.access = access


class HostGone(Exception):
    """The client has left, or does not read the reply."""


def reply(verdict: RuleResult, request: ProxyRequest | None) -> bytes:
    """Return the HTTP reply to a refused request. The connection ends after it."""
    denial = {"rule": verdict.rule, "reason": verdict.reason}
    if request is not None:
        denial |= {"method": request.method, "host": request.host, "port": str(request.port)}
    sentence = f"sbx refused by {verdict.rule}: {verdict.reason}"
    phrase = "".join(letter if " " <= letter <= "~" else "?" for letter in sentence)
    body = b"" if request is not None and request.method == "HEAD" else f"{sentence}\n".encode()
    head = (
        f"HTTP/1.1 {_STATUS.get(verdict.rule, _FORBIDDEN)} {phrase}\r\n"
        f"{HEADER}: {json.dumps(denial)}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
