"""How the proxy says no.

The sentence stands in three places, since programs show different ones: in the reason phrase, which
is all that most clients tell of a CONNECT that failed; in the body; and with the rule, as JSON, in
the header `Sbx-Egress`.
"""

import json

from sbx.egress.rules import ProxyRequest, RuleResult

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
    """`rule` says no, or the host outside does (`outside`); `reason` is for whoever asked."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = RuleResult(False, rule, reason)


class HostGone(Exception):
    """Whoever asked has left, or does not take the answer."""


def reply(verdict: RuleResult, asked: ProxyRequest | None) -> bytes:
    """The whole reply of HTTP to a request that is refused, after which the connection ends."""
    said = {"rule": verdict.rule, "reason": verdict.reason}
    if asked is not None:
        said |= {"method": asked.method, "host": asked.host, "port": str(asked.port)}
    sentence = f"sbx refused by {verdict.rule}: {verdict.reason}"
    phrase = "".join(letter if " " <= letter <= "~" else "?" for letter in sentence)
    body = b"" if asked is not None and asked.method == "HEAD" else f"{sentence}\n".encode()
    head = (
        f"HTTP/1.1 {_STATUS.get(verdict.rule, _FORBIDDEN)} {phrase}\r\n"
        f"{HEADER}: {json.dumps(said)}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
