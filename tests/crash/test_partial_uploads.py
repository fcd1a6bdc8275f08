"""The service is killed while an upload in pieces is on its way: its pieces are removed."""

import os
import signal

import pytest
from serving import open_directory, service


@pytest.mark.full_tier
def test_pieces_of_a_killed_service_are_removed() -> None:
    with open_directory() as top:
        with service(top=top) as running, running.http() as client:
            box = client.post("/v1/sandboxes", json={}).json()["id"]
            at = f"/v1/sandboxes/{box}/conversations/default"
            begun = client.post(f"{at}/partials", json={"path": "f", "size": 4}).json()
            assert list(running.data.rglob("staging/*partial*"))
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
        assert list((top / "data").rglob("staging/*partial*"))
        with service(top=top) as running, running.http() as client:
            assert not list(running.data.rglob("staging/*"))
            gone = client.get(f"{at}/partials/{begun['id']}")
            assert (gone.status_code, gone.json()["error"]["code"]) in (
                (404, "upload_not_found"),
                (404, "not_found"),
            )
