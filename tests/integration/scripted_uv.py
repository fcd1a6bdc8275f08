"""`uv` as a small script on PATH: it records its calls, and makes the files that are needed.

An environment of it has `tiny` and a hollow `ipykernel`: no kernel runs in it. It takes a tenth of
the time of one that pip makes. What real installers do is in test_environments.py, with pip.
"""

import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 60.0
HASH = "0" * 64  # of every package
_SCRIPT = r"""#!/bin/sh
echo "$*" >> {top}/calls
case "$1 $2" in
"--version ")
    echo "uv 0.9.1"
    ;;
"pip compile")
    while [ -e {top}/hang ]; do sleep 0.05; done
    for requirements; do :; done
    cat "$requirements" >> {top}/requirements
    version=$(sed -n 's/^tiny==//p' "$requirements")
    echo "ipykernel==9.0 --hash=sha256:{hash}"
    echo "tiny==${{version:-2.0}} --hash=sha256:{hash}"
    ;;
"pip install")
    for lock; do :; done
    site=$(echo "${{4%/bin/python}}"/lib/python3*/site-packages)
    sed -n 's/^\([a-z]*\)==\([0-9.]*\).*/\1 \2/p' "$lock" | while read -r name version; do
        mkdir "$site/$name-$version.dist-info"
        printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$name" "$version" \
            > "$site/$name-$version.dist-info/METADATA"
        : > "$site/$name.py"
    done
    : > "$site/IPython.py"
    ;;
*)
    echo "no call of uv that is expected: $*" >&2
    exit 2
    ;;
esac
"""


@dataclass(frozen=True)
class ScriptedUv:
    """`directory` is to be the first of PATH."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> "ScriptedUv":
        directory.mkdir()
        script = directory / "uv"
        script.write_text(_SCRIPT.format(top=directory, hash=HASH))
        script.chmod(0o755)
        return cls(directory)

    @property
    def calls(self) -> list[str]:
        """The words of each call, but for those that ask for its version."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line != "--version"]

    @property
    def requirements(self) -> list[str]:
        """The lines that it was to lock, of all calls."""
        return (self.directory / "requirements").read_text().splitlines()

    def forget(self) -> None:
        """Remove the records."""
        for name in ("calls", "requirements", "hang"):
            (self.directory / name).unlink(missing_ok=True)

    def hang(self) -> None:
        """From now on a call that locks does not end before `go_on`, or its own end."""
        (self.directory / "hang").touch()

    def go_on(self) -> None:
        (self.directory / "hang").unlink()

    def wait_for_call(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(call.startswith(words) for call in self.calls):
            assert time.monotonic() < deadline, f"uv was not called: {words}"
            time.sleep(0.02)
