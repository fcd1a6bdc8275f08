"""A service in a user namespace: users of the outside who have no uid there are not one owner."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import short_directory
from service_process import Service, service

from sbx.linux.namespaces import unmapped_uid

CALL = """
import json, os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[1])
    asking.sendall(b"GET /v1/sandboxes HTTP/1.1\\r\\nhost: sbx\\r\\nconnection: close\\r\\n\\r\\n")
    reply = b"".join(iter(lambda: asking.recv(65536), b""))
print(reply.split()[1].decode(), reply.partition(b"\\r\\n\\r\\n")[2].decode())
"""


@pytest.fixture(scope="module")
def within() -> Iterator[Service]:
    namespace = ["unshare", "-U", "--map-user=4242"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    with short_directory() as top, service(top, launcher=namespace) as started:
        started.socket.parent.chmod(0o755)
        started.socket.chmod(0o666)
        yield started


def called(started: Service, uid: int) -> tuple[int, dict[str, Any]]:
    reply = subprocess.run(
        [sys.executable, "-c", CALL, str(started.socket), str(uid)],
        check=True,
        capture_output=True,
        text=True,
    )
    status, _, body = reply.stdout.partition(" ")
    return int(status), json.loads(body)


@pytest.mark.needs("root")
def test_a_user_without_a_uid_in_the_namespace_needs_a_key(within: Service) -> None:
    """All of them once were the owner `uid:65534`, and saw each other's sandboxes."""
    for uid in (1001, 1002):
        status, body = called(within, uid)
        assert (status, body["error"]["code"]) == (401, "unauthorized")
        assert "key" in body["error"]["hint"]


@pytest.mark.needs("root")
def test_the_user_of_the_service_is_still_a_peer(within: Service) -> None:
    assert called(within, os.geteuid()) == (200, {"items": [], "next_cursor": None})


def test_where_every_uid_is_mapped_none_is_shared() -> None:
    maps = Path("/proc/self/uid_map").read_text().split()
    all_mapped = maps == ["0", "0", "4294967295"]
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    assert unmapped_uid() == (None if all_mapped else overflow)
