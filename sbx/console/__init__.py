"""The web page of the console: where its built files are, and which build they are.

`source/` has the TypeScript, `static/` what `scripts/console` makes from it. The wheel has only the
built files.
"""

from functools import cache
from pathlib import Path

STATIC = Path(__file__).with_name("static")


@cache
def build() -> str:
    """Return the id of the build: a digest of its files. The page reloads when it changes."""
    return (STATIC / "BUILD").read_text(encoding="ascii").strip()
