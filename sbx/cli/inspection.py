"""What `sbx inspect` tells a person: a sandbox, what is in it, and the walls around each kernel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbx.cli import moments
from sbx.cli.tables import print_table
from sbx.cli.terminal import STDOUT, one_line, write

_WIDTH = 12
_MEANS = {"memory": "memory_max", "tasks": "tasks_max", "cpu": "cpu_quota"}
Told = Mapping[str, Any]


def show(told: Told) -> None:
    """All of it. What it lacks for this caller is left out."""
    _print(_of_sandbox(told))
    talks = [
        (
            one["conversation_id"],
            one["status"],
            str(one["files"]),
            size(one["bytes"]),
            moments.since(one["created_at"]),
        )
        for one in told["conversations"]
    ]
    if talks:
        write(STDOUT, "\n")
        print_table(("conversation", "state", "files", "size", "made"), talks)
    if told["attachments"]:
        write(STDOUT, "\n")
        print_table(
            ("attached at", "directory", "access"),
            [
                (
                    one["target"],
                    one["source"] or "(of the host)",
                    "read-only" if one["read_only"] else "writable",
                )
                for one in told["attachments"]
            ],
        )
    for kernel in told["kernels"]:
        write(STDOUT, "\n")
        _print(_of_kernel(kernel))
        write(STDOUT, "\n")
        print_table(("wall", "asked for", "in force"), walls(kernel["receipt"]))


def walls(receipt: Told) -> list[tuple[str, str, str]]:
    """A row for each wall, with what it comes to here; those that linux itself counts, too."""
    limits, filters = receipt["limits"], receipt["seccomp"]
    rows = [("network", "", receipt["network"])]
    for wall in receipt["walls"]:
        name, means = wall["name"], wall["means"]
        held = limits.get(_MEANS.get(name, ""))
        if name == "seccomp":
            means += f": {', '.join(f'{one} {filters[one][:12]}' for one in filters)}"
        elif name in _MEANS and held is not None:
            means = f"{_amount(name, held)}, by {means}"
        elif name == "io" and limits.get("io"):
            means += f": {', '.join(map(str, limits['io']))}"
        rows.append((name, wall["demanded"], f"weaker: {means}" if wall["weaker"] else means))
    return rows


def changes(receipt: Told) -> list[str]:
    """What linux says otherwise than at the kernel's start; nothing is how it is to be."""
    return [
        f"{name} is {_value(one['now'])}, and was {_value(one['was'])}"
        for name, one in receipt["changed"].items()
    ]


def size(count: float) -> str:
    """Bytes in the largest unit that leaves no long number."""
    step = min(4, int(math.log(count, 1024))) if count >= 1 else 0
    amount = count / 1024**step
    shown = f"{amount:.0f}" if amount >= 10 or amount == int(amount) else f"{amount:.1f}"
    return f"{shown} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"


def _of_sandbox(told: Told) -> Iterator[tuple[str, str]]:
    box, failure = told["sandbox"], told["failure"]
    yield "sandbox", box["id"]
    yield "state", box["status"] + (", stopped by request" if told["stopped"] else "")
    if failure is not None:
        yield "failure", f"{failure['code']}: {failure['message']}"
        yield "hint", failure.get("hint") or ""
    yield "policy", box["profile"]
    yield "owner", told["owner"]
    for name in ("session_id", "user_id", "agent_id"):
        yield name.removesuffix("_id"), told[name] or ""
    yield "made", moments.since(box["created_at"])
    yield "expires", moments.since(box["expires_at"]) or "never"
    yield "idle", f"closed {moments.since(one)}" if (one := box["idle_expires_at"]) else ""
    yield "cargo", box["cargo_id"]
    yield "may", ", ".join(box["capabilities"])
    yield "limits", ", ".join(f"{name} {value}" for name, value in told["limits"].items())
    yield "network", _network(told["network"])
    yield "narrower", _value(told["narrower"]) if told["narrower"] else ""
    yield "env", ", ".join(f"{name}={value}" for name, value in (told["env"] or {}).items())


def _network(rule: Told) -> str:
    if rule["mode"] == "none":
        return "none"
    caps = f"{rule['connections_max']} connections, {rule['bytes_max']}, {rule['time_max']} each"
    parts = [f"to {', '.join(rule['allow']) or 'no host'}"]
    if rule["allow_private"]:
        parts.append(f"private are {', '.join(rule['allow_private'])}")
    for one in rule["rule"]:
        methods, paths = (
            f"any {name}" if one[key] == "any" else ", ".join(one[key])
            for key, name in (("methods", "method"), ("paths", "path"))
        )
        parts.append(f"of {one['host']} {methods} at {paths}")
    return f"by a proxy; {'; '.join(parts)}; at most {caps}"


def _of_kernel(kernel: Told) -> Iterator[tuple[str, str]]:
    receipt = kernel["receipt"]
    context = kernel["context"]
    beside = "" if context == "default" else f", context {context}"
    yield "kernel", f"of {kernel['conversation']}{beside}"
    yield "state", "busy" if kernel["busy"] else "ready"
    yield "made by", receipt["path"]
    yield "not faster", receipt["fallback"]
    yield "python", receipt["python"]
    for name, why in receipt["preload_failed"].items():
        yield "not loaded", f"{name}: {why}"
    yield "host pids", " ".join(map(str, kernel["host_pids"]))
    yield "host uid", str(receipt["host_uid"])
    held = "none" if receipt["capabilities"] == 0 else hex(receipt["capabilities"])
    yield "rights", f"capabilities {held}, no_new_privs {_value(receipt['no_new_privs'])}"
    yield "read back", moments.clock(receipt["read_at"])
    found = changes(receipt)
    for line in found:
        yield "CHANGED", line
    if not found:
        yield "changed", "nothing since its start"


def _amount(wall: str, held: float) -> str:
    if wall == "memory":
        return size(held)
    return f"{held:g} CPU" if wall == "cpu" else f"{held:g}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> None:
    """What is empty is left out."""
    write(STDOUT, "".join(f"{head:{_WIDTH}}{one_line(said)}\n" for head, said in rows if said))
