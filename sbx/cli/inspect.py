"""`sbx inspect`: one sandbox in full, its conversations, and the walls around each kernel."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write

_WIDTH = 12
_MEANS = {"memory": "memory_max", "tasks": "tasks_max", "cpu": "cpu_quota"}
_Document = Mapping[str, Any]


def inspect(
    sandbox_id: connect.Id,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show one sandbox in full: its conversations, host pids, and the receipt of its walls.

    The command reads the walls back from Linux now. --json has all details, such as the namespaces.
    """
    path = connect.sandbox_path(sandbox_id, "inspect")
    document = connect.ask(socket, key, lambda client: client.request("GET", path))
    if as_json:
        output.document(document)
    else:
        _show(document)
    return exits.Exit.OK


def _show(document: _Document) -> None:
    """Print the whole document. Omit fields that this caller may not see."""
    _print(_of_sandbox(document))
    conversations = [
        (
            conversation["conversation_id"],
            conversation["status"],
            str(conversation["files"]),
            output.size(conversation["bytes"]),
            output.since(conversation["created_at"]),
        )
        for conversation in document["conversations"]
    ]
    if conversations:
        write(STDOUT, "\n")
        output.print_table(("conversation", "state", "files", "size", "made"), conversations)
    if document["mounts"]:
        write(STDOUT, "\n")
        output.print_table(
            ("mounted at", "directory", "access"),
            [
                (
                    mount["target"],
                    mount["source"] or "(of the host)",
                    "read-only" if mount["read_only"] else "writable",
                )
                for mount in document["mounts"]
            ],
        )
    for kernel in document["kernels"]:
        write(STDOUT, "\n")
        _print(_of_kernel(kernel))
        write(STDOUT, "\n")
        output.print_table(("wall", "asked for", "in force"), walls(kernel["receipt"]))


def walls(receipt: _Document) -> list[tuple[str, str, str]]:
    """Return a row for each wall, with its effect on this host, including the values that Linux
    itself reports."""
    limits, filters = receipt["limits"], receipt["seccomp"]
    rows = [("network", "", receipt["network"])]
    for wall in receipt["walls"]:
        name, means = wall["name"], wall["means"]
        limit = limits.get(_MEANS.get(name, ""))
        if name == "seccomp":
            means += f": {', '.join(f'{layer} {filters[layer][:12]}' for layer in filters)}"
        elif name in _MEANS and limit is not None:
            means = f"{_amount(name, limit)}, by {means}"
        elif name == "io" and limits.get("io"):
            means += f": {', '.join(map(str, limits['io']))}"
        rows.append((name, wall["demanded"], f"weaker: {means}" if wall["weaker"] else means))
    return rows


def changes(receipt: _Document) -> list[str]:
    """Return the differences between Linux's report now and at the kernel's start. There should be
    none."""
    return [
        f"{name} is {_value(change['now'])}, and was {_value(change['was'])}"
        for name, change in receipt["changed"].items()
    ]


def _of_sandbox(document: _Document) -> Iterator[tuple[str, str]]:
    box, failure = document["sandbox"], document["failure"]
    yield "sandbox", box["id"]
    yield "state", box["status"] + (", stopped by request" if document["stopped"] else "")
    if failure is not None:
        yield "failure", f"{failure['code']}: {failure['message']}"
        yield "hint", failure.get("hint") or ""
    yield "policy", box["profile"]
    yield "owner", document["owner"]
    for name in ("session_id", "user_id", "agent_id"):
        yield name.removesuffix("_id"), document[name] or ""
    yield "made", output.since(box["created_at"])
    yield "expires", output.since(box["expires_at"]) or "never"
    yield "idle", f"closed {output.since(end)}" if (end := box["idle_expires_at"]) else ""
    yield "workspace", box["cargo_id"]
    yield "may", ", ".join(box["capabilities"])
    yield "limits", ", ".join(f"{name} {value}" for name, value in document["limits"].items())
    yield "network", _network(document["network"])
    yield "narrower", _value(document["narrower"]) if document["narrower"] else ""
    yield "env", ", ".join(f"{name}={value}" for name, value in (document["env"] or {}).items())


def _network(rule: _Document) -> str:
    if rule["mode"] == "none":
        return "none"
    caps = f"{rule['connections_max']} connections, {rule['bytes_max']}, {rule['time_max']} each"
    parts = [f"to {', '.join(rule['allow']) or 'no host'}"]
    if rule["allow_private"]:
        parts.append(f"private are {', '.join(rule['allow_private'])}")
    for entry in rule["rule"]:
        methods, paths = (
            f"any {name}" if entry[key] == "any" else ", ".join(entry[key])
            for key, name in (("methods", "method"), ("paths", "path"))
        )
        parts.append(f"of {entry['host']} {methods} at {paths}")
    return f"by a proxy; {'; '.join(parts)}; at most {caps}"


def _of_kernel(kernel: _Document) -> Iterator[tuple[str, str]]:
    receipt = kernel["receipt"]
    context = kernel["context"]
    suffix = "" if context == "default" else f", context {context}"
    yield "kernel", f"of {kernel['conversation']}{suffix}"
    yield "state", "busy" if kernel["busy"] else "ready"
    yield "made by", receipt["path"]
    yield "not faster", receipt["fallback"]
    yield "python", receipt["python"]
    for name, cause in receipt["preload_failed"].items():
        yield "not loaded", f"{name}: {cause}"
    yield "host pids", " ".join(map(str, kernel["host_pids"]))
    yield "host uid", str(receipt["host_uid"])
    capabilities = "none" if receipt["capabilities"] == 0 else hex(receipt["capabilities"])
    yield "rights", f"capabilities {capabilities}, no_new_privs {_value(receipt['no_new_privs'])}"
    yield "read back", output.clock(receipt["read_at"])
    differences = changes(receipt)
    for line in differences:
        yield "CHANGED", line
    if not differences:
        yield "changed", "nothing since its start"


def _amount(wall: str, limit: float) -> str:
    if wall == "memory":
        return output.size(limit)
    return f"{limit:g} CPU" if wall == "cpu" else f"{limit:g}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(element)}" for name, element in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> None:
    """Print the rows that have a value."""
    write(STDOUT, "".join(f"{head:{_WIDTH}}{one_line(value)}\n" for head, value in rows if value))
