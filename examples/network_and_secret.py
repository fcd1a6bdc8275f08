"""A policy with a list of hosts and a secret. The code inside sees only a placeholder of the token.

A server on the loopback of the host plays the CRM. It needs the header with the real token.
"""

import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sbx import Sandbox

TOKEN = "the real token"
POLICY = """
schema = 1
extends = "networked"
description = "one host, with a token"
[network]
allow = ["127.0.0.2:{port}"]
allow_private = ["127.0.0.2"]
[[network.rule]]
host = "127.0.0.2"
methods = ["GET"]
[secrets.CRM]
env = "CRM_TOKEN"
hosts = ["127.0.0.2"]
from = "env:REAL_CRM_TOKEN"
allow_plain = true
"""
CODE = """
import os, urllib.error, urllib.request
token = os.environ["CRM_TOKEN"]
print("a placeholder" if token.startswith("sbx-secret-") else "the token itself")
def request(method, url):
    headers = {{"Authorization": "Bearer " + token}}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        return urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        return error.code
print(request("GET", "http://127.0.0.2:{port}/customers"))
print(request("DELETE", "http://127.0.0.2:{port}/customers"))
print(request("GET", "http://192.0.2.1/"))
"""


class Crm(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b'{"customers": 3}' if known else b"")

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


def main() -> None:
    os.environ["REAL_CRM_TOKEN"] = TOKEN
    server = HTTPServer(("127.0.0.2", 0), Crm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "crm.toml"
        policy.write_text(POLICY.format(port=port))
        with Sandbox(policy) as box:
            run = box.run(CODE.format(port=port))
            print(run.stdout if run.error is None else run.error.value)
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
