"""The main job, on real input: penguins in, a table and a figure out, and three things refused."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

import sbx

OUT = Path(os.environ.get("SBX_DEMO_OUT", "out"))
console = Console(highlight=False, soft_wrap=True)

LOAD = """
import pandas as pd
penguins = pd.read_csv('/workspace/uploads/temparea/penguins.csv')
len(penguins)
"""
TABLE = """
table = penguins.groupby(['species', 'island'])[['bill_length_mm', 'body_mass_g']].mean().round(1)
table.to_csv('table.csv')
print(table)
"""
FIGURE = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(7, 4.5))
for species, birds in penguins.groupby('species'):
    axes.scatter(birds['flipper_length_mm'], birds['body_mass_g'], s=14, label=species)
axes.set(xlabel='flipper length (mm)', ylabel='body mass (g)', title='Palmer penguins')
axes.legend()
figure.savefig('penguins.png', dpi=120)
"""
NETWORK = """
import socket
socket.create_connection(('192.0.2.1', 80), timeout=3)
"""
MEMORY = """
hoard = []
while True:
    hoard.append(bytearray(8 << 20))
"""


def main() -> int:
    """Print each step as it is done. Exit code 0 when all went as it should, refusals included."""
    narrower = {"limits": {"memory_max": "512MiB"}}
    with step("a sandbox, with the policy data-science"):
        box = sbx.Sandbox(policy="data-science", narrower=narrower)
    with box:
        with step("its kernel, with pandas imported and every wall up"):
            receipt = box.start()
        analyse(box)
        fetch(box)
        refused = refusals(box)
        with step("the sandbox still answers"):
            answer = box.run("6 * 7")
        console.print(f"    6 * 7 = {answer.result}; variables lost: {answer.state_lost}")
        weaker = [wall for wall in receipt.walls if wall["weaker"]]
        for wall in weaker:
            console.print(f"    best effort on this host: {wall['name']} by {wall['means']}")
    return 0 if refused and answer.result == "42" else 1


def analyse(box: sbx.Sandbox) -> None:
    with step("upload penguins.csv (344 birds, CC0)"):
        upload = box.uploads.put(penguins_csv())
    console.print(f"    {upload.path}: {upload.size} bytes, sha256 {upload.sha256[:16]}…")
    with step("load it with pandas"):
        rows = box.run(LOAD)
    console.print(f"    {rows.result} rows, kept in a variable for the next cells")
    with step("a grouped table"):
        table = box.run(TABLE)
    console.print(table.stdout.rstrip(), style="cyan")
    with step("a figure"):
        figure = box.run(FIGURE)
    for run in (rows, table, figure):
        if not run.ok:
            raise SystemExit(f"the analysis failed: {run.error}")


def fetch(box: sbx.Sandbox) -> None:
    OUT.mkdir(exist_ok=True)
    for name in ("table.csv", "penguins.png"):
        (OUT / name).write_bytes(box.files.read_bytes(name))
    console.print(f"    fetched {(OUT / 'penguins.png').resolve()}")
    console.print(f"    fetched {(OUT / 'table.csv').resolve()}")


def refusals(box: sbx.Sandbox) -> bool:
    """Try what must not work, and show what the code saw. True when all of it was refused."""
    secret = a_file_of_home()
    tries = [
        ("read the host's /etc/shadow", "open('/etc/shadow').read()"),
        ("read a file of the host's home", f"open({str(secret)!r}).read()"),
        ("open a network connection", NETWORK),
        ("eat more memory than the 512 MiB allowed", MEMORY),
    ]
    all_refused = True
    for what, code in tries:
        with step(f"try to {what}"):
            run = box.run(code)
        all_refused &= not run.ok
        seen = f"{run.error.name}: {run.error.value}" if run.error else run.text
        verdict = "[green]refused[/]" if not run.ok else "[red]NOT REFUSED[/]"
        cause = f" ({run.status}, {run.cause})" if run.cause else ""
        console.print(f"    {verdict}{cause} ", end="")
        console.print(seen, markup=False)
    return all_refused


def penguins_csv() -> Path:
    """The data set inside the installed package, found without running the package."""
    found = importlib.util.find_spec("palmerpenguins")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("error: palmerpenguins is not installed\nhint: run scripts/run")
    return Path(found.submodule_search_locations[0]) / "data" / "penguins.csv"


def a_file_of_home() -> Path:
    """Any file of the home directory of whoever runs this; inside there is no such directory."""
    files = (path for path in sorted(Path.home().glob(".*")) if path.is_file())
    return next(files, Path.home() / ".profile")


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being done, then how long it took."""
    began = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[bold]•[/] {what} [dim]{(time.perf_counter() - began) * 1000:.0f} ms[/]")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except sbx.SbxError as error:
        console.print(f"[red]error:[/] {error.message}")
        if error.hint:
            console.print(f"hint: {error.hint}")
        sys.exit(3)
