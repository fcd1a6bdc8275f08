"""A process without a free descriptor refuses work for a while. That is no bug of sbx."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from sbx import settings_files
from sbx.api.errors import status_of
from sbx.api.middleware import RequestLimitsMiddleware
from sbx.errors import SbxError, Unavailable, out_of_files
from sbx.runtime.run.executor import as_sbx_error

FULL = OSError(errno.EMFILE, "Too many open files")


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/", os.O_PATH)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_full_table_of_files_is_unavailable(number: int) -> None:
    refusal = out_of_files(OSError(number, "full"))
    assert refusal is not None
    assert (refusal.code, status_of(refusal)) == ("too_many_open_files", 503)
    assert refusal.details == {"retry_after_s": 1.0}


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "gone"), ValueError("wrong")])
def test_other_errors_are_not(error: Exception) -> None:
    assert out_of_files(error) is None


def test_run_without_a_descriptor_is_not_a_bug() -> None:
    assert as_sbx_error(FULL).code == "too_many_open_files"
    assert as_sbx_error(RuntimeError("wrong")).code == "internal_error"


def test_settings_without_a_descriptor_are_not_wrong(tmp_path: Path) -> None:
    """They were `invalid_settings`, a 400, at each start of a kernel in a busy service."""
    path = tmp_path / "sbx.toml"
    path.write_text("kernels_max = 1\n")
    error: SbxError | None = None
    with no_free_descriptor():
        try:
            settings_files.read(path)
        except SbxError as raised:
            error = raised
    assert isinstance(error, Unavailable)
    assert error.code == "too_many_open_files"


async def test_request_without_a_descriptor_is_a_503() -> None:
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise FULL

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/health",
        "raw_path": b"/health",
        "query_string": b"",
        "headers": [(b"host", b"sbx")],
    }
    await RequestLimitsMiddleware(app)(scope, receive, send)
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
