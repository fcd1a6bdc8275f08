"""The sessions API with a client that is written and compiled in Go."""

import os
import subprocess
from pathlib import Path

import pytest
from places import short_directory
from service_process import service

from tests.debian_tools import debian_tool

_SOURCE = Path(__file__).parent / "go_client" / "main.go"
_KEY = "sk-go-client-0123456789abcdef0123456789"


@pytest.mark.needs("go")
@pytest.mark.timeout(300)  # the first compilation on a machine compiles net/http too
def test_a_go_program_creates_polls_uploads_executes_and_deletes(tmp_path: Path) -> None:
    go = debian_tool("go")
    assert go is not None
    built = tmp_path / "client"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sbx-checks")
    compiled = subprocess.run(
        [go, "build", "-o", built, _SOURCE],
        cwd=tmp_path,
        env={
            **os.environ,
            "GOROOT": str(Path(go).resolve().parent.parent),
            "GOCACHE": str(cache / "go-build"),
            "GOPATH": str(tmp_path),
            "GOFLAGS": "-mod=mod",
            "CGO_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    with (
        short_directory() as directory,
        service(directory, "--listen", "127.0.0.1:0", env={"SBX_API_KEY": _KEY}) as served,
    ):
        address = next(word for word in served.log.split() if "127.0.0.1:" in word)
        ended = subprocess.run(
            [built, address.strip('",')],
            env={"SBX_KEY": _KEY},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "sb-session-gopher-go 7200 ok 42\n"
