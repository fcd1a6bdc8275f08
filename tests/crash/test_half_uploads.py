"""The service is killed while files are on their way in: what was there stays, and no more."""

import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from serving import Service, open_directory, service

C1 = {"conversation_id": "c1"}
HEAD = (
    "POST {url} HTTP/1.1\r\nHost: x\r\nConversation_id: c1\r\nContent-Length: 9000000\r\n"
    "Content-Type: multipart/form-data; boundary=B\r\n\r\n--B\r\n"
    'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
)


def begin_upload(running: Service, url: str, name: str) -> socket.socket:
    """An upload of which a part was sent."""
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(running.socket))
    caller.sendall(HEAD.format(url=url, name=name).encode() + b"n" * 3_000_000)
    return caller


def staged(data: Path) -> list[Path]:
    return list(data.rglob("staging/*"))


@pytest.mark.full_tier
def test_a_kill_in_the_middle_of_uploads_leaves_the_old_files_and_nothing_else() -> None:
    with open_directory() as top:
        with service(top=top) as running:
            with running.http() as client:
                body = {"user_id": "u", "agent_id": "a"}
                session = client.post("/api/v1/sessions", json=body).json()["session_id"]
                url = f"/api/v1/sessions/{quote(session)}/files"
                old = {"file": ("a.csv", b"old")}
                assert client.post(f"{url}/upload", data=C1, files=old).status_code == 201
            callers = [begin_upload(running, f"{url}/upload", n) for n in ("a.csv", "b.csv")]
            deadline = time.monotonic() + 60
            while len(staged(running.data)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
            for caller in callers:
                caller.close()
        assert len(staged(top / "data")) == 2
        with service(top=top) as running, running.http() as client:
            assert staged(running.data) == []
            assert client.get(url, params=C1).json()["files"] == ["a.csv"]
            assert client.get(f"{url}/a.csv", params=C1).content == b"old"
            new = {"file": ("a.csv", b"new")}
            assert client.post(f"{url}/upload", data=C1, files=new).status_code == 201
            code = "open('/workspace/uploads/temparea/a.csv').read()"
            answer = client.post(
                f"/api/v1/sessions/{quote(session)}/execute", json={**C1, "code": code}
            ).json()
            assert answer["result"] == "'new'"
