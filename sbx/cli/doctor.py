"""`sbx doctor`: which walls and which paths this host gives, what to do for the others, and with
--attack whether they hold."""

from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import report
from sbx.cli.exits import Exit
from sbx.cli.terminal import STDOUT, one_line, write

if TYPE_CHECKING:
    from sbx.cli.besieged import Siege
    from sbx.cli.examine import Examination, Live
    from sbx.isolation.receipt import Receipt


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    attack: Annotated[
        bool,
        typer.Option("--attack", help="Attack throw-away sandboxes, and tell what held."),
    ] = False,
) -> int:
    """Try every layer of this host, and start a sandbox by each path.

    What is missing is named with its cause and its remedy. A path is a way to start a kernel: cold
    is the one that always works; fork and pool are faster, with the same walls. Ends with 0 when
    the policy `default` runs here, else with 3.

    With --attack, some hundred attacks are tried in sandboxes of the shipped policies instead, in
    less than a minute; none harms this host should its wall be missing. Ends with 0 when all were
    held, with 1 when one escaped, and with 3 when not all could be tried.
    """
    import asyncio

    if attack:
        return _attack(as_json=as_json)

    from sbx.cli.examine import examine

    found = asyncio.run(examine())
    if as_json:
        report.document(
            {
                "ok": found.ok,
                "linux": found.linux,
                "machine": found.machine,
                "root": found.root,
                "layers": [
                    {
                        "name": layer.name,
                        "found": layer.found,
                        "detail": layer.detail,
                        "cause": layer.cause,
                        "remedy": layer.remedy,
                    }
                    for layer in found.layers
                ],
                "policies": [verdict.to_dict() for verdict in found.verdicts],
                "languages": [one.to_dict() for one in found.languages],
                "live": found.live.to_dict(),
                "paths": [
                    {
                        "path": one.path,
                        "ok": one.ok,
                        "duration_s": round(one.duration_s, 3),
                        "error": one.error.to_dict() if one.error else None,
                    }
                    for one in found.paths
                ],
            }
        )
    else:
        _print(found)
    return Exit.OK if found.ok else Exit.REFUSED


def _attack(*, as_json: bool) -> int:
    import asyncio

    from sbx.cli.besieged import besiege

    siege = asyncio.run(besiege())
    if as_json:
        report.document(siege.to_dict())
    else:
        _print_siege(siege)
    if siege.escaped:
        return Exit.FAILED
    return Exit.OK if siege.complete else Exit.REFUSED


def _print_siege(siege: "Siege") -> None:
    from sbx.cli.tables import print_table

    for heads, rows in siege.tables():
        print_table(heads, rows)
        write(STDOUT, "\n")
    write(STDOUT, "".join(f"{one_line(line)}\n" for line in siege.sentences()))
    told = siege.to_dict()
    write(
        STDOUT,
        f"{told['tried']} attacks tried in {siege.duration_s:.0f} s: {told['held']} held,"
        f" {len(siege.escaped)} escaped, {len(siege.unclear)} unclear\n",
    )


def _print(found: "Examination") -> None:
    from sbx.cli.tables import print_table

    who = "root" if found.root else "an unprivileged user"
    write(STDOUT, f"linux {found.linux} on {found.machine}, as {who}\n\n")
    print_table(
        ("layer", "state", "detail"),
        [(one.name, "found" if one.found else "missing", one.detail) for one in found.layers],
    )
    write(STDOUT, "\n")
    print_table(
        ("policy", "runs here", "walls that are weaker here"),
        [
            (
                one.policy,
                "yes" if one.runs else "no",
                ", ".join(wall for wall, _ in one.weaker) or ("none" if one.runs else ""),
            )
            for one in found.verdicts
        ],
    )
    write(STDOUT, "\n")
    print_table(
        ("path", "works here", "sandbox to result"),
        [
            (one.path, *(("yes", f"{one.duration_s * 1000:.0f} ms") if one.ok else ("no", "")))
            for one in found.paths
        ],
    )
    write(STDOUT, "\n")
    print_table(
        ("language", "runs here", "by"),
        [(one.language, "yes" if one.path else "no", one.path or "") for one in found.languages],
    )
    write(STDOUT, "\n" + "".join(f"{line}\n" for line in _advice(found)))
    write(STDOUT, f"{one_line(_live(found.live))}\n")


def _advice(found: "Examination") -> list[str]:
    """Outside of the tables, so that a command can be copied as one line."""
    lines = []
    for layer in found.layers:
        if not layer.found:
            lines.append(f"missing: {layer.name}: {one_line(layer.cause or layer.detail)}")
            lines += [f"   hint: {one_line(layer.remedy)}"] if layer.remedy else []
    weaker = {wall: means for one in found.verdicts for wall, means in one.weaker}
    lines += [f" weaker: {wall}: {means}" for wall, means in weaker.items()]
    for one in found.verdicts:
        if one.cause:
            lines.append(f"  no {one.policy}: {one_line(one.cause)}")
        if one.lacks:
            lines.append(f"   note: {one.policy} preloads {', '.join(one.lacks)}: not installed")
    for spoken in found.languages:
        if spoken.remedy is not None:
            lines.append(f"     no {spoken.language}: {spoken.remedy}")
    if found.live.ok:  # else there is nothing to be faster than
        for check in found.paths:
            if check.error is not None:
                lines.append(f"   slow: no {check.path}: {one_line(check.error.message)}")
    return [*lines, ""] if lines else []


def _live(live: "Live") -> str:
    if live.error is not None:
        return f"live check: failed: {live.error.message}"
    assert live.receipt is not None
    return f"live check: 1 + 1 = 2 in {live.duration_s:.2f} s; {_summary(live.receipt)}"


def _summary(receipt: "Receipt") -> str:
    """The receipt in a sentence: what linux itself says is in force."""
    limits = ", ".join(
        f"{name} {value}" for name, value in receipt.limits.items() if value not in (None, [])
    )
    return (
        f"host uid {receipt.host_uid}, namespaces {' '.join(receipt.namespaces)}, "
        f"no capabilities, seccomp {' + '.join(receipt.seccomp)}, "
        f"Landlock ABI {receipt.landlock_abi}, network {receipt.network}, "
        f"cgroup limits {limits or 'none'}"
    )
